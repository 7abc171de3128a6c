"""Rank 0's side of checkpoints: what the orchestrator keeps of a version, and when a checkpoint is whole.

A checkpoint is whole once every trainer rank has written its part, the step that made the version is recorded, and
rank 0's half is added.  Knows nothing of batches, evaluations or how a file is written.
"""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spmd_rl.orchestrator.answers import Answers
from spmd_rl.orchestrator.background import Background
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.packing.messages import CheckpointWritten, Files, FinishTraining, Message, TrainingFinished
from spmd_rl.types import Rollout

Half = tuple[Mapping[str, object], list[Rollout]]  # of rank 0: words and rollouts
Complete = Callable[[int, Mapping[str, object], list[Rollout], Files], Path]


class Checkpoints:
    """`plan` a version before its batch is sent; `finish` at the end of the run."""

    def __init__(
        self,
        *,
        trainers: Sequence[int],
        send: Callable[[int, Message], None],
        answers: Answers,
        background: Background,
        policy: Policy,
        recorded: Policy,  # the version whose step is recorded
        snapshot: Callable[[], Half],  # of now
        complete: Complete,  # adds rank 0's half and makes the checkpoint exist; in a worker thread
    ) -> None:
        self._trainers, self._send, self._answers, self._background = trainers, send, answers, background
        self._policy, self._recorded, self._snapshot, self._complete = policy, recorded, snapshot, complete
        self._planned: set[int] = set()  # versions to come at which the trainers save
        self._saved_version = -1  # the newest whose checkpoint this process has completed
        self.restored_version: int | None = None
        policy.on_change(self._version_changed)

    @property
    def saved_version(self) -> int | None:
        """The newest version of which there is a checkpoint."""
        return self.restored_version if self._saved_version < 0 else self._saved_version

    def plan(self, version: int) -> None:
        """Have rank 0's half kept as soon as this version is live; the trainers are told with the batch."""
        self._planned.add(version)

    async def finish(self, *, export: bool) -> None:
        """Have the trainers export, save and end; wait until the checkpoint is complete.

        A version that has its checkpoint keeps that one: two would be written into one folder.
        """
        await self._background.written()
        version = self._policy.version
        save = version != self._saved_version
        for rank in self._trainers:
            self._send(rank, FinishTraining(export=export, save=save))
        answers = await self._answers.all(TrainingFinished, version, self._trainers)
        if save:
            words, rollouts = self._snapshot()
            await self._add(version, ({**words, "exported": export}, rollouts), [each.files for each in answers])

    def _version_changed(self) -> None:
        """At once, before anything else happens at the new version: what a checkpoint holds is the state of now."""
        version = self._policy.version
        if version in self._planned:
            self._planned.discard(version)
            self._background.write(self._save(version, self._snapshot()))

    async def _save(self, version: int, half: Half) -> None:
        answers = await self._answers.all(CheckpointWritten, version, self._trainers)
        await self._recorded.reached(version)
        await self._add(version, half, [each.files for each in answers])

    async def _add(self, version: int, half: Half, files: Sequence[Files]) -> None:
        await asyncio.to_thread(self._complete, version, *half, dict(ChainMap(*files)))
        self._saved_version = max(self._saved_version, version)
