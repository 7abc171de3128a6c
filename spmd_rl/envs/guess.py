"""A game of several turns: guess a number, told each time whether it is higher or lower."""

from __future__ import annotations

import random
from collections.abc import Iterator

from spmd_rl.envs.chat import Chat
from spmd_rl.envs.environment import Generate, drawn, judged
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rewards.text import numbers
from spmd_rl.types import Rollout, Task

WEIGHTS = {"found": 0.7, "early": 0.2, "numbers": 0.1}


class Guess:
    """The reward is for finding it, for finding it early, and for replies that are guesses at all."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        most: int = 100,  # the number is 1 … most
        max_turns: int = 7,
        on_rewrite: str = "segment",  # as in spmd_rl.envs.chat
    ) -> None:
        if most < 2 or max_turns < 1:
            raise ValueError(f"guess: most = {most} must be at least 2, max_turns = {max_turns} at least 1")
        self._tokenizer, self._most, self._max_turns, self._on_rewrite = tokenizer, most, max_turns, on_rewrite

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return drawn(seed, split, self._draw, key=lambda task: task.task_id)

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        start = f"I think of a number from 1 to {self._most}. Guess it. Reply with one number; I say higher or lower."
        chat = Chat(
            tokenizer=self._tokenizer,
            task=task,
            generate=generate,
            messages=[{"role": "user", "content": start}],
            on_rewrite=self._on_rewrite,
        )
        number, num_guesses, found, turn = task.data["number"], 0, False, 0
        for turn in range(1, self._max_turns + 1):  # noqa: B007 (used after the loop)
            guessed = numbers(await chat.reply())
            num_guesses += bool(guessed)
            found = bool(guessed) and guessed[-1] == number
            if found or chat.truncated:
                break
            chat.add("user", ("higher" if guessed[-1] < number else "lower") if guessed else "Reply with one number.")
        early = (self._max_turns - turn) / max(1, self._max_turns - 1) if found else 0.0
        return judged(chat.rollout, {"found": float(found), "early": early, "numbers": num_guesses / turn}, WEIGHTS)

    def _draw(self, rng: random.Random) -> Task:
        number = rng.randint(1, self._most)
        return Task(env="", task_id=str(number), data={"number": number})
