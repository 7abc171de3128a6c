"""The share of the reply's characters that are the letter in the prompt: learned from nothing in some 90 steps.

The reward depends on the prompt, so a pipeline that pairs replies with the wrong prompts never learns it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from spmd_rl.envs.environment import drawn
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rewards.text import share_of
from spmd_rl.types import Task


class Echo:
    """The prompt "c:" wants "cccccccc"."""

    def __init__(self, *, tokenizer: Tokenizer, letters: str = "abcdefgh", length: int = 8) -> None:
        self._letters = letters
        self._length = length
        self.rollout = SingleTurn(
            tokenizer=tokenizer, prompt=self.prompt, reward=self.reward, max_tokens=length
        ).rollout

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return drawn(seed, split, self._draw)

    def prompt(self, data: Mapping[str, Any]) -> str:
        return f"{data['letter']}:"

    def reward(self, data: Mapping[str, Any], reply: str) -> float:
        return share_of(reply, data["letter"], length=self._length)

    def _draw(self, rng: random.Random) -> Task:
        letter = rng.choice(self._letters)
        return Task(env="", task_id=letter, data={"letter": letter})
