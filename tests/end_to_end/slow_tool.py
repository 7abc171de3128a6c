"""An environment whose tool is slow now and then, and which has some answers in store.

Two turns of four tokens with a tool between them.  Every `slow_every`-th of the first `slow_until` tasks has a tool
that takes as long as `updates` new versions of the weights; it sees them by asking the model for a token (which is
trained nowhere), and gives up after `patience_s`.  Every `stored_every`-th task is answered from a store, without the
live policy.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import numpy as np

from spmd_rl.envs.environment import Generate, take_turn
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rewards.text import share_of
from spmd_rl.types import Rollout, Task

PROBE_EVERY_S = 0.005


class SlowTool:
    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        slow_every: int = 6,
        slow_until: int = 40,
        updates: int = 2,
        patience_s: float = 30.0,
        stored_every: int = 0,  # 0: never
    ) -> None:
        self._tokenizer = tokenizer
        self._slow_every, self._slow_until, self._stored_every = slow_every, slow_until, stored_every
        self._updates, self._patience_s = updates, patience_s
        self._rewards = itertools.cycle([0.0, 1.0])  # of stored answers

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        for number in itertools.count():
            slow = split == "train" and number < self._slow_until and number % self._slow_every == 3
            stored = split == "train" and self._stored_every and number % self._stored_every == 1
            yield Task(env="", task_id=str(number), data={"slow": slow, "stored": bool(stored)})

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        rollout = Rollout(env="", task_id="")
        rollout.append(self._tokenizer.render([{"role": "user", "content": "go:"}]))
        if task.data["stored"]:
            rollout.append(self._tokenizer.encode("aeio"), np.full(4, -4.0))
            rollout.reward, rollout.finish_reason = next(self._rewards), "env"
            return rollout
        first = await take_turn(rollout, generate, 4)
        if task.data["slow"]:
            await self._wait_for(int(first.versions[0]) + self._updates, rollout.token_ids, generate)
        rollout.append(self._tokenizer.encode("=;"))
        second = await take_turn(rollout, generate, 4)
        reply = np.concatenate([first.token_ids, second.token_ids])
        rollout.reward = share_of(self._tokenizer.decode(reply), "aeiou", length=8)
        return rollout

    async def _wait_for(self, version: int, token_ids: np.ndarray, generate: Generate) -> None:
        for _ in range(int(self._patience_s / PROBE_EVERY_S)):
            if (await generate(token_ids, 1)).versions[-1] >= version:
                return
            await asyncio.sleep(PROBE_EVERY_S)
