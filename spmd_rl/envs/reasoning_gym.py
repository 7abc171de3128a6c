"""All tasks of the package `reasoning-gym` by name (extra `reasoning-gym`): generated, endless, with their own scores.

    [env.countdown]
    path = "spmd_rl.envs.reasoning_gym:ReasoningGym"
    args = { name = "countdown", settings = { max_numbers = 4 } }

A task is the dataset's name, seed and index; whoever scores it makes it again.  Scores are computed in workers, since
some of them evaluate what the model wrote.  Four datasets prepare all their items at once (word_ladder, gsm_symbolic,
acre, list_functions): give them settings = { size = 1000 }, which are then drawn again and again.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING

from spmd_rl.envs.environment import Data, of_split
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.model.tokenizer import Messages, Tokenizer
from spmd_rl.processes.workers import Workers
from spmd_rl.rewards.text import between, numbers
from spmd_rl.types import Task

if TYPE_CHECKING:
    from reasoning_gym.factory import ProceduralDataset

SIZE = 1 << 30  # of a dataset: items are made when asked for
SYSTEM = "Give the final answer between <answer> and </answer>."
EXTRACTS = ("tags", "number", "reply")


class ReasoningGym:
    """One dataset; several are several environments, with weights."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        name: str,  # of the dataset
        settings: Mapping[str, object] | None = None,  # of the dataset
        extract: str = "tags",  # the answer in a reply: between the tags | its last number | all of it
        system: str = SYSTEM,
        timeout_s: float = 10.0,  # of a score
    ) -> None:
        if extract not in EXTRACTS:
            raise ValueError(f"reasoning-gym: extract = {extract!r}: must be one of {', '.join(EXTRACTS)}")
        self._name, self._settings = name, json.dumps(dict(settings or {}), sort_keys=True)
        self._extract, self._system = extract, system
        self._workers = Workers(timeout_s=timeout_s)
        self.rollout = SingleTurn(tokenizer=tokenizer, prompt=self.prompt, reward=self.reward).rollout

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        return of_split(self._generated(seed, split), split, lambda task: str(task.data["question"]))

    def _generated(self, seed: int, split: str) -> Iterator[Task]:
        base = random.Random(f"{split} {seed}").getrandbits(31)
        dataset = _dataset(self._name, self._settings, base)
        for index in itertools.cycle(range(len(dataset))):
            data = {"question": dataset[index]["question"], "seed": base, "index": index}
            yield Task(env="", task_id=f"{base} {index}", data=data)

    def prompt(self, data: Data) -> Messages:
        return [{"role": "system", "content": self._system}, {"role": "user", "content": data["question"]}]

    async def reward(self, data: Data, reply: str) -> float:
        answer = extracted(reply, self._extract)
        given: float = await self._workers.call(score, self._name, self._settings, data["seed"], data["index"], answer)
        return given


def extracted(reply: str, how: str) -> str | None:
    """The answer in a reply; None where there is none."""
    match how:
        case "tags":
            return between(reply, "<answer>", "</answer>")
        case "number":
            found = numbers(reply)[-1:]
            return f"{found[0]:f}" if found and isinstance(found[0], Decimal) else str(found[0]) if found else None
    return reply


def score(name: str, settings: str, seed: int, index: int, answer: str | None) -> float:
    """In a worker: what the dataset says of an answer, 0 … 1."""
    dataset = _dataset(name, settings, seed)
    return float(dataset.score_answer(answer, dataset[index]))


def warm_up() -> None:
    """Import what a first score would otherwise spend its time on."""
    import reasoning_gym  # noqa: F401


@functools.lru_cache(maxsize=16)
def _dataset(name: str, settings: str, seed: int) -> ProceduralDataset:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError("reasoning-gym tasks need pip install 'spmd_rl[reasoning-gym]'") from error
    return reasoning_gym.create_dataset(name, **{"size": SIZE, "seed": seed, **json.loads(settings)})
