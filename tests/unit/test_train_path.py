"""Gate, dispatcher, sink and ledger joined, with inference that generates token by token on a virtual clock."""

import asyncio
import random
import time

import numpy as np
import pytest

from spmd_rl.config.age_bound import age_bound
from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.gate import Gate
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.orchestrator.order import make_order
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.train_path import PathState, TrainPath
from spmd_rl.orchestrator.train_sink import TrainSink
from tests import fakes
from tests.clock import run_virtual

S, B, G, C = 2, 8, 4, 24


class Run:
    """A small orchestrator; `until` trains up to a version, then stands still."""

    def __init__(
        self,
        *,
        version=0,
        order="admission",
        max_staleness=S,
        max_concurrent=C,
        max_age=None,
        over_age="wait",
        num_tasks=None,
        cursor=0,
        seed=0,
        clock=time.monotonic,
        batch_size=B,
    ):
        coin = random.Random(f"{seed} {version}")
        stream = fakes.tasks(num_tasks)
        for _ in range(cursor):
            next(stream)
        bound = age_bound(
            gate="admission",
            order=order,
            max_staleness=max_staleness,
            batch_size=batch_size,
            group_size=G,
            max_age=max_age,
            over_age=over_age,
        )
        self.policy = Policy(version)
        self.gate = Gate(
            self.policy,
            max_staleness=max_staleness,
            batch_size=batch_size,
            max_concurrent=max_concurrent,
            defer=lambda wake: asyncio.get_running_loop().call_when_settled(wake),
        )
        self.inference = fakes.Inference(self.policy, lambda ticket: coin.uniform(0.5, 14.0))
        self.dispatcher = Dispatcher(
            tasks=stream,
            gate=self.gate,
            policy=self.policy,
            submit=self.inference.submit,
            cancel=self.inference.cancel,
            group_size=G,
        )
        self.sink = TrainSink(
            batch_size=batch_size,
            group_size=G,
            advantages=lambda rewards, usable: rewards.astype(np.float32) + 1,
            order=make_order(order),
            bound=bound,
            over_age=over_age,
        )
        self.ledger = Ledger()
        self.path = TrainPath(
            dispatcher=self.dispatcher,
            sink=self.sink,
            gate=self.gate,
            policy=self.policy,
            ledger=self.ledger,
            clock=clock,
        )
        self.inference.ended = self.ended
        self.trained: list = []  # rollouts, in order
        self.ages: list[int] = []
        self.running_always_matched = True

    def ended(self, rollout) -> None:
        self.ledger.generate(rollout.num_trainable)
        self.path.ended(rollout)
        self.running_always_matched &= self.dispatcher.in_flight == len(self.inference.running)

    async def until(self, version: int | None = None) -> PathState:
        """Train up to `version`, or to the end; one batch is formed ahead of the trainer."""
        batches: asyncio.Queue = asyncio.Queue(1)

        async def form() -> None:
            index = self.policy.version
            while (batch := await self.path.form(index)) is not None:
                await batches.put(batch)
                index += 1
            await batches.put(None)

        async with asyncio.TaskGroup() as tasks:
            parts = (self.dispatcher.run(), self.path.collect(), form())
            running = [tasks.create_task(part) for part in parts]
            while self.policy.version != version and (batch := await batches.get()) is not None:
                self.ages += [batch.index - r.head for r in batch.rollouts if not r.failed]
                self.trained += batch.rollouts
                await asyncio.sleep(8.0)
                self.policy.advance(batch.index + 1)
                self.path.assert_closed()
                self.ledger.assert_tokens_closed()
            for task in running:
                task.cancel()
        return self.path.snapshot()


def test_every_token_and_rollout_is_accounted_for_at_the_end():
    async def main():
        run = Run(num_tasks=51)
        await run.until()
        assert run.dispatcher.drained
        run.path.leave_over()
        run.path.assert_closed()
        run.ledger.assert_tokens_closed()
        ends = {end: number for end, number in run.ledger.rollouts.items() if number}
        assert ends == {"trained": 200, "left_over": 4}
        assert run.ledger.tokens["trained"] + run.ledger.tokens["left_over"] == sum(run.inference.lengths.values())
        assert run.gate.running == 0 and run.gate.waiting == 0

    run_virtual(main())


def test_trained_lengths_are_the_generated_lengths_ticket_by_ticket():
    async def main():
        run = Run(num_tasks=200)
        await run.until()
        assert [(r.ticket, r.num_trainable) for r in run.trained] == sorted(run.inference.lengths.items())
        assert max(run.ages) == S and run.running_always_matched
        assert max(r.tail - r.head for r in run.trained) >= 1

    run_virtual(main())


