"""Tasks that run beside the run; the failure of one is the run's."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable

Job = Coroutine[object, object, None]


class Background:
    """`start` a task; `write` one that nothing cuts.  Has a task group while the run lasts."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._writes: list[asyncio.Task[None]] = []

    def open(self, group: asyncio.TaskGroup) -> None:
        """Start tasks in this group from here on."""
        self._group = group

    def start(self, job: Job) -> asyncio.Task[None]:
        """Run a job beside everything else."""
        assert self._group is not None
        task = self._group.create_task(job)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def write(self, job: Job) -> asyncio.Task[None]:
        """Run a job that writes to disk: the end of a run waits for it by `written`."""
        self._writes = [*(task for task in self._writes if not task.done()), self.start(job)]
        return self._writes[-1]

    async def written(self) -> None:
        """Wait for what is being written."""
        await ended(self._writes)

    def cancel(self) -> None:
        """Cancel what runs."""
        for task in (*self._running,):
            task.cancel()


async def ended(tasks: Iterable[asyncio.Task[None]], timeout: float | None = None) -> None:
    """Wait until all tasks have ended, well or badly; at most `timeout` seconds."""
    if tasks := list(tasks):
        await asyncio.wait(tasks, timeout=timeout)
