"""An event loop on a virtual clock: time jumps to the next timer, so an hour of rollouts passes in milliseconds.

Promises: the same order on every run; timers of one instant fire in the order in which they were set; callbacks of
`call_when_settled` run once everything else of the instant has run, before time moves.  A loop with nothing left to
wait for raises instead of hanging.  Not for threads, sockets or subprocesses.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import selectors
from collections.abc import Callable, Coroutine
from typing import TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """`asyncio.Runner(loop_factory=VirtualLoop)`."""

    _scheduled: list[asyncio.TimerHandle]  # of asyncio's own loop: a heap

    def __init__(self) -> None:
        super().__init__(_Selector(self._jump))
        self._now = 0.0
        self._num_timers = 0
        self._settled: list[Callable[[], None]] = []

    def time(self) -> float:
        return self._now

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        timer.order = self._num_timers = self._num_timers + 1
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def call_when_settled(self, callback: Callable[[], None]) -> None:
        """Call once nothing of this instant is left to run."""
        self._settled.append(callback)

    def _jump(self, timeout: float | None) -> None:
        if timeout is None or timeout > 0:  # nothing is ready
            if self._settled:
                callbacks, self._settled = self._settled, []
                for callback in callbacks:
                    self.call_soon(callback)
            elif self._scheduled:
                self._now = self._scheduled[0].when()
            else:
                raise RuntimeError(f"virtual time stands still at {self._now} s: nothing is left that could happen")


class _Selector(selectors.DefaultSelector):
    """Jumps where others wait: there are no sockets, so nothing to ask the operating system for."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._jump(timeout)
        return []


class _Timer(asyncio.TimerHandle):
    """Equal times in the order in which they were set."""

    __slots__ = ("order",)
    order: int
    _scheduled: bool  # of asyncio's own timer

    def __lt__(self, other: asyncio.TimerHandle) -> bool:
        if not isinstance(other, _Timer):
            return NotImplemented
        return (self.when(), self.order) < (other.when(), other.order)


def run_virtual(main: Coroutine[object, object, T]) -> T:
    """asyncio.run on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
