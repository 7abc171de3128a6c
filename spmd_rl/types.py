"""The words: plain data that travels between the parts.

Imports nothing of ours and no torch.  Arrays are numpy, one row per token unless a shape says otherwise.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

NO_VERSION = -1  # versions[i] where the live policy did not sample the token (prompt, tool output, replay)

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How one completion is sampled."""

    max_tokens: int  # at most this many new tokens
    temperature: float = 1.0  # 0 = greedy (the log-prob is then that of temperature 1)
    top_p: float = 1.0  # 1 = off
    top_k: int = 0  # 0 = off
    stop_ids: tuple[int, ...] = ()  # a sampled stop id is kept as the last token, with its log-prob
    stop: tuple[str, ...] = ()  # texts: the token that completes one is kept as the last
    seed: int = 0  # equal seed, prompt and weights give equal tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine returns for one prompt."""

    token_ids: np.ndarray  # [N] int32, sampled tokens
    logprobs: np.ndarray  # [N] float32, of each token, temperature-scaled, before top-p and top-k
    versions: np.ndarray  # [N] int32, version of the weights that computed each token's distribution
    finish_reason: str  # "stop" | "length" | "cancelled"

    @classmethod
    def empty(cls, finish_reason: str) -> Completion:
        """One that ended before its first token."""
        none = np.empty(0, np.int32)
        return cls(token_ids=none, logprobs=np.empty(0, np.float32), versions=none, finish_reason=finish_reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One prompt of one environment; `data` is JSON that only the environment reads."""

    env: str  # name of the environment in the config
    task_id: str  # unique within the environment
    data: Mapping[str, Any] = field(default_factory=dict)  # JSON; only its environment knows what is in it

    def of(self, env: str) -> Task:
        """As the environment of this name has it on every rank and after a resume; ValueError for what is no JSON."""
        if not isinstance(self.task_id, str):
            raise ValueError(f"environment {env}: task_id = {self.task_id!r} is {type(self.task_id)}, not a string")
        data: dict[str, object] = {}
        for key, value in self.data.items():
            try:
                data |= json.loads(json.dumps({key: value}))
            except (TypeError, ValueError, RecursionError) as error:
                where = f"environment {env}, task {self.task_id!r}: data[{key!r}]"
                raise ValueError(f"{where} is not JSON, which checkpoints and other ranks need: {error}") from error
        return Task(env=env, task_id=self.task_id, data=data)


@runtime_checkable
class Resumable(Protocol):
    """An iterator of tasks that was another one when fewer rows were there; without these it is the same each time."""

    def state(self) -> dict[str, object] | None:
        """What `restore` takes, as JSON."""
        ...

    def restore(self, state: Mapping[str, object]) -> None:
        """Begin again as it was at that state; ValueError where it cannot."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupWork:
    """An admitted group, or one evaluation task: what is sent to an inference rank.

    Its rollouts have the tickets first_ticket … first_ticket + size - 1 and the samples 0 … size - 1.
    Evaluation work numbers its "tickets" on its own and never enters the gate or the ledger.
    """

    group_id: int
    first_ticket: int
    size: int
    task: Task
    version: int  # policy version at admission; an engine older than this must not start it
    purpose: str = "train"  # "train" | "eval"

    @property
    def tickets(self) -> range:
        return range(self.first_ticket, self.first_ticket + self.size)


class Finish(StrEnum):
    """Why a rollout ended; an environment may name the first three."""

    STOP = "stop"
    LENGTH = "length"
    ENV = "env"
    ERROR = "error"  # its environment raised
    SKIPPED = "skipped"  # its prompt leaves no room for a reply
    CANCELLED = "cancelled"  # it was given up on purpose


_UNMEASURED = frozenset({Finish.ERROR, Finish.SKIPPED, Finish.CANCELLED})


class NotRetried(Exception):
    """What ended an episode and would end it again: the rollout counts as failed at once, under this class's name."""


class GuardError(RuntimeError):
    """A guard ends the run: what there is is saved first, and a start from there would end the same way."""


class Disagreement(RuntimeError):
    """Engines and trainers do not compute the same model.  The text says all that is to be said."""


class Cancelled(asyncio.CancelledError):
    """A cancelled generation, once the engine has let go of it: `tokens` were sampled for nothing."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens


def _empty(dtype: type) -> np.ndarray:
    return np.empty(0, dtype)


@dataclass(eq=False)  # not keyword-only: unpacking makes many at once
class Rollout:
    """One sampled trajectory, possibly of many turns; the unit of the gate, of S·B and of the ledger.

    The four per-token arrays grow only by `append`, so that their lengths cannot disagree.
    """

    env: str
    task_id: str
    group_id: int = 0
    sample: int = 0  # index within the group
    ticket: int = 0
    purpose: str = "train"  # "train" | "eval"
    token_ids: np.ndarray = field(default_factory=lambda: _empty(np.int32))  # [T] int32
    loss_mask: np.ndarray = field(default_factory=lambda: _empty(np.bool_))  # [T] bool, True = trained on
    behavior_logprobs: np.ndarray = field(default_factory=lambda: _empty(np.float32))  # [T] float32, 0 off the mask
    versions: np.ndarray = field(default_factory=lambda: _empty(np.int32))  # [T] int32, NO_VERSION off the mask
    segments: list[int] = field(default_factory=list)  # where new contexts start, after the one at 0
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    finish_reason: str = ""  # of Finish
    error: str = ""  # why a rollout has no reward, in one line
    num_turns: int = 0
    num_wasted_tokens: int = 0  # sampled in attempts that were thrown away
    admission_version: int = NO_VERSION  # policy version when its group was admitted
    finished_version: int = NO_VERSION  # policy version when it reached the orchestrator
    generation_s: float = 0.0  # seconds from the start of the episode to its end

    def append(
        self,
        token_ids: np.ndarray,  # [N] ints
        logprobs: np.ndarray | None = None,  # [N] floats; None = not sampled by the policy, so not trained on
        versions: np.ndarray | None = None,  # [N] ints; None = NO_VERSION
    ) -> None:
        """Add tokens to all four arrays at once; tokens with log-probs are under the loss mask."""
        num = len(token_ids)
        if (logprobs is not None and len(logprobs) != num) or (versions is not None and len(versions) != num):
            raise ValueError(f"append of {num} tokens with log-probs and versions of other lengths")
        if versions is not None and logprobs is None:
            raise ValueError("append of versions without log-probs: what the policy sampled is trained on, or left out")
        sampled = logprobs is not None
        new = (
            np.asarray(token_ids, np.int32),
            np.full(num, sampled, np.bool_),
            np.asarray(logprobs, np.float32) if sampled else np.zeros(num, np.float32),
            np.full(num, NO_VERSION, np.int32) if versions is None else np.asarray(versions, np.int32),
        )
        for name, rows in zip(("token_ids", "loss_mask", "behavior_logprobs", "versions"), new, strict=True):
            setattr(self, name, np.concatenate([getattr(self, name), rows]))
        for name in ("head", "tail", "num_trainable", "num_sampled"):
            self.__dict__.pop(name, None)

    def new_segment(self) -> None:
        """What is appended next starts a context of its own and attends to nothing before it."""
        if len(self.token_ids) > (self.segments[-1] if self.segments else 0):
            self.segments.append(len(self.token_ids))

    @property
    def context(self) -> np.ndarray:  # [N] int32
        """The tokens of the last segment: what the next turn is sampled after."""
        return self.token_ids[self.segments[-1] :] if self.segments else self.token_ids

    @property
    def failed(self) -> bool:
        """It has no reward."""
        return self.finish_reason in _UNMEASURED

    @property
    def skipped(self) -> bool:
        return self.finish_reason == Finish.SKIPPED

    @cached_property
    def num_trainable(self) -> int:
        """Tokens under the loss mask."""
        return int(self.loss_mask.sum())

    @property
    def longest_turn(self) -> int:
        """Most tokens in a row under the loss mask."""
        edges = np.flatnonzero(np.diff(np.r_[False, self.loss_mask, False]))
        return int((edges[1::2] - edges[::2]).max(initial=0))

    @cached_property
    def num_sampled(self) -> int:
        """Tokens that the live policy sampled for it: what the token ledger counts."""
        return int(np.count_nonzero(self.versions != NO_VERSION))

    @cached_property
    def head(self) -> int:
        """Oldest version over the loss-masked tokens; NO_VERSION where the live policy sampled none."""
        live = self._live_versions()
        return int(live.min()) if len(live) else NO_VERSION

    @cached_property
    def tail(self) -> int:
        """Newest version over the loss-masked tokens; NO_VERSION where the live policy sampled none."""
        live = self._live_versions()
        return int(live.max()) if len(live) else NO_VERSION

    def version_runs(self) -> list[tuple[int, int]]:
        """Run-length encoding (version, count) over the loss-masked tokens.

        Example: versions 3 3 5 5 5 give [(3, 2), (5, 3)].
        """
        versions = self.versions[self.loss_mask]
        if len(versions) == 0:
            return []
        starts = np.flatnonzero(np.r_[True, versions[1:] != versions[:-1]])
        counts = np.diff(np.r_[starts, len(versions)])
        return [(int(versions[s]), int(c)) for s, c in zip(starts, counts, strict=True)]

    def _live_versions(self) -> np.ndarray:
        versions: np.ndarray = self.versions[self.loss_mask]
        live: np.ndarray = versions[versions != NO_VERSION]
        return live


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAttempt:
    """One attempt of an episode that raised, as far as it is told: JSON of bounded size."""

    time: float  # seconds since the epoch
    version: int  # of the engine's weights
    env: str
    task_id: str
    purpose: str  # "train" | "eval"
    group_id: int
    sample: int
    ticket: int
    attempt: int  # 0, 1, …
    kind: str  # name of the exception
    error: str  # its text
    place: str  # file:line in the user's code
    traceback: list[str]  # frames of the user's code, outermost first
    reply: list[str]  # text of each turn that was sampled, long ones cut


@dataclass(kw_only=True, eq=False, slots=True)
class Group:
    """The finished rollouts of one prompt: all members of a group, in order of sample."""

    group_id: int
    first_ticket: int
    admission_version: int
    rollouts: list[Rollout]
    advantages: np.ndarray | None = None  # [size] float32, set by the train sink

    @property
    def tickets(self) -> range:
        return range(self.first_ticket, self.first_ticket + len(self.rollouts))


@dataclass(kw_only=True, eq=False, slots=True)
class Batch:
    """Exactly B rollouts, sorted by ticket: what the trainer takes one optimizer step on."""

    index: int  # n, the version that is trained; the step makes version n + 1
    rollouts: list[Rollout]
    advantages: np.ndarray  # [B] float32
