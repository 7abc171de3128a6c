"""Environments that fail in chosen ways or come to an end, for tests."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

from spmd_rl.envs import Generate
from spmd_rl.envs.fraction import Fraction
from spmd_rl.tokenizer import Tokenizer
from spmd_rl.types import Rollout, Task


class Failing(Fraction):
    """Every `each`-th episode does `how`: raise | nan | block (the event loop) | wait (for ever)."""

    def __init__(self, *, tokenizer: Tokenizer, how: str, each: int = 1) -> None:
        super().__init__(tokenizer=tokenizer)
        self._good, self._how, self._each, self._count = self.rollout, how, each, 0
        self.rollout = self._sometimes

    async def _sometimes(self, task: Task, generate: Generate) -> Rollout:
        rollout = await self._good(task, generate)
        self._count += 1
        if self._count % self._each == 0:
            match self._how:
                case "raise":
                    raise LookupError(f"no such digit: {task.task_id}")
                case "nan":
                    rollout.reward = float("nan")
                case "block":
                    time.sleep(3600)
                case "wait":
                    await asyncio.Event().wait()
        return rollout


class Few(Fraction):
    """Only so many tasks."""

    def __init__(self, *, tokenizer: Tokenizer, num: int) -> None:
        super().__init__(tokenizer=tokenizer)
        self._num = num

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return itertools.islice(super().tasks(seed, split), self._num)
