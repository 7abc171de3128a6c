"""Whether an event loop turns, and whose code holds it where it does not: function and `file:line`.

`look` is called again and again by a thread of its own, which has the loop call back; between a call that was not
answered and now something has held the loop.  Knows nothing of ranks or of what runs on the loop.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from spmd_rl.diagnostics.user_code import where

TOLD_S = 2.0  # that a loop is held before `look` says who does
WARNED_S = 20.0  # before it is warned of


class LoopWatch:
    """To be made on the loop's thread: `thread_id` is that one's."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        thread_id: int,
        warn: Callable[[str], None],  # once for each function, on the thread that looks
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop, self._thread_id, self._warn, self._clock = loop, thread_id, warn, clock
        self._asked_at = clock()
        self._answered = True
        self._warned: set[str] = set()

    def look(self) -> tuple[str, float] | None:
        """(who holds the loop, for how many seconds); None while it turns."""
        now = self._clock()
        if self._answered:
            self._answered, self._asked_at = False, now
            self._loop.call_soon_threadsafe(self._answer)
            return None
        held_s = now - self._asked_at
        if held_s < TOLD_S:
            return None
        function, place = where(sys._current_frames().get(self._thread_id))
        who = f"{function.rpartition('.')[2]} at {place}"
        name = f"{function} {place.rpartition(':')[0]}"
        if held_s >= WARNED_S and name not in self._warned:
            self._warned.add(name)
            self._warn(
                f"{who} has held the event loop for {held_s:.0f} s: no episode of this rank goes on meanwhile; what is "
                "slow belongs into a worker (spmd_rl.processes.workers) or a thread"
            )
        return f"{who}, which holds the event loop", held_s

    def _answer(self) -> None:  # on the loop
        self._answered = True
