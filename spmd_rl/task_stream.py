"""The endless, deterministic stream of training tasks: environments mixed by weight.

The cursor is the number of tasks taken; a stream of the same seed skipped to it goes on exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

from spmd_rl.types import Task


class TaskStream:
    """Iterate for the next task.  Ends with the first environment that ends."""

    def __init__(
        self,
        sources: Mapping[str, Callable[[], Iterator[Task]]],  # name of the environment -> its tasks from the start
        *,
        weights: Mapping[str, float],
        seed: int,
    ) -> None:
        self._names = sorted(sources)
        self._weights = [weights[name] for name in self._names]
        self._tasks = {name: sources[name]() for name in self._names}
        self._random = random.Random(f"tasks {seed}")
        self.cursor = 0

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        (name,) = self._random.choices(self._names, self._weights)
        task = next(self._tasks[name])
        self.cursor += 1
        return Task(env=name, task_id=task.task_id, data=task.data)

    def skip_to(self, cursor: int) -> None:
        while self.cursor < cursor:
            next(self)
