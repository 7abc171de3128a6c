"""Why a run ends before its last version: a stop that was asked for, or a guard."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from spmd_rl.types import GuardError


class Ending:
    """`stop` or `guard`; the first failure counts."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.failure: GuardError | None = None  # that ends the run
        self.failed_rank = 0  # that found it
        self.refused_version: int | None = None  # the version that trainers cannot train on

    def stop(self) -> None:
        """End early, with a checkpoint of what there is."""
        self.asked.set()

    def guard(self, failure: GuardError) -> None:
        """End as failed, with a checkpoint of what there is."""
        self.failure = self.failure or failure
        self.asked.set()

    def batch_refused(self, rank: int, version: int, failure: GuardError) -> None:
        """End as all trainers did, which hold `version`: what was shipped from there on they cannot train."""
        if self.failure is None:
            self.failed_rank = rank
        self.refused_version = version
        self.guard(failure)

    async def guarded(self, job: Coroutine[object, object, None]) -> None:
        """Run a job; a guard that speaks up in it ends the run in good order."""
        try:
            await job
        except GuardError as failure:
            self.guard(failure)

    async def unless_failed(self) -> None:
        """Wait for the cancellation where a guard has spoken up; else return at once."""
        if self.failure:
            await asyncio.get_running_loop().create_future()