@pytest.mark.parametrize("order", ["completion", "oldest", "admission"])
@pytest.mark.parametrize("max_age", [None, 3])
def test_a_resumed_run_goes_on_where_the_old_one_stood(order, max_age):
    """Every ticket is trained exactly once, the first step admits at most (S + 1)·B, and ages count on."""

    async def first() -> tuple[Run, PathState, int]:
        run = Run(order=order, max_age=max_age)
        state = await run.until(40)
        return run, state, run.dispatcher.next_group

    async def second(state: PathState, cursor: int) -> tuple[Run, int]:
        run = Run(order=order, max_age=max_age, version=40, cursor=cursor)
        run.path.restore(state)
        restored = run.gate.accepted + run.gate.running - 40 * B
        assert run.gate.accepted == 40 * B + sum(len(g.rollouts) for g in state.groups) + len(state.batches) * B
        await run.until(41)
        admitted = (run.dispatcher.next_group - state.next_group) * G
        assert 0 <= restored <= (S + 1) * B
        return run, admitted

    async def rest(state: PathState, cursor: int) -> Run:
        run = Run(order=order, max_age=max_age, version=40, cursor=cursor)
        run.path.restore(state)
        await run.until(80)
        return run

    before, state, cursor = run_virtual(first())
    assert state.batches and state.unfinished and state.version == 40
    _, admitted = run_virtual(second(state, cursor))
    assert 0 < admitted <= (S + 1) * B
    after = run_virtual(rest(state, cursor))
    tickets = [r.ticket for r in before.trained + after.trained]
    assert len(tickets) == len(set(tickets)) == 80 * B
    if order == "admission":
        assert tickets == list(range(80 * B))
    if max_age is not None:
        assert max(after.ages) <= max_age


