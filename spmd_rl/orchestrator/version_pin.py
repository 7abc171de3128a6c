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

from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.roll_call import RollCall


class VersionPin:
    """One hold at a time."""

    def __init__(
        self,
        *,
        engines: Sequence[int],  # ranks
        ask: Callable[[int, int | None], None],  # (number of the question, hold above this version; None: let go)
        policy: Policy,
    ) -> None:
        self._send, self._policy = ask, policy
        self._answers: RollCall[tuple[int, float]] = RollCall("pin", engines)
        self._number = 0
        self.stall_s = 0.0  # that weights waited in the last hold, at the engine where they waited longest

    def answered(self, number: int, rank: int, version: int, held_s: float) -> None:
        self._answers.answer(number, rank, (version, held_s))

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[int]:
        """Waits for all engines to be at one version, and the policy too."""
        try:
            versions = [version for version, _ in await self._ask(self._policy.version)]
            if min(versions) < max(versions):
                await self._ask(max(versions))
            await self._policy.reached(max(versions))
            yield max(versions)
        except BaseException:  # a cancellation too: no engine may be left holding weights; it is raised again
            self._number += 1
            self._send(self._number, None)
            raise
        self.stall_s = max(held_s for _, held_s in await self._ask(None))

    async def _ask(self, upto: int | None) -> list[tuple[int, float]]:
        self._number += 1
        self._send(self._number, upto)
        return await self._answers.all(self._number)
