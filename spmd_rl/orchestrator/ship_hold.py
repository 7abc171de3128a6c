"""The ship-side gate: batch k is held until the policy's version is at least k - S.

Given the policy, S and a clock.  Promises: at most S + 1 batches are shipped and untrained.  While one is parked
everything else turns; the time parked is counted.  Knows nothing of batches beyond their index.
"""

from __future__ import annotations

from collections.abc import Callable

from spmd_rl.orchestrator.policy import Policy


def may_ship(index: int, *, version: int, max_staleness: int) -> bool:
    """version >= index - S."""
    return version >= index - max_staleness


class ShipHold:
    """Hold every batch, one after the other."""

    def __init__(self, policy: Policy, *, max_staleness: int, clock: Callable[[], float]) -> None:
        self.parked_s = 0.0  # so far, all batches
        self._policy, self._max_staleness, self._clock = policy, max_staleness, clock

    async def wait(self, index: int) -> float:
        """Wait until batch `index` may be shipped; seconds parked.  Unblocked by the policy's advance."""
        start = self._clock()
        if not may_ship(index, version=self._policy.version, max_staleness=self._max_staleness):
            await self._policy.reached(index - self._max_staleness)
        parked_s = self._clock() - start
        self.parked_s += parked_s
        return parked_s
