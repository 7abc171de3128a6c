"""Numbers at a fixed interval, whether or not anything else moves.

Given named callables (each a number of this moment), where to emit them, and checks that raise when a promise is broken
(the ledger).  Promises: ticks lie on a fixed grid; a blocked event loop makes a tick late (`late_s`), never doubled.
Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence


class MetricsLoop:
    """`run` as a task; cancel it to end it."""

    def __init__(
        self,
        *,
        interval_s: float,
        collect: Mapping[str, Callable[[], float]],
        emit: Callable[[dict[str, float]], None],
        checks: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._interval_s, self._collect, self._emit, self._checks = interval_s, collect, emit, checks

    def tick(self, late_s: float = 0.0) -> None:
        """Check, collect and emit once; also called by the wiring at the very end."""
        for check in self._checks:
            check()
        self._emit({name: value() for name, value in self._collect.items()} | {"late_s": late_s})

    async def run(self) -> None:
        """Waits for: the next point of the grid."""
        loop = asyncio.get_running_loop()
        start, number = loop.time(), 1
        while True:
            due = start + number * self._interval_s
            await asyncio.sleep(due - loop.time())
            self.tick(late_s=max(0.0, loop.time() - due))
            number = max(number, int((loop.time() - start) / self._interval_s + 1e-9)) + 1
