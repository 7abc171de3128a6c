"""How often each task was solved lately, and whether to draw it again now.

`observe` takes finished groups; a task's rate is a moving average over its groups.  Tasks solved more often than
`most` or less often than `least` are passed over, but for a share of draws that looks whether that has changed.
The newest tasks are remembered, `MOST_TASKS` of them; the state goes into the checkpoint.
Knows nothing of queues or where tasks come from.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from spmd_rl.types import Rollout, Task

MOST_TASKS = 100_000
NEW = 0.5  # weight of the newest group in a task's rate


class Difficulty:
    """Rates by environment and task."""

    def __init__(self, *, least: float, most: float, revisit: float, solved_at: float, seed: int) -> None:
        self._least, self._most, self._revisit = least, most, revisit
        self._solved_at, self._seed = solved_at, seed
        self._rates: dict[tuple[str, str], float] = {}  # oldest first

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """The members of one group; those that failed were not measured."""
        solved = [rollout.reward >= self._solved_at for rollout in rollouts if not rollout.failed]
        if not solved:
            return
        key, rate = (rollouts[0].env, rollouts[0].task_id), sum(solved) / len(solved)
        before = self._rates.pop(key, rate)
        self._rates[key] = before + NEW * (rate - before)
        if len(self._rates) > MOST_TASKS:
            del self._rates[next(iter(self._rates))]

    def keep(self, task: Task, draw: int) -> bool:
        """Whether the task of this draw is to be run; decided by rate, seed and draw alone."""
        rate = self._rates.get((task.env, task.task_id))
        if rate is None or self._least <= rate <= self._most:
            return True
        return random.Random(f"revisit {self._seed} {draw}").random() < self._revisit

    def summary(self) -> dict[str, float]:
        """How many tasks are known, and which shares of them lie outside the bounds: none where these are off."""
        num = max(1, len(self._rates))
        return {
            "known": len(self._rates),
            "solved": sum(rate > self._most for rate in self._rates.values()) / num,
            "hopeless": sum(rate < self._least for rate in self._rates.values()) / num,
        }

    def state(self) -> list[tuple[str, str, float]]:
        return [(*key, rate) for key, rate in self._rates.items()]

    def restore(self, state: Sequence[tuple[str, str, float]]) -> None:
        self._rates = {(env, task_id): rate for env, task_id, rate in state}
