"""Small real implementations for tests: rollouts, tasks, and an inference side that runs on the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np

from spmd_rl.metrics.bottleneck import Knobs
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.types import Group, GroupWork, Rollout, Task


def rollout(
    work: GroupWork, sample: int = 0, *, versions: list[int] | None = None, reward: float = 0.0, failed: bool = False
) -> Rollout:
    """A member of `work`: two prompt tokens, then one sampled token per version (default: one, of its admission)."""
    made = Rollout(
        env=work.task.env,
        task_id=work.task.task_id,
        group_id=work.group_id,
        sample=sample,
        ticket=work.first_ticket + sample,
        purpose=work.purpose,
        reward=reward,
        finish_reason="error" if failed else "stop",
        error="ValueError: made to fail" if failed else "",
        admission_version=work.version,
        finished_version=work.version,
    )
    versions = [work.version] if versions is None else versions
    made.append(np.array([1, 2]))
    made.append(np.arange(len(versions)), np.full(len(versions), -0.5), np.array(versions))
    return made


def work(group_id: int = 0, *, size: int = 1, version: int = 0, env: str = "fake", purpose: str = "train") -> GroupWork:
    """Group `group_id` of groups of one size: its first ticket is group_id · size."""
    task = Task(env=env, task_id=str(group_id))
    return GroupWork(
        group_id=group_id, first_ticket=group_id * size, size=size, task=task, version=version, purpose=purpose
    )


def group(of: GroupWork, rewards: list[float] | None = None, *, failed: tuple[int, ...] = ()) -> Group:
    """All members of `of`, finished at once; by default with rewards 0, 1, 2 …"""
    rewards = [float(i) for i in range(of.size)] if rewards is None else rewards
    members = [rollout(of, i, reward=r, failed=i in failed) for i, r in enumerate(rewards)]
    return Group(group_id=of.group_id, first_ticket=of.first_ticket, admission_version=of.version, rollouts=members)


def knobs(**changed: object) -> Knobs:
    """What a run was set to."""
    usual: dict[str, object] = {"max_staleness": 2, "batch_size": 4, "max_concurrent": 64, "gate": "admission"}
    return Knobs(
        **usual | {"order": "admission", "window": 1, "max_age": -1, "kv_cache_mib": 0, "solved_at": 1.0} | changed
    )


def tasks(num: int | None = None) -> Iterator[Task]:
    """`num` tasks, or endlessly many."""
    number = 0
    while num is None or number < num:
        yield Task(env="fake", task_id=str(number))
        number += 1


class Inference:
    """Runs every member of a submitted group for `seconds(ticket)` on the loop's clock, stamped with live versions.

    One sampled token per second begun, each of the version that is live when it is sampled.
    """

    def __init__(self, policy: Policy, seconds: Callable[[int], float]) -> None:
        self.policy, self.seconds = policy, seconds
        self.ended: Callable[[Rollout], None] | None = None
        self.running: dict[int, list[int]] = {}  # ticket -> versions so far
        self.submitted: list[GroupWork] = []
        self.cancelled: list[GroupWork] = []
        self.lengths: dict[int, int] = {}  # ticket -> tokens generated
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def submit(self, work: GroupWork) -> None:
        self.submitted.append(work)
        for sample, ticket in enumerate(work.tickets):
            self.running[ticket] = []
            self._token(work, sample, self.seconds(ticket))

    def cancel(self, work: GroupWork) -> None:
        self.cancelled.append(work)
        loop = asyncio.get_running_loop()
        for sample, ticket in enumerate(work.tickets):
            if ticket in self.running:
                self._timers[ticket].cancel()
                loop.call_soon(self._end, work, sample, True)

    def _token(self, work: GroupWork, sample: int, left_s: float) -> None:
        ticket = work.first_ticket + sample
        if left_s <= 0:
            self._end(work, sample, False)
            return
        self.running[ticket].append(self.policy.version)
        loop, seconds = asyncio.get_running_loop(), min(1.0, left_s)
        self._timers[ticket] = loop.call_later(seconds, self._token, work, sample, left_s - seconds)

    def _end(self, work: GroupWork, sample: int, cancelled: bool) -> None:
        ticket = work.first_ticket + sample
        versions = self.running.pop(ticket)
        self.lengths[ticket] = len(versions)
        self.ended(rollout(work, sample, versions=versions, reward=float(sample), failed=cancelled))
