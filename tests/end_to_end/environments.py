"""Environments that misbehave, for jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

from spmd_rl.envs.chat import Chat
from spmd_rl.envs.environment import Data, Generate, judged
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.processes.workers import Workers
from spmd_rl.types import Rollout, Task


def length_or_for_ever(reply: str, hang: bool) -> float:
    while hang:
        time.sleep(3600)
    return len(reply) / 8


class HangsOnce:
    """Rewards the length of a reply, except that the first reward of all does not return."""

    def __init__(self, *, tokenizer: Tokenizer) -> None:
        self._workers = Workers(num=2, timeout_s=2.0)
        self._num_rewards = 0
        self.rollout = SingleTurn(tokenizer=tokenizer, prompt=lambda data: "k:", reward=self.reward).rollout

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return (Task(env="", task_id=str(i)) for i in count())

    async def reward(self, data: Data, reply: str) -> float:
        self._num_rewards += 1
        return await self._workers.call(length_or_for_ever, reply, self._num_rewards == 1)


class Forgets:
    """Two turns, of which the second is asked for as if the first had been empty: a context of its own."""

    def __init__(self, *, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return (Task(env="", task_id=str(i)) for i in count())

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        start = [{"role": "user", "content": "k:"}]
        chat = Chat(tokenizer=self._tokenizer, task=task, generate=generate, messages=start)
        replies = [await chat.reply()]
        chat.messages[-1]["content"] = ""
        chat.add("user", "k:")
        replies.append(await chat.reply())
        return judged(chat.rollout, len(set("".join(replies))) / 16)
