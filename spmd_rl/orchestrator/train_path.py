"""From ended episodes to batches: the few lines that join dispatcher, sink, gate and ledger.

    ended(rollout) → dispatcher → collect(): sink.add → gate.settle, ledger → form(n): sink.next_batch → gate.consume

Given the four and the policy.  Promises: every admitted slot is told to the gate and to the ledger exactly once per
change; `accepted` slots are counted as trained when the version after theirs is live.
Knows nothing of engines, messages, disks or weights.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.gate import Gate
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.train_sink import KEPT, TrainSink
from spmd_rl.types import Batch, Group, GroupWork, Rollout


@dataclass(frozen=True, kw_only=True)
class PathState:
    """What a checkpoint at `version` keeps of the rollouts."""

    version: int
    next_ticket: int
    next_group: int
    unfinished: list[GroupWork]  # will run again under their tickets
    groups: list[Group]  # kept, in no batch, in order of completion
    batches: list[Batch]  # formed and untrained: version, version + 1, …
    ledger: dict[str, object]


class TrainPath:
    """`ended` for every episode's end, `collect` as a task, `form(n)` for one batch after the other."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        sink: TrainSink,
        gate: Gate,
        policy: Policy,
        ledger: Ledger,
        observe: Callable[[Sequence[Rollout]], None] = lambda rollouts: None,  # sees the members of every judged group
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.held_back_s = 0.0  # of the newest batch: B kept rollouts lay there, and it could not be formed of them
        self.solved = ""  # what came last, in words, once all of it was solved
        self._clock = clock
        self._observe = observe
        self._dispatcher, self._sink, self._gate = dispatcher, sink, gate
        self._policy, self._ledger = policy, ledger
        self._untrained: dict[int, Batch] = {}  # by index
        self._met: Counter[str] = Counter()  # rollouts by outcome, in this process
        self._seconds: dict[str, float] = defaultdict(float)  # that they took, as far as they got
        self._tokens: Counter[str] = Counter()  # that were sampled for them
        self._former: asyncio.Future[None] | None = None
        self._collected = False
        self._given_up = _nothing_given_up()  # since it was taken last
        dispatcher.on_admit(self._admitted)
        policy.on_change(self._trained)

    def ended(self, rollout: Rollout) -> None:
        """An episode ended, well or badly."""
        self._ledger.end(rollout.num_sampled, rollout.num_wasted_tokens)
        self._dispatcher.finished(rollout)

    async def collect(self) -> None:
        """Judge groups as they finish.  Waits for finished groups; ends when the dispatcher is drained.

        Where they are solved, all of them, nothing more is admitted.  GuardError where they teach nothing otherwise.
        """
        while (group := await self._dispatcher.fetch()) is not None:
            self._settle(group)
            if self._sink.may_form:
                self._wake()
            if not self.solved and not self._sink.still_teaches():
                self.solved = self._sink.barren
                self._dispatcher.close()
        self._collected = True
        self._wake()

    async def form(self, index: int) -> Batch | None:
        """Wait for batch `index`; None once nothing more can come.  Unblocked by `collect`."""
        enough_at: float | None = None
        while (batch := self._sink.next_batch(index)) is None:
            if self._collected:
                return None
            if enough_at is None and self._sink.may_form:
                enough_at = self._clock()
            self._former = asyncio.get_running_loop().create_future()
            try:
                await self._former
            finally:
                self._former = None
        self.held_back_s = 0.0 if enough_at is None else self._clock() - enough_at
        self._untrained[index] = batch
        self._gate.consume()
        self._expire(index + 1)
        return batch

    def take_given_up(self) -> dict[str, list[Rollout]]:
        """Rollouts of groups given up since the last call: "dropped" for their age, "filtered" for anything else.

        "skipped": those of them whose prompt left no room for a reply.
        """
        given_up, self._given_up = self._given_up, _nothing_given_up()
        return given_up

    @property
    def out_depth(self) -> int:
        """Finished groups that wait, judged or not and in a batch or not; the batch of the live version is in work."""
        in_work = self._policy.version in self._untrained
        waiting = self._gate.waiting - in_work * self._gate.batch_size
        return self._dispatcher.output_depth + waiting // self._sink.group_size

    def used_slots(self, index: int) -> int:
        """Slots in batch `index`, the newest one, running, or waiting for one that runs: all that do not lie ready."""
        gate = self._gate
        return gate.accepted - index * gate.batch_size + gate.running - self._sink.num_ready

    def leave_over(self) -> None:
        """At the end: what is kept and in no batch will not be trained."""
        groups, _ = self._sink.snapshot()
        self._count((r for group in groups for r in group.rollouts), "left_over")
        self._sink.clear()
        if groups:
            self._gate.give_back(sum(len(group.rollouts) for group in groups))

    def assert_closed(self) -> None:
        """The rollout ledger against the gate's counters."""
        self._ledger.assert_closed(in_flight=self._gate.running, waiting=self._gate.waiting)

    def mean_lengths(self) -> dict[str, dict[str, float]]:
        """Tokens and seconds of a rollout by outcome, aborted ones as far as they got: what dropping leans against."""
        return {
            end: {"tokens": self._tokens[end] / met, "seconds": self._seconds[end] / met}
            for end, met in self._met.items()
        }

    def snapshot(self) -> PathState:
        """At any moment between two events; what has finished is judged first."""
        while (group := self._dispatcher.fetch_nowait()) is not None:
            self._settle(group)
        if self._sink.may_form:  # `collect` will not see these
            self._wake()
        state = self._dispatcher.state()
        groups, recorded = self._sink.snapshot()
        ledger = Ledger()
        ledger.restore(self._ledger.state())
        ledger.waste(state.wasted_tokens)
        return PathState(
            version=self._policy.version,
            next_ticket=state.next_ticket,
            next_group=state.next_group,
            unfinished=state.unfinished,
            groups=groups,
            batches=[*self._untrained.values(), *recorded],
            ledger=ledger.state(),
        )

    def restore(self, state: PathState) -> None:
        """Into fresh parts, with the policy at the version resumed, before the dispatcher runs.

        The gate counts as if every batch so far had been of the B of now: its formula looks at differences alone.
        """
        if state.version != self._policy.version:
            raise RuntimeError(f"state of version {state.version} restored at version {self._policy.version}")
        unfinished = self._dispatcher.restore(
            next_ticket=state.next_ticket, next_group=state.next_group, unfinished=state.unfinished
        )
        self._sink.restore(
            index=state.version,
            next_ticket=state.next_ticket,
            groups=state.groups,
            batches=state.batches,
            unfinished=unfinished,
        )
        finished = sum(len(group.rollouts) for group in state.groups)
        finished += sum(len(batch.rollouts) for batch in state.batches)
        running = sum(work.size for work in unfinished)
        self._ledger.restore(state.ledger)
        self._gate.restore(accepted=state.version * self._gate.batch_size + finished, running=running)
        self._expire(state.version)
        self.assert_closed()

    def _admitted(self, work: GroupWork) -> None:
        self._ledger.admit(work.size)
        self._sink.admitted(work)

    def _settle(self, group: Group) -> None:
        self._observe(group.rollouts)
        verdict, size = self._sink.add(group), len(group.rollouts)
        if verdict == KEPT:
            self._gate.settle(accepted=size)
        else:
            outcome = "dropped" if verdict == "over_age" else "filtered"
            self._count(group.rollouts, outcome)
            self._gate.settle(rejected=size)
            for rollout in group.rollouts:
                self._given_up["skipped" if rollout.skipped and outcome != "dropped" else outcome].append(rollout)

    def _expire(self, index: int) -> None:
        expired = self._sink.expire(index)
        for group in expired.finished:
            self._count(group.rollouts, "dropped")
            self._gate.give_back(len(group.rollouts))
            self._given_up["dropped"] += group.rollouts
        for work in expired.running:
            self._dispatcher.abort(work.group_id)

    def _trained(self) -> None:
        """The version after a batch is live: the batch has been trained."""
        batch = self._untrained.pop(self._policy.version - 1)
        self._count(batch.rollouts, "trained")

    def _count(self, rollouts: Iterable[Rollout], outcome: str) -> None:
        """Tell the ledger; a failed member failed whatever its group met, unless it was dropped."""
        counts: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for rollout in rollouts:
            if rollout.failed and outcome != "dropped":
                end = "skipped" if rollout.skipped else "failed"
            elif outcome == "trained" and not self._sink.usable(rollout):
                end = "filtered"
            else:
                end = outcome
            counts[end] += 1
            tokens[end] += rollout.num_sampled
            self._met[end] += 1
            self._seconds[end] += rollout.generation_s
            self._tokens[end] += rollout.num_sampled or rollout.num_wasted_tokens  # of an aborted one: all it sampled
        for end, count in counts.items():
            self._ledger.settle(end, count, tokens[end])

    def _wake(self) -> None:
        if self._former is not None and not self._former.done():
            self._former.set_result(None)


def _nothing_given_up() -> dict[str, list[Rollout]]:
    return {"filtered": [], "dropped": [], "skipped": []}
