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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from spmd_rl.diagnostics.user_code import BadReturn, Refused, refused, shown
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.rewards.text import applicable, number, weighted_sum
from spmd_rl.types import Completion, Resumable, Rollout, Task

Data = Mapping[str, Any]  # of a task: JSON; only its environment knows what is in it
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
    """Built as `cls(tokenizer=…, **args)`, the args being those of its table in the config.

    An attribute `says`, a list of lines, is printed where a run starts; an environment need not have one.
    """

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
    *,
    function: object = None,  # that gave the reward: its place is told where the reward is none
) -> Rollout:
    """The rollout with its reward: counted once, however many turns it has.  BadReturn for what is no reward."""
    try:
        parts = applicable(reward if isinstance(reward, Mapping) else {"reward": number(reward)})
        rollout.reward, rollout.reward_parts = weighted_sum(parts, weights), parts
    except (TypeError, ValueError) as error:
        raise BadReturn(str(error), function) from None
    return rollout


def checked_rollout(
    rollout: object,  # what an environment gave back
    function: object,  # that gave it
    *,
    sampled: int,  # tokens, by all its calls of `generate`
    vocab_size: int | None,
) -> Rollout:
    """The rollout, its reward and parts as floats; BadReturn says what is wrong with it."""
    if not isinstance(rollout, Rollout):
        raise BadReturn(f"an episode gave back {shown(rollout)}, not a Rollout", function)
    try:
        rollout.reward, rollout.reward_parts = number(rollout.reward), applicable(rollout.reward_parts)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadReturn(str(error), function) from None
    if rollout.num_sampled > sampled:
        raise BadReturn(f"{rollout.num_sampled} tokens of the rollout have versions, {sampled} were sampled", function)
    if sampled and not rollout.num_trainable:
        raise BadReturn(f"none of the {sampled} tokens that were sampled is in the rollout: add them to it", function)
    check_ids(rollout.token_ids, vocab_size, function)
    return rollout


def check_ids(token_ids: np.ndarray, vocab_size: int | None, function: object = None) -> None:
    """BadReturn for an id that the model has no embedding of."""
    wrong = (token_ids < 0) | (token_ids >= (vocab_size or np.iinfo(np.int32).max))
    if wrong.any():
        at = int(np.argmax(wrong))
        known = "no negative ones" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise BadReturn(f"token {at} has the id {token_ids[at]}, the model knows {known}", function)


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
    with refused(f"environment {name}"):
        made = environment.tasks(seed, split)
        if not isinstance(made, Iterable):
            raise BadReturn(f"tasks gave back {shown(made)}, not tasks one after another", environment.tasks)
        tasks = _FromFirst(name, iter(made), environment.tasks)
        first = tasks.peek()
        if first is None:
            raise ValueError(f"environment {name} has no tasks of the split {split!r}")
        first.of(name)
    return tasks


class _FromFirst(Iterator[Task]):
    """Tasks whose first one has been looked at; each is one, or a BadReturn of the function that gives them."""

    def __init__(self, name: str, tasks: Iterator[Task], function: object) -> None:
        self._name, self._tasks, self._function = name, tasks, function
        self._first: list[Task] = []

    def __next__(self) -> Task:
        if self._first:
            return self._first.pop()
        with refused(f"environment {self._name}: its tasks"):
            found = list(itertools.islice(self._tasks, 1))
            if found and not isinstance(found[0], Task):
                raise BadReturn(f"{shown(found[0])} is no Task", self._function)
        if not found:
            raise StopIteration
        return found[0]

    def peek(self) -> Task | None:
        """The first one, which stays the first; None where there is none."""
        self._first = list(itertools.islice(self, 1))
        return self._first[0] if self._first else None

    def state(self) -> dict[str, object] | None:
        return self._tasks.state() if isinstance(self._tasks, Resumable) else None

    def restore(self, state: Mapping[str, object]) -> None:
        assert isinstance(self._tasks, Resumable)  # or there would be no state
        self._tasks.restore(state)
        self._first = []


def load(path: str, *, tokenizer: Tokenizer, args: Mapping[str, object]) -> Environment:
    """The environment at an import path "package.module:Name"; ValueError says what of it is wrong."""
    with refused(f"environment {path}"):
        cls = pkgutil.resolve_name(path)
        if not callable(cls):
            raise Refused(f"environment {path}: {shown(cls)} is no class")
        signature = inspect.signature(cls)
        try:
            signature.bind(tokenizer=tokenizer, **args)
        except TypeError as error:
            known = [name for name in signature.parameters if name != "tokenizer"]
            raise Refused(f"environment {path}: {error}; its settings: {', '.join(known) or 'none'}") from error
        environment: Environment = cls(tokenizer=tokenizer, **args)
        if lacks := [name for name in ("tasks", "rollout") if not callable(getattr(environment, name, None))]:
            raise Refused(f"environment {path}: {shown(environment)} has no method {lacks[0]}")
    return environment
