"""The deterministic stream of training tasks: environments mixed by weight, each until it ends.

The cursor is the number of tasks drawn, those that were passed over included; a stream of the same seed skipped to it
goes on exactly.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

from spmd_rl.types import Task


class TaskStream:
    """Iterate for the next task.  Ends when all environments have ended."""

    def __init__(
        self,
        sources: Mapping[str, Callable[[], Iterator[Task]]],  # name of the environment -> its tasks from the start
        *,
        weights: Mapping[str, float],
        seed: int,
        keep: Callable[[Task, int], bool] | None = None,  # (task, cursor) -> False: pass it over this time
    ) -> None:
        self._weights = {name: weights[name] for name in sorted(sources)}  # of those that have not ended
        self._tasks = {name: sources[name]() for name in self._weights}
        self._keep = keep
        self._random = random.Random(f"tasks {seed}")
        self.cursor = 0
        self.num_passed_over = 0  # by this process

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        while True:
            task = self._draw()
            if self._keep is None or self._keep(task, self.cursor):
                return task.of(task.env)
            self.num_passed_over += 1

    def skip_to(self, cursor: int) -> None:
        """After a resume, with the same environments and data.  ValueError when they end before."""
        while self.cursor < cursor:
            try:
                self._draw()
            except StopIteration:
                raise ValueError(
                    f"cannot resume: the data ends after {self.cursor} tasks, the checkpoint took {cursor}"
                ) from None

    def _draw(self) -> Task:
        while self._weights:
            (name,) = self._random.choices(list(self._weights), list(self._weights.values()))
            task = next(self._tasks[name], None)
            if task is not None:
                self.cursor += 1
                return Task(env=name, task_id=task.task_id, data=task.data)
            del self._weights[name]
        raise StopIteration
