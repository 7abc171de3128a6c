"""The seam between the system and what people train: an environment makes tasks and plays one of them.

All that an environment sees of the system is a tokenizer and `generate`.  Sampled ids go into the rollout as they
came, by `take_turn`, and are never decoded and encoded again on their way to the loss.  Tickets, versions, groups and
the environment's own name are filled in by whoever calls `rollout`.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import pkgutil
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from spmd_rl.rewards import applicable, weighted_sum
from spmd_rl.tokenizer import Tokenizer
from spmd_rl.types import Completion, Resumable, Rollout, Task

Data = Mapping[str, object]  # of a task
HELD_OUT = 5  # one in so many generated tasks is evaluated and never trained on
MOST_MISSES = 10_000  # tasks in a row that belong to another split


class Generate(Protocol):
    """Samples from the live policy, with the run's sampling settings; each call of an episode is one turn."""

    async def __call__(
        self,
        token_ids: np.ndarray,  # [N] int32, the whole context so far
        max_tokens: int | None = None,  # fewer new tokens than the run allows
        *,
        stop: Sequence[str] = (),  # texts that end the turn: the token that completes one is its last
    ) -> Completion: ...


class Environment(Protocol):
    """Built as `cls(tokenizer=…, **args)`, the args being those of its table in the config."""

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        """The tasks of a split ("train" | "eval"), in an order that the seed alone decides; endless or not."""
        ...

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        """One episode with its reward; an exception means that this sample has none."""
        ...


async def take_turn(
    rollout: Rollout, generate: Generate, max_tokens: int | None = None, *, stop: Sequence[str] = ()
) -> Completion:
    """Sample the model's next turn after the rollout's tokens, and add it to them."""
    more = {"stop": stop} if stop else {}
    completion = await generate(rollout.context, max_tokens, **more)
    rollout.append(completion.token_ids, completion.logprobs, completion.versions)
    rollout.num_turns += 1
    rollout.finish_reason = completion.finish_reason
    return completion


def judged(
    rollout: Rollout,
    reward: float | Mapping[str, float | None],  # one number, or parts by name
    weights: Mapping[str, float] | None = None,  # of the parts; None = 1 each
) -> Rollout:
    """The rollout with its reward: counted once, however many turns it has."""
    parts = reward if isinstance(reward, Mapping) else {"reward": reward}
    rollout.reward = weighted_sum(parts, weights)
    rollout.reward_parts = applicable(parts)
    return rollout


def drawn(
    seed: int,
    split: str,
    draw: Callable[[random.Random], Task],
    *,
    key: Callable[[Task], str] | None = None,  # as in `of_split`; None: the splits share their tasks
) -> Iterator[Task]:
    """An endless stream of tasks, each drawn from a generator that seed and split begin."""
    rng = random.Random(f"{split} {seed}")
    tasks = (draw(rng) for _ in itertools.count())
    return of_split(tasks, split, key) if key else tasks


def of_split(tasks: Iterator[Task], split: str, key: Callable[[Task], str]) -> Iterator[Task]:
    """Those of an endless stream that belong to a split: the hash of its key decides it, so none is in both."""
    misses = 0
    for task in tasks:
        digest = hashlib.blake2b(key(task).encode(), digest_size=8).digest()
        if (int.from_bytes(digest, "big") % HELD_OUT == 0) == (split == "eval"):
            misses = 0
            yield task
        elif (misses := misses + 1) == MOST_MISSES:
            raise ValueError(f"no task of the split {split!r} among {misses}: there are too few different ones")


def checked_tasks(name: str, environment: Environment, *, seed: int, split: str) -> Iterator[Task]:
    """The tasks of a split; ValueError, before one is taken, for data that are missing, broken, empty or no JSON."""
    with refused(name):
        tasks = environment.tasks(seed, split)
        first = next(tasks, None)
        if first is None:
            raise ValueError(f"environment {name} has no tasks of the split {split!r}")
        first.of(name)
    return _FromFirst(first, tasks)


class _FromFirst(Iterator[Task]):
    """Tasks whose first one has been looked at."""

    def __init__(self, first: Task, tasks: Iterator[Task]) -> None:
        self._first: list[Task] = [first]
        self._tasks = tasks

    def __next__(self) -> Task:
        return self._first.pop() if self._first else next(self._tasks)

    def state(self) -> dict[str, object] | None:
        return self._tasks.state() if isinstance(self._tasks, Resumable) else None

    def restore(self, state: Mapping[str, object]) -> None:
        self._tasks.restore(state)
        self._first = []


def load(path: str, *, tokenizer: Tokenizer, args: Mapping[str, object]) -> Environment:
    """The environment at an import path "package.module:Name"; ValueError says what of it is wrong."""
    try:
        cls = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"environment {path}: {error}") from error
    signature = inspect.signature(cls)
    try:
        signature.bind(tokenizer=tokenizer, **args)
    except TypeError as error:
        known = [name for name in signature.parameters if name != "tokenizer"]
        raise ValueError(f"environment {path}: {error}; its settings: {', '.join(known) or 'none'}") from error
    with refused(path):
        return cls(tokenizer=tokenizer, **args)


@contextmanager
def refused(name: str) -> Iterator[None]:
    """What an environment raises before the run begins is a ValueError with the place: settings that it cannot use."""
    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        place = f"{Path(last.filename).name}:{last.lineno}"
        raise ValueError(f"environment {name}: {type(error).__name__}: {error} ({place})") from error
