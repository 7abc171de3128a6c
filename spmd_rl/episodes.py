"""Runs the episodes of admitted groups on the event loop of an inference rank.

Given environments and a `generate`; promises one finished rollout for each member, with everything that the rest of the
system wants to know about it.  An episode that raises is tried again, then counted failed; one that says that trying
again is of no use (`NotRetried`) is counted at once.  A turn that does not fit into the context is cut at its end.
Knows nothing of ranks, transport, sinks or weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from spmd_rl.types import Cancelled, Completion, GroupWork, NotRetried, Rollout, Sampling

if TYPE_CHECKING:
    from spmd_rl.envs import Environment


class PromptTooLong(NotRetried):
    """A prompt that leaves no room for a reply."""


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
    ) -> None:
        self._envs, self._generate, self._engine_version = envs, generate, engine_version
        self._max_seq_len = max_seq_len
        self._sampling, self._seed, self._max_retries, self._finished = sampling, seed, max_retries, finished
        self._tasks: dict[tuple[str, int], asyncio.Task[Rollout]] = {}  # by purpose and ticket

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
        """Abort members that still run; they come back failed, with the error "cancelled"."""
        for ticket in tickets:
            if task := self._tasks.get((purpose, ticket)):
                task.cancel()

    async def _run(self, work: GroupWork, sample: int, ticket: int) -> Rollout:
        sampled = 0  # tokens of all attempts
        for attempt in range(self._max_retries + 1):
            spent: list[int] = []
            again = False
            try:
                rollout = await self._attempt(work, sample, ticket, attempt, spent)
            except NotRetried as error:
                rollout = _failed(f"{type(error).__name__}: {error}")
            except (Exception, asyncio.CancelledError, SystemExit) as error:
                # the environment is the user's code: its failure is counted, not fatal
                again = not asyncio.current_task().cancelling()
                rollout = _failed(f"{type(error).__name__}: {error}" if again else "cancelled")
            sampled += sum(spent)
            if not again:
                break
        rollout.num_wasted_tokens = sampled - rollout.num_sampled
        return rollout

    def _ended(self, work: GroupWork, sample: int, ticket: int, start: float, task: asyncio.Task[Rollout]) -> None:
        rollout = _failed("cancelled") if task.cancelled() else task.result()  # cancelled here: before it began
        rollout.env, rollout.task_id = work.task.env, work.task.task_id
        rollout.group_id, rollout.sample, rollout.ticket, rollout.purpose = work.group_id, sample, ticket, work.purpose
        rollout.admission_version = work.version
        rollout.generation_s = time.monotonic() - start
        del self._tasks[work.purpose, ticket]
        self._finished(rollout)

    async def _attempt(self, work: GroupWork, sample: int, ticket: int, attempt: int, spent: list[int]) -> Rollout:
        turn = 0

        async def generate(
            token_ids: np.ndarray, max_tokens: int | None = None, *, stop: Sequence[str] = ()
        ) -> Completion:
            nonlocal turn
            sampling = self._sampling[work.purpose]
            seed = seed_of(self._seed, work.purpose, ticket, sample, attempt, turn)
            room = self._max_seq_len - len(token_ids)
            if room < 1 and turn == 0:
                raise PromptTooLong(f"{len(token_ids)} tokens leave no room for a reply in {self._max_seq_len}")
            turn += 1
            if room < 1:
                return Completion.empty("length")
            limit = min(max_tokens or sampling.max_tokens, sampling.max_tokens, room)
            sampling = replace(sampling, seed=seed, max_tokens=limit, stop=tuple(stop))
            try:
                completion, wasted = await self._generate(np.asarray(token_ids, np.int32), sampling)
            except Cancelled as cancelled:
                spent.append(cancelled.tokens)
                raise asyncio.CancelledError from None  # the plain one: an environment's asyncio.timeout knows no other
            spent.append(len(completion.token_ids) + wasted)
            return completion

        rollout = await self._envs[work.task.env].rollout(work.task, generate)
        if not np.isfinite(rollout.reward):
            raise ValueError(f"reward {rollout.reward}")
        rollout.num_turns = turn
        return rollout


def _failed(error: str) -> Rollout:
    return Rollout(env="", task_id="", finish_reason="error", error=error)


def seed_of(*parts: object) -> int:
    """A 63-bit seed from anything that prints, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
