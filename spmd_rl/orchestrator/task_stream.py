"""The deterministic stream of training tasks: environments mixed by weight, each until it ends.

The cursor is the number of tasks drawn, those that were passed over included.  `state` holds what of it is needed to go
on exactly: how many tasks each environment gave, and a digest of them.  The environment of a draw is decided by the
seed, the weights and the cursor alone, so an environment that had ended and now has more tasks is drawn from again.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spmd_rl.types import Resumable, Task


@dataclass
class _Source:
    tasks: Iterator[Task]
    drawn: int = 0
    digest: str = ""  # of all tasks drawn, in their order


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
        self._sources = {name: _Source(sources[name]()) for name in sorted(sources)}
        self._weights, self._seed, self._keep = weights, seed, keep
        self.cursor = 0
        self.num_passed_over = 0  # by this process

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        while True:
            task = self._draw()
            if self._keep is None or self._keep(task, self.cursor):
                return task
            self.num_passed_over += 1

    def state(self) -> dict[str, object]:
        """What `restore` takes, as JSON."""
        return {
            "cursor": self.cursor,
            "sources": {
                name: {
                    "drawn": source.drawn,
                    "digest": source.digest,
                    "state": source.tasks.state() if isinstance(source.tasks, Resumable) else None,
                }
                for name, source in self._sources.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on behind the tasks that were drawn; ValueError names the environment whose tasks are others now.

        A stream that is there already stays.
        """
        if self.cursor == state["cursor"]:
            return
        for name, there in state["sources"].items():
            try:
                self._skip(name, there)
            except ValueError as error:
                raise ValueError(f"env.{name}: {error}") from error
            except (KeyError, TypeError, AttributeError, OverflowError) as error:
                raise ValueError(f"env.{name}: the state of its tasks does not fit together: {error!r}") from error
        self.cursor = state["cursor"]

    def _skip(self, name: str, there: Mapping[str, Any]) -> None:
        if not there["drawn"]:
            return
        if there["state"] is not None:
            tasks = self._sources[name].tasks
            if not isinstance(tasks, Resumable):
                raise AttributeError("they have no restore")
            tasks.restore(there["state"])
        for num in range(there["drawn"]):
            if self._next(name) is None:
                raise ValueError(f"its tasks end after {num}, {there['drawn']} were drawn")
        if self._sources[name].digest != there["digest"]:
            raise ValueError(f"the {there['drawn']} tasks that were drawn are others now, by content")

    def _draw(self) -> Task:
        for name in self._order():
            task = self._next(name)
            if task is not None:
                self.cursor += 1
                return task
        raise StopIteration

    def _order(self) -> list[str]:
        """Who is asked for the task of this draw, first to last: drawn by weight, one after the other (Efraimidis and
        Spirakis 2006), so that those which have ended change nothing for the others."""
        if len(self._sources) == 1:
            return list(self._sources)
        uniform = random.Random(f"tasks {self._seed} {self.cursor}")
        return sorted(self._sources, key=lambda name: -math.log(1.0 - uniform.random()) / self._weights[name])

    def _next(self, name: str) -> Task | None:
        source = self._sources[name]
        task = next(source.tasks, None)
        if task is None:
            return None
        task = task.of(name)
        content = json.dumps([source.digest, task.task_id, task.data], sort_keys=True)
        source.digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        source.drawn += 1
        return task
