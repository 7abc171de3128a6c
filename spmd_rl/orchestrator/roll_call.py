"""Answers that are complete when every party has given its own: steps, loaded weights, saved checkpoints.

Promises: an answer counts once; `all` gives the answers in order of party.  Knows nothing of what is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class RollCall(Generic[T]):
    """One call per key (a version), answered by each of `parties` (ranks)."""

    def __init__(self, name: str, parties: Iterable[int]) -> None:
        self._name, self._parties = name, sorted(parties)
        self._answers: dict[int, dict[int, T]] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def answer(self, key: int, party: int, value: T) -> None:
        answers = self._answers.setdefault(key, {})
        if party not in self._parties or party in answers:
            raise RuntimeError(f"{self._name} {key}: rank {party} answered again, or was never asked")
        answers[party] = value
        if len(answers) == len(self._parties) and (future := self._waiting.pop(key, None)) and not future.done():
            future.set_result(None)

    async def all(self, key: int) -> list[T]:
        """Wait until every party has answered; the answers are forgotten.  Unblocked by the last `answer`."""
        if len(self._answers.setdefault(key, {})) < len(self._parties):
            self._waiting[key] = asyncio.get_running_loop().create_future()
            await self._waiting[key]
        answers = self._answers.pop(key)
        return [answers[party] for party in self._parties]
