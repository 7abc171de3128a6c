"""Answers of ranks that are complete when every rank that was asked has given its own.

Promises: a rank answers once; `all` gives the answers in the order of the ranks.  Knows nothing of what is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from spmd_rl.packing.messages import Answer

A = TypeVar("A", bound=Answer)
Question = tuple[type[Answer], int]  # the kind of the answers, and their version or number


class Answers:
    """`add` each as it comes, wait for `all` of a question."""

    def __init__(self) -> None:
        self._given: dict[Question, dict[int, Answer]] = {}  # by rank
        self._waiting: dict[Question, tuple[set[int], asyncio.Future[None]]] = {}

    def add(self, rank: int, answer: Answer) -> None:
        """Raises RuntimeError where the rank has answered before."""
        question = type(answer), answer.key
        given = self._given.setdefault(question, {})
        if rank in given:
            raise RuntimeError(f"rank {rank} answered {_text(question)} again")
        given[rank] = answer
        if question in self._waiting:
            ranks, future = self._waiting[question]
            if ranks <= given.keys() and not future.done():
                future.set_result(None)

    async def all(self, kind: type[A], key: int, ranks: Sequence[int]) -> list[A]:
        """Wait until these ranks have answered; the answers are forgotten.  Unblocked by the last `add`."""
        question: Question = kind, key
        given = self._given.setdefault(question, {})
        if not given.keys() >= set(ranks):
            future = asyncio.get_running_loop().create_future()
            self._waiting[question] = set(ranks), future
            try:
                await future
            finally:
                del self._waiting[question]
        del self._given[question]
        if others := given.keys() - set(ranks):
            raise RuntimeError(f"rank {min(others)} answered {_text(question)}, which it was not asked")
        return [answer for rank in ranks if isinstance(answer := given[rank], kind)]


def _text(question: Question) -> str:
    kind, key = question
    return f"{kind.__name__} {key}"
