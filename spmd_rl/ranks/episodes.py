"""Runs the episodes of admitted groups on the event loop of an inference rank.

Given environments and a `generate`; promises one finished rollout for each member, with everything that the rest of the
system wants to know about it.  An episode that raises is tried again, then counted failed; one that says that trying
again is of no use (`NotRetried`) is counted at once.  Each attempt that raised is told, with its place in the
user's code and what was sampled.  A turn that does not fit into the context is cut at its end, a prompt that leaves no
room for a reply is skipped.
Knows nothing of ranks, transport, sinks or weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from spmd_rl.diagnostics.user_code import BadReturn, Told, shown, tell
from spmd_rl.envs.environment import check_ids, checked_rollout
from spmd_rl.types import Cancelled, Completion, FailedAttempt, Finish, GroupWork, NotRetried, Rollout, Sampling

if TYPE_CHECKING:
    from spmd_rl.envs.environment import Environment

MOST_TURNS = 16  # whose text is told of an attempt that failed, the last ones
MOST_TEXT = 4000  # characters of each, half of them from its end


class PromptTooLong(NotRetried):
    """A prompt that leaves no room for a reply."""


@dataclass(kw_only=True, eq=False)
class _Attempt:
    """One attempt of an episode, as it goes on."""

    number: int
    spent: int = 0  # tokens sampled, wasted ones included
    sampled: int = 0  # tokens handed to the environment
    replies: list[np.ndarray] = field(default_factory=list)  # of each turn, token ids
    turns: int = 0
    too_long: PromptTooLong | None = None


class Episodes:
    """Start groups with `start`; each member's rollout comes back through `finished`, in any order."""

    def __init__(
        self,
        *,
        envs: Mapping[str, Environment],
        generate: Callable[[np.ndarray, Sampling], Awaitable[tuple[Completion, int]]],
        engine_version: Callable[[], int],
        sampling: Mapping[str, Sampling],  # by purpose
        max_seq_len: int,  # tokens of a context, completion included
        seed: int,
        max_retries: int,
        finished: Callable[[Rollout], None],
        failed: Callable[[FailedAttempt], None] = lambda attempt: None,  # of each attempt that raised
        decode: Callable[[np.ndarray], str] = str,  # for what is told of those
        vocab_size: int | None = None,  # of the model; None: token ids are not checked
    ) -> None:
        self._failed, self._decode, self._vocab_size = failed, decode, vocab_size
        self._envs, self._generate, self._engine_version = envs, generate, engine_version
        self._max_seq_len = max_seq_len
        self._sampling, self._seed, self._max_retries, self._finished = sampling, seed, max_retries, finished
        self._tasks: dict[tuple[str, int], asyncio.Task[Rollout]] = {}  # by purpose and ticket
        self._cancelled: set[tuple[str, int]] = set()  # by `cancel`; a TaskGroup that fails cancels its task too

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: GroupWork) -> None:
        """Start all members.  RuntimeError when the engine's weights are older than the group's admission."""
        if self._engine_version() < work.version:
            raise RuntimeError(
                f"group {work.group_id} was admitted at version {work.version}, "
                f"the engine still holds {self._engine_version()}"
            )
        for sample, ticket in enumerate(work.tickets):
            task = asyncio.create_task(self._run(work, sample, ticket))
            task.add_done_callback(partial(self._ended, work, sample, ticket, time.monotonic()))
            self._tasks[work.purpose, ticket] = task

    def cancel(self, tickets: range, purpose: str = "train") -> None:
        """Abort members that still run; they come back as `Finish.CANCELLED`."""
        for ticket in tickets:
            if task := self._tasks.get((purpose, ticket)):
                self._cancelled.add((purpose, ticket))
                task.cancel()

    async def _run(self, work: GroupWork, sample: int, ticket: int) -> Rollout:
        spent = 0  # tokens of all attempts
        for number in range(self._max_retries + 1):
            attempt = _Attempt(number=number)
            again = False
            try:
                rollout = await self._attempt(work, sample, ticket, attempt)
            except BaseException as error:  # the environment is the user's code: its failure is counted, not fatal
                if (work.purpose, ticket) in self._cancelled:
                    rollout = _unmeasured(Finish.CANCELLED, "cancelled")
                elif attempt.too_long is not None:  # whatever the environment made of it
                    rollout = _unmeasured(Finish.SKIPPED, f"PromptTooLong: {attempt.too_long}")
                else:
                    told = tell(error)
                    self._failed(self._told(work, sample, ticket, attempt, told))
                    rollout = _unmeasured(Finish.ERROR, str(told))
                    again = not isinstance(told.error, NotRetried)
            spent += attempt.spent
            if not again:
                break
        rollout.num_wasted_tokens = spent - rollout.num_sampled
        return rollout

    def _told(self, work: GroupWork, sample: int, ticket: int, attempt: _Attempt, told: Told) -> FailedAttempt:
        return FailedAttempt(
            time=time.time(),
            version=self._engine_version(),
            env=work.task.env,
            task_id=work.task.task_id,
            purpose=work.purpose,
            group_id=work.group_id,
            sample=sample,
            ticket=ticket,
            attempt=attempt.number,
            kind=told.kind,
            error=told.text,
            place=told.place,
            traceback=told.frames,
            reply=[_cut(self._decode(ids)) for ids in attempt.replies[-MOST_TURNS:]],
        )

    def _ended(self, work: GroupWork, sample: int, ticket: int, start: float, task: asyncio.Task[Rollout]) -> None:
        before = task.cancelled()  # it began
        rollout = _unmeasured(Finish.CANCELLED, "cancelled") if before else task.result()
        rollout.env, rollout.task_id = work.task.env, work.task.task_id
        rollout.group_id, rollout.sample, rollout.ticket, rollout.purpose = work.group_id, sample, ticket, work.purpose
        rollout.admission_version = work.version
        rollout.generation_s = time.monotonic() - start
        del self._tasks[work.purpose, ticket]
        self._cancelled.discard((work.purpose, ticket))
        self._finished(rollout)

    async def _attempt(self, work: GroupWork, sample: int, ticket: int, attempt: _Attempt) -> Rollout:
        async def generate(
            token_ids: np.ndarray, max_tokens: int | None = None, *, stop: Sequence[str] = ()
        ) -> Completion:
            if (work.purpose, ticket) in self._cancelled:  # an environment that goes on all the same
                raise asyncio.CancelledError
            sampling = self._sampling[work.purpose]
            prompt = self._prompt(token_ids)
            if max_tokens is not None and max_tokens < 1:
                raise ValueError(f"max_tokens = {max_tokens}: at least 1, or None for what the run allows")
            seed = seed_of(self._seed, work.purpose, ticket, sample, attempt.number, attempt.turns)
            room = self._max_seq_len - len(prompt)
            if room < 1 and attempt.turns == 0:
                attempt.too_long = PromptTooLong(
                    f"{len(prompt)} tokens leave no room for a reply in {self._max_seq_len}"
                )
                raise attempt.too_long
            attempt.turns += 1
            if room < 1:
                return Completion.empty("length")
            limit = min(max_tokens or sampling.max_tokens, sampling.max_tokens, room)
            sampling = replace(sampling, seed=seed, max_tokens=limit, stop=tuple(stop))
            try:
                completion, wasted = await self._generate(prompt, sampling)
            except Cancelled as cancelled:
                attempt.spent += cancelled.tokens
                raise asyncio.CancelledError from None  # the plain one: an environment's asyncio.timeout knows no other
            attempt.spent += len(completion.token_ids) + wasted
            attempt.sampled += len(completion.token_ids)
            attempt.replies.append(completion.token_ids)
            return completion

        play = self._envs[work.task.env].rollout
        playing = play(work.task, generate)
        if not inspect.isawaitable(playing):
            raise BadReturn(f"an episode gave back {shown(playing)}: `rollout` is to be an `async def`", play)
        rollout = checked_rollout(await playing, play, sampled=attempt.sampled, vocab_size=self._vocab_size)
        rollout.num_turns = attempt.turns
        return rollout

    def _prompt(self, token_ids: np.ndarray) -> np.ndarray:
        """[N] int32; ValueError for what an engine could not take."""
        given = np.asarray(token_ids)
        if given.ndim != 1 or not len(given) or given.dtype.kind not in "iuf" or (given % 1 != 0).any():
            raise ValueError(f"a context of shape {given.shape} and type {given.dtype}: a row of token ids is wanted")
        check_ids(given, self._vocab_size)
        return given.astype(np.int32, copy=False)


def _unmeasured(finish: Finish, error: str) -> Rollout:
    return Rollout(env="", task_id="", finish_reason=finish, error=error)


def _cut(text: str) -> str:
    """The beginning and the end of a long text."""
    half = MOST_TEXT // 2
    return text if len(text) <= MOST_TEXT else f"{text[:half]} … {text[-half:]}"


def seed_of(*parts: object) -> int:
    """A 63-bit seed from anything that prints, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
