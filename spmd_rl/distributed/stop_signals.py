"""SIGTERM, SIGINT and SIGHUP: the first asks the run to stop, the second ends this process at once.

One stop comes as several signals where a cluster manager signals every process and torchrun passes its own on, or tells
one node sooner than another: what comes within `same_s` of the first that came to this process is the first.

Works also while the main thread cannot be interrupted.  `shutdown_s` after the first the process ends whatever hangs.
Knows nothing of what stopping means.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from spmd_rl.distributed.liveness import SignalWatch


class StopSignals:
    """To be made in the main thread.  `code` is 0 until a signal has come, 128 + its number from then on.

    `asked_s` is for how long this process has been asked to stop.
    """

    def __init__(self, *, shutdown_s: float, end: Callable[[int], None], same_s: float = 3.0) -> None:
        self.code = 0
        self._shutdown_s, self._end, self._same_s = shutdown_s, end, same_s
        self._first: float | None = None  # when it came to this process
        self._since = float("inf")  # when `code` was set
        self._lock = threading.Lock()
        self._asked: Callable[[int], object] = lambda number: None
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        hangup = [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)  # ignored under nohup
        self._watch = SignalWatch(received=self._received, signals=(signal.SIGTERM, signal.SIGINT, *hangup))

    @property
    def asked_s(self) -> float:
        return max(0.0, time.monotonic() - self._since)

    def on_first(self, asked: Callable[[int], object]) -> None:
        """Have `asked(signal number)` called, in a thread, at the first signal; at once if it has come already."""
        with self._lock:
            self._asked = asked
            code = self.code
        if code:
            asked(code - 128)

    def ask(self, number: int) -> bool:
        """As if the signal had come here, where none has; False where one has."""
        with self._lock:
            if self.code:
                return False
            self.code, self._since, asked = 128 + number, time.monotonic(), self._asked
        timer = threading.Timer(self._shutdown_s, self._too_late)
        timer.daemon = True
        timer.start()
        asked(number)
        return True

    def close(self) -> None:
        """Put back the handlers of before; a window that has begun goes on."""
        self._watch.close()

    def _received(self, number: int) -> None:
        for fd in self._terminals:
            if not os.isatty(fd):  # it was closed, and what is printed would be an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self.ask(number)
        elif now - self._first >= self._same_s:
            self._end(128 + number)

    def _too_late(self) -> None:
        print(f"ending at once: {self._shutdown_s:g} s after the signal this rank still ran", file=sys.stderr)
        self._end(1)
