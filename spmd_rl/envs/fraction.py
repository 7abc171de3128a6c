"""The share of vowels among the characters of the reply, whatever the prompt: learned from nothing in some 35 steps.

The most stable sign that a pipeline learns at all: a reward of about 0.08 at random, 1.0 at best.
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


class Fraction:
    """The prompt "7:" wants 8 vowels."""

    def __init__(self, *, tokenizer: Tokenizer, wanted: str = "aeiou", length: int = 8) -> None:
        self._wanted = wanted
        self._length = length
        self.rollout = SingleTurn(
            tokenizer=tokenizer, prompt=self.prompt, reward=self.reward, max_tokens=length
        ).rollout

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return drawn(seed, split, self._draw)

    def prompt(self, data: Mapping[str, Any]) -> str:
        return f"{data['digit']}:"

    def reward(self, data: Mapping[str, Any], reply: str) -> float:
        return share_of(reply, self._wanted, length=self._length)

    def _draw(self, rng: random.Random) -> Task:
        digit = rng.choice("0123456789")
        return Task(env="", task_id=digit, data={"digit": digit})
