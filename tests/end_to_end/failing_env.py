"""Environments that fail in chosen ways or come to an end, for tests."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator

from spmd_rl.envs.environment import Generate
from spmd_rl.envs.fraction import Fraction
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.processes.workers import Workers
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
                    print("hanging", flush=True)
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


class Epochs(Fraction):
    """The same 200 prompts again and again, each taking its time."""

    def __init__(self, *, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer=tokenizer)
        self._good, self.rollout = self.rollout, self._late

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return (Task(env="", task_id=str(i % 200), data={"digit": str(i % 10)}) for i in itertools.count())

    async def _late(self, task: Task, generate: Generate) -> Rollout:
        await asyncio.sleep(random.expovariate(50.0))
        return await self._good(task, generate)


class Unreadable(Fraction):
    """Its data breaks off."""

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        yield from itertools.islice(super().tasks(seed, split), 40)
        raise OSError("row 40 cannot be read")


def misbehave(how: str) -> float:
    if how == "raise":
        raise ArithmeticError("no verdict")
    os.kill(os.getpid(), signal.Signals[how])
    return 0.0


class BadWorkers(Fraction):
    """Rewards come from processes that raise, or that a signal meets."""

    def __init__(self, *, tokenizer: Tokenizer, how: str) -> None:
        super().__init__(tokenizer=tokenizer)
        workers = Workers(num=4, timeout_s=1.0)
        self.rollout = SingleTurn(
            tokenizer=tokenizer, prompt=self.prompt, reward=lambda data, reply: workers.call(misbehave, how)
        ).rollout
