"""One prompt, one reply, one reward: an environment from a prompt function and a reward function.

class Backwards:
    def __init__(self, *, tokenizer: Tokenizer, words: list[str]) -> None:
        self.words = words
        self.rollout = SingleTurn(tokenizer=tokenizer, prompt=self.prompt, reward=self.reward).rollout

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return (Task(env="", task_id=word, data={"word": word}) for word in self.words)

    def prompt(self, data: Mapping[str, object]) -> str:
        return f"Spell {data['word']} backwards."

    def reward(self, data: Mapping[str, object], reply: str) -> float:
        return exact(reply, data["word"][::-1])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from spmd_rl.envs import Generate, take_turn
from spmd_rl.rewards import applicable, weighted_sum
from spmd_rl.tokenizer import Messages, Tokenizer
from spmd_rl.types import Rollout, Task

Data = Mapping[str, object]  # of a task


class SingleTurn:
    """Renders the prompt, takes one turn, has the reply judged."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        prompt: Callable[[Data], str | Messages],  # a string is one message of the user
        reward: Callable[[Data, str], float | Mapping[str, float | None]],  # of the reply's text; parts by name
        weights: Mapping[str, float] | None = None,  # of the parts; None = 1 each
        max_tokens: int | None = None,  # None = as the run allows
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._reward = reward
        self._weights = weights
        self._max_tokens = max_tokens

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        prompt = self._prompt(task.data)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        rollout = Rollout(env=task.env, task_id=task.task_id)
        rollout.append(self._tokenizer.render(messages))
        completion = await take_turn(rollout, generate, self._max_tokens)
        judged = self._reward(task.data, self._tokenizer.decode(completion.token_ids))
        parts = judged if isinstance(judged, Mapping) else {"reward": judged}
        rollout.reward = weighted_sum(parts, self._weights)
        rollout.reward_parts = applicable(parts)
        return rollout
