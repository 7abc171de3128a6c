"""One prompt, one reply, one reward: an environment from a prompt function and a reward function.

class Backwards:
    def __init__(self, *, tokenizer: Tokenizer, words: list[str]) -> None:
        self.words = words
        self.rollout = SingleTurn(tokenizer=tokenizer, prompt=self.prompt, reward=self.reward).rollout

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return (Task(env="", task_id=word, data={"word": word}) for word in self.words)

    def prompt(self, data: Data) -> str:
        return f"Spell {data['word']} backwards."

    def reward(self, data: Data, reply: str) -> float:
        return exact(reply, data["word"][::-1])
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping

from spmd_rl.envs.environment import Data, Generate, judged, take_turn
from spmd_rl.model.tokenizer import Messages, Tokenizer
from spmd_rl.types import Rollout, Task

Reward = float | Mapping[str, float | None]  # one number, or parts by name


class SingleTurn:
    """Renders the prompt, takes one turn, has the reply judged."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        prompt: Callable[[Data], str | Messages],  # a string is one message of the user
        reward: Callable[[Data, str], Reward | Awaitable[Reward]],  # of the reply's text; instant, or async
        weights: Mapping[str, float] | None = None,  # of the parts; None = 1 each
        max_tokens: int | None = None,  # None = as the run allows
        rule: str = "",  # of the reward, such as its regular expression: special tokens written in it stay in the reply
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._reward = reward
        self._weights = weights
        self._max_tokens, self._rule = max_tokens, rule

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        prompt = self._prompt(task.data)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        rollout = Rollout(env=task.env, task_id=task.task_id)
        rollout.append(self._tokenizer.render(messages))
        completion = await take_turn(rollout, generate, self._max_tokens)
        reward = self._reward(task.data, self._tokenizer.decode(completion.token_ids, rule=self._rule))
        reward = await reward if inspect.isawaitable(reward) else reward
        return judged(rollout, reward, self._weights, function=self._reward)
