"""The environment fraction with latencies that no seed repeats."""

import asyncio
import random

from spmd_rl.envs.environment import Generate
from spmd_rl.envs.fraction import Fraction
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.types import Rollout, Task

LATENCY_S = 0.3


class Jittered(Fraction):
    def __init__(self, *, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer=tokenizer)
        self._plain, self.rollout = self.rollout, self._late
        self._random = random.SystemRandom()

    async def _late(self, task: Task, generate: Generate) -> Rollout:
        await asyncio.sleep(self._random.random() * LATENCY_S)
        rollout = await self._plain(task, generate)
        await asyncio.sleep(self._random.random() * LATENCY_S)
        return rollout
