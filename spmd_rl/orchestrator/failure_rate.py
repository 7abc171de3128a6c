"""Episodes that raise are counted; too many of them end the run instead of training on what is left.

The share is of what was drawn: of any `window` tickets in a row.  So it says the same in whatever order episodes end;
those that fail at once, and are replaced at once, weigh no more than others.  A prompt that was skipped did not fail,
but where all tickets of a window were skipped the run ends too.
Knows nothing of groups, gates or why an episode failed.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter

from spmd_rl.types import Finish, GuardError, Rollout

KEPT = 16  # windows' worth of failures, the newest by ticket


class FailureRate:
    """Over every `window` episodes drawn in a row; those that were cancelled do not count."""

    def __init__(self, *, window: int, most: float) -> None:
        self._window, self._most = window, most
        self._failed: list[tuple[int, str]] = []  # (ticket, error), by ticket
        self._skipped: list[tuple[int, str]] = []

    def add(self, rollout: Rollout) -> None:
        """GuardError with the commonest error once more than most · window of a window have failed."""
        entry = (rollout.ticket, rollout.error or "no error was named")
        if rollout.finish_reason == Finish.ERROR:
            if errors := self._window_of(self._failed, entry, math.floor(self._most * self._window) + 1):
                common, times = Counter(errors).most_common(1)[0]
                raise GuardError(
                    f"{len(errors)} of {self._window} episodes drawn in a row failed, rollout.max_failure_rate = "
                    f"{self._most:g}; {times} times: {common}"
                )
        elif rollout.skipped and self._window_of(self._skipped, entry, self._window):
            raise GuardError(
                f"all of {self._window} prompts drawn in a row were skipped: raise inference.max_seq_len, or give "
                f"shorter prompts; {entry[1]}"
            )

    def _window_of(self, entries: list[tuple[int, str]], entry: tuple[int, str], num: int) -> list[str]:
        """The errors of `num` entries, the new one among them, within a window; [] where there are not so many."""
        bisect.insort(entries, entry)
        del entries[: -KEPT * self._window]
        at = bisect.bisect_left(entries, entry)
        for first in range(max(0, at - num + 1), min(at, len(entries) - num) + 1):
            if entries[first + num - 1][0] - entries[first][0] < self._window:
                return [error for _, error in entries[first : first + num]]
        return []
