"""Keeps all engines at one version while an evaluation runs beside training.

    async with pin.hold() as version:
        …  # every token that is sampled meanwhile is of this version

Every engine stops swapping where it is and says where that is; those that are behind the newest go on up to it.  New
weights that arrive meanwhile wait, and the trainers behind them: `stall_s` says how long.
Given a way to ask the engines.  Knows nothing of evaluations.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from spmd_rl.orchestrator.answers import Answers
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.packing.messages import Message, PinVersion, VersionPinned


class VersionPin:
    """One hold at a time."""

    def __init__(
        self,
        *,
        engines: Sequence[int],  # ranks
        send: Callable[[int, Message], None],
        answers: Answers,
        policy: Policy,
    ) -> None:
        self._engines, self._send, self._answers, self._policy = engines, send, answers, policy
        self._number = 0
        self.stall_s = 0.0  # that weights waited in the last hold, at the engine where they waited longest

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[int]:
        """Waits for all engines to be at one version, and the policy too."""
        try:
            versions = [answer.version for answer in await self._ask(self._policy.version)]
            if min(versions) < max(versions):
                await self._ask(max(versions))
            await self._policy.reached(max(versions))
            yield max(versions)
        except BaseException:  # a cancellation too: no engine may be left holding weights; it is raised again
            self._tell(None)
            raise
        self.stall_s = max(answer.held_s for answer in await self._ask(None))

    async def _ask(self, upto: int | None) -> list[VersionPinned]:
        self._tell(upto)
        return await self._answers.all(VersionPinned, self._number, self._engines)

    def _tell(self, upto: int | None) -> None:
        self._number += 1
        for engine in self._engines:
            self._send(engine, PinVersion(number=self._number, upto=upto))
