"""Runs evaluations beside training: their own ids, their own number of places, outside gate and ledger.

Given the tasks of each environment and a `submit`.  Knows nothing of how rollouts are made or of training.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from spmd_rl.metrics.eval_report import EvalReport
from spmd_rl.orchestrator.eval_sink import EvalSink
from spmd_rl.types import GroupWork, Rollout, Task


class EvalRunner:
    """One evaluation at a time; `ended` takes the rollouts."""

    def __init__(
        self,
        *,
        tasks: Mapping[str, Sequence[Task]],  # by environment
        samples: int,  # rollouts per task
        submit: Callable[[GroupWork], None],
        version: Callable[[], int],
        solved_at: float = 1.0,  # least reward of a solved task
    ) -> None:
        self._tasks, self._samples, self._submit, self._version = tasks, samples, submit, version
        self._sink = EvalSink(solved_at=solved_at)
        self._next = 0  # of the numbers that stand for groups; a work's first ticket is its number · samples
        self._waiting: deque[GroupWork] = deque()
        self._report: asyncio.Future[EvalReport] | None = None
        self._rollouts: list[Rollout] = []
        self.sampled_tokens = 0  # of all evaluations, wasted ones included
        self.in_flight = 0

    async def run(self, eval_id: str, *, concurrent: int) -> tuple[EvalReport, list[Rollout]]:
        """The report, and the rollouts in order of task and sample.  Waits for `ended` of the last one.

        Cancelled, it submits nothing more; what is in flight still ends.
        """
        works = []
        for env, tasks in self._tasks.items():
            for task in tasks:
                works.append(self._work(task.of(env)))
        self._sink.expect(eval_id, works)
        self._waiting.extend(works)
        self._rollouts = []
        self._report = asyncio.get_running_loop().create_future()
        self._concurrent = concurrent
        self._feed()
        try:
            report = await self._report
        finally:
            self._waiting.clear()
        return report, sorted(self._rollouts, key=lambda rollout: rollout.ticket)

    def ended(self, rollout: Rollout) -> None:
        """An evaluation's episode ended, well or badly."""
        self.in_flight -= 1
        self.sampled_tokens += rollout.num_sampled + rollout.num_wasted_tokens
        self._rollouts.append(rollout)
        report = self._sink.add(rollout)
        self._feed()
        if report is not None and self._report is not None and not self._report.done():
            self._report.set_result(report)

    def _feed(self) -> None:
        while self._waiting and (self.in_flight == 0 or self.in_flight + self._samples <= self._concurrent):
            work = self._waiting.popleft()
            self.in_flight += work.size
            self._submit(work)

    def _work(self, task: Task) -> GroupWork:
        number, self._next = self._next, self._next + 1
        return GroupWork(
            group_id=number,
            first_ticket=number * self._samples,
            size=self._samples,
            task=task,
            version=self._version(),
            purpose="eval",
        )
