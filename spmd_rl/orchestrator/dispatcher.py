"""Decides which prompts run next and keeps as much in flight as the gate has room for.

Input side: tasks are turned into groups with consecutive tickets, admitted whole, and handed to `submit` (submission).
Output side: every ended member is reported to `finished`, one at a time and in any order; once all members of a group
have ended, the whole group is on the output queue (`fetch`) exactly once.  There is no asyncio task per rollout.

Promises: `in_flight` is the number of episodes that really run; after `close` or the last task nothing is admitted,
and `fetch` gives None once everything in flight has ended and was fetched.
Knows nothing of sinks, engines or weights, and passes no evaluation work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from spmd_rl.orchestrator.gate import Gate
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.types import Group, GroupWork, Rollout, Task

GROUPS_PER_TURN = 64  # admitted at most before other work of the event loop gets its turn


@dataclass(kw_only=True, slots=True)
class _Pending:
    work: GroupWork
    members: list[Rollout | None]
    num_running: int
    cancelled: bool = field(default=False)


@dataclass(frozen=True, kw_only=True)
class DispatcherState:
    """What a checkpoint keeps; the data cursor is the task iterator's own."""

    next_ticket: int
    next_group: int
    unfinished: list[GroupWork]  # in order of their tickets
    wasted_tokens: int  # of ended members of unfinished groups, which will run again


class Dispatcher:
    """`run` is the submission loop; everything else is called by the wiring."""

    def __init__(
        self,
        *,
        tasks: Iterator[Task],
        gate: Gate,
        policy: Policy,
        submit: Callable[[GroupWork], None],
        group_size: int,
        cancel: Callable[[GroupWork], None] | None = None,  # members then end early, through `finished`
    ) -> None:
        self._tasks, self._gate, self._policy = tasks, gate, policy
        self._submit, self._cancel, self._group_size = submit, cancel, group_size
        self._on_admit: Callable[[GroupWork], None] = lambda work: None
        self._pending: dict[int, _Pending] = {}  # by group_id
        self._again: list[GroupWork] = []  # restored, not yet submitted
        self._output: deque[Group] = deque()
        self._fetcher: asyncio.Future[None] | None = None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._closed = self._abandoned = False
        self.next_ticket = 0
        self.next_group = 0
        self.in_flight = 0

    async def run(self) -> None:
        """Admit until closed or out of tasks.  Waits for: resume, then the gate.  Unblocked by: resume, gate, close."""
        for work in self._again:
            self._start(work)
        self._again = []
        turn = 0
        while True:
            await self._resumed.wait()
            if self._closed or not await self._gate.wait(self._group_size):
                break
            if not self._resumed.is_set():
                continue
            task = next(self._tasks, None)
            if task is None:
                break
            self._admit(task)
            turn += 1
            if turn % GROUPS_PER_TURN == 0:
                await asyncio.sleep(0)
        self.close()

    def finished(self, rollout: Rollout) -> None:
        """A member has ended, well or badly.  Stamps the versions that only this side knows."""
        pending = self._pending.get(rollout.group_id)
        if pending is None or pending.members[rollout.sample] is not None:
            raise RuntimeError(
                f"rollout {rollout.ticket} (group {rollout.group_id}, sample {rollout.sample}) ended twice, "
                "or was never started"
            )
        rollout.admission_version = pending.work.version
        rollout.finished_version = max(self._policy.version, rollout.tail)  # its engine may be first at a version
        pending.members[rollout.sample] = rollout
        pending.num_running -= 1
        self.in_flight -= 1
        if pending.num_running == 0 and not self._abandoned:
            del self._pending[rollout.group_id]
            work = pending.work
            self._output.append(
                Group(
                    group_id=work.group_id,
                    first_ticket=work.first_ticket,
                    admission_version=work.version,
                    rollouts=[member for member in pending.members if member is not None],
                )
            )
            self._wake_fetcher()

    async def fetch(self) -> Group | None:
        """The next finished group; None once closed and nothing is left.  Unblocked by `finished` and `close`."""
        while not self._output:
            if self._closed and not self._pending:
                return None
            self._fetcher = asyncio.get_running_loop().create_future()
            try:
                await self._fetcher
            finally:
                self._fetcher = None
        return self._output.popleft()

    def fetch_nowait(self) -> Group | None:
        """The next finished group that is there already."""
        return self._output.popleft() if self._output else None

    @property
    def output_depth(self) -> int:
        """Finished groups that nobody has fetched."""
        return len(self._output)

    @property
    def oldest_version(self) -> int | None:
        """At which the oldest group in flight was admitted."""
        pending = next(iter(self._pending.values()), None)  # they are in order of admission
        return None if pending is None else pending.work.version

    @property
    def drained(self) -> bool:
        """Closed, and nothing is in flight or on the output queue."""
        return self._closed and not self._pending and not self._output

    def pause(self) -> None:
        """Admit nothing until `resume`; what is in flight goes on."""
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    def close(self) -> None:
        """Admit nothing more, ever; what is in flight goes on."""
        self._closed = True
        self._gate.close()
        self._resumed.set()
        self._wake_fetcher()

    def abandon(self) -> None:
        """After `close`: what has not ended stays unfinished, whatever becomes of it, and nobody waits for it."""
        self._abandoned = True
        self._gate.abandon()

    def abort(self, group_id: int) -> None:
        """Have the running members of a group cancelled; they still end one by one."""
        pending = self._pending.get(group_id)
        if pending is not None and not pending.cancelled and self._cancel is not None:
            pending.cancelled = True
            self._cancel(pending.work)

    def on_admit(self, callback: Callable[[GroupWork], None]) -> None:
        """Have `callback` called with every newly admitted group, before it is submitted."""
        self._on_admit = callback

    def state(self) -> DispatcherState:
        """Everything but the output queue, which is to be fetched first."""
        done = (m for pending in self._pending.values() for m in pending.members if m is not None)
        return DispatcherState(
            next_ticket=self.next_ticket,
            next_group=self.next_group,
            unfinished=[pending.work for pending in self._pending.values()] + self._again,
            wasted_tokens=sum(rollout.num_sampled for rollout in done),
        )

    def restore(self, *, next_ticket: int, next_group: int, unfinished: Sequence[GroupWork]) -> list[GroupWork]:
        """Before `run`: `run` first submits `unfinished` again, under their old tickets and the version of now.

        Returns them so; the gate must count their slots as running already.
        """
        self.next_ticket, self.next_group = next_ticket, next_group
        ordered = sorted(unfinished, key=lambda work: work.first_ticket)
        self._again = [replace(work, version=self._policy.version) for work in ordered]
        return list(self._again)

    def _admit(self, task: Task) -> None:
        size = self._group_size
        self._gate.admit(size)
        work = GroupWork(
            group_id=self.next_group,
            first_ticket=self.next_ticket,
            size=size,
            task=task,
            version=self._policy.version,
        )
        self.next_group += 1
        self.next_ticket += size
        self._on_admit(work)
        self._start(work)

    def _start(self, work: GroupWork) -> None:
        self._pending[work.group_id] = _Pending(work=work, members=[None] * work.size, num_running=work.size)
        self.in_flight += work.size
        self._submit(work)

    def _wake_fetcher(self) -> None:
        if self._fetcher is not None and not self._fetcher.done():
            self._fetcher.set_result(None)
