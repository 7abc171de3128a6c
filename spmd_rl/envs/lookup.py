"""Two turns with a tool: call it, read the digit that it inserts, answer with that digit.

The model sees "k:" and must say "?"; the tool then writes "=7;" (outside the loss) and the model must say "7".  The
digit is nowhere in the prompt, so a pipeline that loses or trains the tool's tokens never learns it.  From a random
start the reward is too rare: begin with `spmd_rl.demo.tiny_model:make_warm`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from spmd_rl.envs.environment import Generate, drawn, judged, take_turn
from spmd_rl.model.tokenizer import Messages, Tokenizer
from spmd_rl.rewards.text import exact
from spmd_rl.types import Rollout, Task

PROMPT: Messages = [{"role": "user", "content": "k:"}]
CALL = "?"
DIGITS = "0123456789"
WEIGHTS = {"call": 0.2, "answer": 0.8}


def tool_reply(digit: str) -> str:
    return f"={digit};"


class Lookup:
    """Both turns are one token long."""

    def __init__(self, *, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return drawn(seed, split, self._draw)

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        digit = str(task.data["digit"])
        rollout = Rollout(env=task.env, task_id=task.task_id)
        rollout.append(self._tokenizer.render(PROMPT))
        parts: dict[str, float | None] = {"call": await self._says(CALL, rollout, generate), "answer": None}
        if parts["call"]:
            rollout.append(self._tokenizer.encode(tool_reply(digit), after=CALL))
            parts["answer"] = await self._says(digit, rollout, generate)
        rollout.finish_reason = "env"
        return judged(rollout, parts, WEIGHTS)

    async def _says(self, expected: str, rollout: Rollout, generate: Generate) -> float:
        completion = await take_turn(rollout, generate, max_tokens=1)
        return exact(self._tokenizer.decode(completion.token_ids), expected)

    @staticmethod
    def _draw(rng: random.Random) -> Task:
        digit = rng.choice(DIGITS)
        return Task(env="", task_id=digit, data={"digit": digit})
