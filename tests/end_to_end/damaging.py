"""The environment fraction, some of whose episodes wait for weights on disk and damage them.

The first `free` episodes are as ever; the others wait until `file` is there.  One bit of it is changed, once.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from spmd_rl.envs.environment import Generate
from spmd_rl.envs.fraction import Fraction
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.types import Rollout, Task

LOOK_S = 0.05
LOOKS = 1200


class Damaging(Fraction):
    def __init__(self, *, tokenizer: Tokenizer, file: str, free: int) -> None:
        super().__init__(tokenizer=tokenizer)
        self._plain, self.rollout = self.rollout, self._late
        self._file, self._free, self._damaged = Path(file), free, False
        self._numbers = itertools.count()

    async def _late(self, task: Task, generate: Generate) -> Rollout:
        if next(self._numbers) >= self._free:
            for _ in range(LOOKS):
                if self._file.exists():
                    self._damage()
                    break
                await asyncio.sleep(LOOK_S)
        return await self._plain(task, generate)

    def _damage(self) -> None:
        if not self._damaged:
            self._damaged = True
            data = bytearray(self._file.read_bytes())
            data[-3] ^= 1
            self._file.write_bytes(data)
