"""Sums and products of two numbers, drawn at random.

A chat model answers in sentences, so the last number of the reply is judged; demanding that the whole reply be the
number gives small models no reward to begin with.  One pair of numbers in five is evaluated and never trained on.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator, Mapping
from typing import Any

from spmd_rl.envs.environment import drawn
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.model.tokenizer import Messages, Tokenizer
from spmd_rl.rewards.text import last_number_equals
from spmd_rl.types import Task

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


class Arithmetic:
    """The prompt "What is 3 + 8?" wants a reply that ends with 11."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        operation: str = "+",  # "+" | "-" | "*"
        least: int = 0,  # of both numbers
        most: int = 9,
        system: str = "Reply with only the number.",
    ) -> None:
        if operation not in OPERATIONS:
            raise ValueError(f"arithmetic: operation = {operation!r}: must be one of {' '.join(OPERATIONS)}")
        if not 0 <= least < most:
            raise ValueError(f"arithmetic: least = {least}, most = {most}: 0 <= least < most must hold")
        self._operation = operation
        self._range = range(least, most + 1)
        self._system = system
        self.rollout = SingleTurn(tokenizer=tokenizer, prompt=self.prompt, reward=self.reward).rollout

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return drawn(seed, split, self._draw, key=self._pair)

    def prompt(self, data: Mapping[str, Any]) -> Messages:
        return [
            {"role": "system", "content": self._system},
            {"role": "user", "content": f"What is {data['question']}?"},
        ]

    def reward(self, data: Mapping[str, Any], reply: str) -> float:
        return last_number_equals(reply, data["answer"])

    def _pair(self, task: Task) -> str:
        """The two numbers, of which 3 + 8 and 8 + 3 are the same."""
        numbers = str(task.data["question"]).split(f" {self._operation} ")
        return " ".join(numbers if self._operation == "-" else sorted(numbers))

    def _draw(self, rng: random.Random) -> Task:
        a, b = rng.choice(self._range), rng.choice(self._range)
        question = f"{a} {self._operation} {b}"
        return Task(env="", task_id=question, data={"question": question, "answer": OPERATIONS[self._operation](a, b)})
