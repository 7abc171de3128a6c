"""When the policy is evaluated, and what is kept of it: alone at both ends of a run, beside training in between.

Given an `EvalRunner`, which plays one evaluation.  Knows nothing of batches or checkpoints.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np

from spmd_rl.metrics.report import Report, eval_texts, eval_values
from spmd_rl.metrics.writer import Recorder
from spmd_rl.orchestrator.background import Background, ended
from spmd_rl.orchestrator.ending import Ending
from spmd_rl.orchestrator.eval_runner import EvalRunner
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.version_pin import VersionPin
from spmd_rl.storage.run_dir import RunDir, write_whole
from spmd_rl.types import Rollout


class Evaluations:
    """`alone`, `beside`, and who waits for their end."""

    def __init__(
        self,
        *,
        runner: EvalRunner,
        pin: VersionPin | None,  # None: an evaluation may be of several versions
        policy: Policy,
        ending: Ending,
        background: Background,
        last_version: Callable[[], int],  # of the run
        every: int,  # versions; 0: at both ends alone; below 0: never
        concurrent_alone: int,  # rollouts in flight
        concurrent_beside: int,
        run_dir: RunDir,
        recorder: Recorder,
        report: Report,
        decode: Callable[[np.ndarray], str],
        writing: Callable[[Path], AbstractContextManager[None]],  # while a thread writes there
    ) -> None:
        self._runner, self._pin, self._policy, self._ending, self._background = runner, pin, policy, ending, background
        self._last_version, self._every = last_version, every
        self._alone, self._beside = concurrent_alone, concurrent_beside
        self._run_dir, self._recorder, self._report = run_dir, recorder, report
        self._decode, self._writing = decode, writing
        self._tasks: list[asyncio.Task[None]] = []  # one that runs beside training, one that waits for it

    async def alone(self) -> None:
        """While nothing is trained, once for a version.  Waits for it; being cancelled does not cut it."""
        if self._every < 0 or self._ending.asked.is_set():
            return
        if not self._run_dir.evaluation(self._policy.version).exists():
            self._tasks = [self._background.start(self._evaluate(self._alone))]
            await self.ended()

    def stepped(self, version: int) -> None:
        """A step is recorded: evaluate beside training if it is due."""
        if self._every > 0 and version % self._every == 0 and version < self._last_version():
            self._start_beside()

    async def at_start(self, version: int) -> None:
        """Alone at version 0; of a resumed run, beside training, the one that was due and left no report."""
        if version == 0:
            await self.alone()
        elif 0 < self._every <= version:
            due = range(version // self._every * self._every, version + 1)
            if not any(self._run_dir.evaluation(v).exists() for v in due):
                self._start_beside()

    async def ended(self, timeout: float | None = None) -> None:
        """Wait until none runs, at most `timeout` seconds."""
        await ended(self._tasks, timeout)

    def cut(self) -> None:
        """Cancel what runs; it leaves no report."""
        for task in self._tasks:
            task.cancel()

    @property
    def running(self) -> list[asyncio.Task[None]]:
        """The tasks that have not ended."""
        return [task for task in self._tasks if not task.done()]

    def _start_beside(self) -> None:
        """Once the one that runs has ended; of those that become due until then, one."""
        if len(running := self.running) < 2:
            self._tasks = [*running, self._background.start(self._evaluate_after(running))]

    async def _evaluate_after(self, running: Sequence[asyncio.Task[None]]) -> None:
        """Unless the run stops meanwhile, or comes to the version that is evaluated at its end."""
        await ended(running)
        if not self._ending.asked.is_set() and self._policy.version < self._last_version():
            await self._evaluate(self._beside)

    async def _evaluate(self, concurrent: int) -> None:
        """One evaluation from the version of now on; pinned, that version makes it all.  Waits for its rollouts."""
        async with self._pin.hold() if self._pin else nullcontext():
            version = self._policy.version
            report, rollouts = await self._runner.run(f"eval_{version}", concurrent=concurrent)
        values = eval_values(report)
        if self._pin:
            values["eval/pin_stall_s"] = self._pin.stall_s
        self._recorder.write("eval", version, values)
        self._report.evaluated(version, report, values, rollouts)
        await ended([self._background.write(asyncio.to_thread(self._write, version, values, rollouts))])

    def _write(self, version: int, values: Mapping[str, float | None], rollouts: Sequence[Rollout]) -> None:
        """In a worker thread: many long texts take seconds."""
        content = {"version": version, **values, "rollouts": eval_texts(rollouts, self._decode)}
        with self._writing(self._run_dir.evaluation(version)):
            write_whole(self._run_dir.evaluation(version), json.dumps(content, indent=1))
