"""Episodes that raise are counted; too many of them end the run instead of training on what is left.

Knows nothing of groups, gates or why an episode failed.
"""

from __future__ import annotations

from collections import Counter, deque

from spmd_rl.types import Rollout


class FailureRate:
    """Over the last `window` episodes; those that were cancelled do not count."""

    def __init__(self, *, window: int, most: float) -> None:
        self._window, self._most = window, most
        self._errors: deque[str] = deque()  # of each episode in the window, "" where it ended well
        self._counts: Counter[str] = Counter()

    def add(self, rollout: Rollout) -> None:
        """RuntimeError with the commonest error once more than most · window of the window have failed."""
        if rollout.error == "cancelled":
            return
        error = (rollout.error or "no error was named") if rollout.failed else ""
        self._errors.append(error)
        self._counts[error] += 1
        if len(self._errors) > self._window:
            gone = self._errors.popleft()
            self._counts[gone] -= 1
            if not self._counts[gone]:
                del self._counts[gone]
        failed = len(self._errors) - self._counts[""]
        if failed > self._most * self._window:
            common, times = max(((e, n) for e, n in self._counts.items() if e), key=lambda entry: entry[1])
            raise RuntimeError(
                f"{failed} of the last {len(self._errors)} episodes failed, rollout.max_failure_rate = {self._most:g} "
                f"of {self._window}; {times} times: {common}"
            )