@pytest.mark.parametrize("over_age", ["wait", "drop"])
@pytest.mark.parametrize(("order", "max_age"), [("admission", None), ("completion", 1), ("completion", None)])
@pytest.mark.parametrize("before", ["admission", "completion"])
def test_a_run_goes_on_under_a_lower_staleness_that_holds_for_all_that_it_admits_itself(
    before, order, max_age, over_age
):
    low = max_age or 0

    async def first() -> tuple[Run, PathState, int]:
        run = Run(max_staleness=4, max_concurrent=40, order=before)
        state = await run.until(40)
        return run, state, run.dispatcher.next_group

    async def second(state: PathState, cursor: int) -> Run:
        lower = {"max_staleness": low, "max_concurrent": 8, "order": order, "max_age": max_age, "over_age": over_age}
        run = Run(version=40, cursor=cursor, **lower)
        run.path.restore(state)
        assert run.gate.capacity() < G  # nothing is admitted yet
        await run.until(60)
        return run

    old, state, cursor = run_virtual(first())
    new = run_virtual(second(state, cursor))
    tickets = [r.ticket for r in old.trained + new.trained]
    assert len(tickets) == len(set(tickets)) == 60 * B
    own = [age for age, r in zip(new.ages, new.trained, strict=True) if r.ticket >= state.next_ticket]
    restored = [n // B for n, r in enumerate(new.trained) if r.ticket < state.next_ticket]
    assert max(own) == low
    assert max(restored) <= 4


def test_a_resume_with_the_counter_at_zero_is_refused():
    async def main():
        run = Run(version=40)
        with pytest.raises(ExceptionGroup) as caught:
            await run.until(41)
        assert "bound is (S + 1) * B = 24: was the gate restored?" in str(caught.value.exceptions[0])

    run_virtual(main())


@pytest.mark.parametrize("size", [4, 16, 24])
def test_a_run_goes_on_under_another_batch_size(size):
    """Formed batches are taken apart into their groups, in ticket order; counters are those of the size of now."""

    async def first() -> tuple[PathState, int, list[int]]:
        run = Run()
        state = await run.until(5)
        return state, run.dispatcher.next_group, [r.ticket for r in run.trained]

    async def second(state: PathState, cursor: int) -> Run:
        run = Run(version=5, cursor=cursor, batch_size=size)
        run.path.restore(state)
        held = sum(len(holder.rollouts) for holder in (*state.groups, *state.batches))
        assert (run.gate.waiting, run.gate.consumed, run.sink.num_waiting) == (held, 5 * size, held)
        await run.until(12)
        return run

    state, cursor, before = run_virtual(first())
    assert [len(batch.rollouts) for batch in state.batches] == [B]
    run = run_virtual(second(state, cursor))
    assert before + [r.ticket for r in run.trained] == list(range(5 * B + 7 * size))
    assert run.ledger.rollouts["trained"] == 5 * B + 7 * size
    assert max(run.ages) <= S + (size < B)  # what was admitted for larger batches is trained by smaller ones


def test_dropped_groups_are_cancelled_counted_and_replaced():
    async def main():
        run = Run(order="completion", max_age=2, over_age="drop")
        await run.until(60)
        assert max(run.ages) == 2
        assert run.ledger.rollouts["dropped"] > 0 and run.inference.cancelled
        assert run.running_always_matched
        lengths = run.path.mean_lengths()
        assert {end: lengths[end]["tokens"] for end in ("trained", "dropped")} == {
            end: run.ledger.tokens[end] / run.ledger.rollouts[end] for end in ("trained", "dropped")
        }
        assert lengths["dropped"]["tokens"] > lengths["trained"]["tokens"] > 0  # it leans against the long

    run_virtual(main())


def test_what_was_given_up_is_told_once_with_the_batch_after_it():
    async def main():
        run = Run(order="completion", max_age=2, over_age="drop")
        taken = run.path.take_given_up
        told: list = []
        run.policy.on_change(lambda: told.append(taken()))
        await run.until(60)
        told.append(taken())
        assert sum(len(given_up["dropped"]) for given_up in told) == run.ledger.rollouts["dropped"] > 0
        assert not any(given_up["filtered"] for given_up in told)

    run_virtual(main())


def test_the_depth_counts_finished_groups_in_formed_batches_but_the_one_that_is_trained():
    """24 rollouts end at 2 s, 8 more 2 s after each version; a step takes 8 s, from 2 s on."""

    async def main():
        run = Run()
        run.inference.seconds = lambda ticket: 2.0
        depths = {}
        loop = asyncio.get_running_loop()
        for now in (1.0, 3.0, 11.0, 13.0):
            loop.call_at(now, lambda now=now: depths.update({now: run.path.out_depth}))
        await run.until(2)
        assert depths == {1.0: 0, 3.0: 4, 11.0: 2, 13.0: 4}  # groups of 4

    run_virtual(main())


def test_a_batch_that_waits_for_a_slow_rollout_knows_how_long_a_batch_of_others_lay_there():
    """Ticket 0 takes 50 s, the others 2 s: from 2 s on 20 finished ones lie there, more than a batch."""

    async def main(order: str) -> float:
        run = Run(order=order, clock=asyncio.get_running_loop().time)
        run.inference.seconds = lambda ticket: 50.0 if ticket == 0 else 2.0
        running = [asyncio.create_task(part) for part in (run.dispatcher.run(), run.path.collect())]
        await run.path.form(0)
        for task in running:
            task.cancel()
        return run.path.held_back_s

    assert run_virtual(main("admission")) == 48.0
    assert run_virtual(main("completion")) == 0.0


def test_slots_that_lie_ready_are_not_used():
    async def main():
        run = Run(order="completion", version=0)
        await run.until(20)
        index = run.gate.consumed // B
        finished = run.sink.num_ready
        assert run.path.used_slots(index) == run.gate.running + run.gate.accepted - index * B - finished
        assert run.path.used_slots(index) == run.gate.running  # in this order nothing that finished waits for another

    run_virtual(main())


def test_siblings_of_a_failed_member_stay_counted_until_they_end():
    async def main():
        run = Run(num_tasks=1)
        tasks = [asyncio.create_task(run.dispatcher.run()), asyncio.create_task(run.path.collect())]
        await asyncio.sleep(0)
        work = run.inference.submitted[0]
        run.inference.seconds = lambda ticket: 1.0
        first = next(iter(run.inference.running))
        run.inference._timers[first].cancel()
        run.inference._end(work, 0, True)
        assert (run.dispatcher.in_flight, run.gate.running, len(run.inference.running)) == (3, 4, 3)
        await asyncio.gather(*tasks)
        assert (run.dispatcher.in_flight, run.gate.running, run.gate.accepted) == (0, 0, 4)

    run_virtual(main())


def test_a_snapshot_that_sees_the_last_missing_group_first_leaves_its_batch_to_be_formed():
    async def main():
        run = Run()
        run.inference.seconds = lambda ticket: 2.0 if ticket < B else 1000.0
        parts = (run.dispatcher.run(), run.path.collect())
        running = [asyncio.create_task(part) for part in parts]
        forming = asyncio.create_task(run.path.form(0))
        await asyncio.sleep(1.5)
        asyncio.get_running_loop().call_later(0.5, run.path.snapshot)  # in the turn in which both groups end
        await asyncio.sleep(1.0)
        assert forming.done() and [r.ticket for r in forming.result().rollouts] == list(range(B))
        for task in running:
            task.cancel()

    run_virtual(main())
