import asyncio

import pytest

from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.gate import Gate
from spmd_rl.orchestrator.policy import Policy
from tests import fakes
from tests.clock import run_virtual


def make(num_tasks: int | None = None, *, group_size: int = 2, version: int = 0, max_concurrent: int = 4, cancel=None):
    policy = Policy(version)
    gate = Gate(policy, max_staleness=2, batch_size=4, max_concurrent=max_concurrent)
    gate.restore(accepted=4 * version, running=0)
    submitted = []
    dispatcher = Dispatcher(
        tasks=fakes.tasks(num_tasks),
        gate=gate,
        policy=policy,
        submit=submitted.append,
        cancel=cancel,
        group_size=group_size,
    )
    return dispatcher, gate, policy, submitted


async def turn() -> None:
    """Let everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_groups_are_admitted_whole_with_consecutive_tickets():
    async def main():
        dispatcher, gate, _, submitted = make(max_concurrent=5)
        running = asyncio.create_task(dispatcher.run())
        await turn()
        assert [list(work.tickets) for work in submitted] == [[0, 1], [2, 3]]
        assert [work.task.task_id for work in submitted] == ["0", "1"]
        assert (gate.running, dispatcher.in_flight) == (4, 4)
        dispatcher.close()
        await running

    run_virtual(main())


def test_a_group_is_on_the_output_queue_once_its_last_member_has_ended():
    async def main():
        dispatcher, gate, _, submitted = make()
        running = asyncio.create_task(dispatcher.run())
        await turn()
        second = submitted[1]
        dispatcher.finished(fakes.rollout(second, 1))
        assert (dispatcher.output_depth, dispatcher.in_flight, gate.running) == (0, 3, 4)
        dispatcher.finished(fakes.rollout(second, 0, failed=True))
        assert (dispatcher.output_depth, dispatcher.in_flight, gate.running) == (1, 2, 4)
        group = await dispatcher.fetch()
        assert (group.group_id, group.first_ticket, [r.sample for r in group.rollouts]) == (1, 2, [0, 1])
        running.cancel()

    run_virtual(main())


def test_a_member_cannot_end_twice():
    async def main():
        dispatcher, _, _, submitted = make()
        running = asyncio.create_task(dispatcher.run())
        await turn()
        dispatcher.finished(fakes.rollout(submitted[0], 0))
        with pytest.raises(RuntimeError, match=r"rollout 0 .* ended twice"):
            dispatcher.finished(fakes.rollout(submitted[0], 0))
        running.cancel()

    run_virtual(main())


def test_ended_rollouts_carry_the_versions_of_admission_and_arrival():
    async def main():
        dispatcher, gate, policy, submitted = make(1, version=3)
        running = asyncio.create_task(dispatcher.run())
        await turn()
        gate.restore(accepted=16, running=2)
        gate.consumed = 16
        policy.advance(4)
        for sample in (0, 1):
            dispatcher.finished(fakes.rollout(submitted[0], sample))
        group = await dispatcher.fetch()
        assert [(r.admission_version, r.finished_version) for r in group.rollouts] == [(3, 4), (3, 4)]
        await running

    run_virtual(main())


def test_a_paused_dispatcher_admits_nothing_until_it_is_resumed():
    async def main():
        dispatcher, gate, _, submitted = make()
        running = asyncio.create_task(dispatcher.run())
        await turn()
        dispatcher.pause()
        gate.settle(rejected=4)
        await turn()
        assert len(submitted) == 2
        dispatcher.resume()
        await turn()
        assert len(submitted) == 4
        dispatcher.close()
        await running

    run_virtual(main())


def test_after_the_last_task_the_queue_drains_and_says_so():
    async def main():
        dispatcher, _, _, submitted = make(1)
        running = asyncio.create_task(dispatcher.run())
        fetched = asyncio.create_task(dispatcher.fetch())
        await running
        assert not fetched.done() and not dispatcher.drained
        for sample in (0, 1):
            dispatcher.finished(fakes.rollout(submitted[0], sample))
        assert (await fetched).group_id == 0
        assert await dispatcher.fetch() is None and dispatcher.drained

    run_virtual(main())


def test_closing_an_idle_dispatcher_ends_the_fetch():
    async def main():
        dispatcher, _, _, _ = make()
        fetched = asyncio.create_task(dispatcher.fetch())
        await turn()
        dispatcher.close()
        assert await fetched is None
        await dispatcher.run()

    run_virtual(main())


def test_an_aborted_group_is_cancelled_once_and_still_ends_member_by_member():
    async def main():
        cancelled = []
        dispatcher, _, _, submitted = make(1, cancel=cancelled.append)
        await dispatcher.run()
        dispatcher.abort(0)
        dispatcher.abort(0)
        assert cancelled == [submitted[0]] and dispatcher.in_flight == 2
        for sample in (0, 1):
            dispatcher.finished(fakes.rollout(submitted[0], sample, failed=True))
        assert (await dispatcher.fetch()).group_id == 0

    run_virtual(main())


def test_unfinished_groups_run_again_under_their_tickets_and_the_version_of_now():
    async def main():
        before, _, _, _ = make()
        running = asyncio.create_task(before.run())
        await turn()
        before.finished(fakes.rollout(fakes.work(0, size=2), 0))
        running.cancel()
        state = before.state()
        assert (state.next_ticket, state.next_group, state.wasted_tokens) == (4, 2, 1)
        after, gate, _, submitted = make(version=7, max_concurrent=6)
        after.restore(next_ticket=state.next_ticket, next_group=state.next_group, unfinished=state.unfinished)
        gate.restore(accepted=28, running=4)
        again = asyncio.create_task(after.run())
        await turn()
        assert [(w.first_ticket, w.group_id, w.version) for w in submitted] == [(0, 0, 7), (2, 1, 7), (4, 2, 7)]
        assert after.in_flight == 6
        again.cancel()

    run_virtual(main())


def test_what_is_abandoned_stays_unfinished_though_it_ends_and_holds_up_no_version():
    async def main():
        dispatcher, gate, _, submitted = make()
        running = asyncio.create_task(dispatcher.run())
        await turn()
        idle = asyncio.create_task(gate.idle(2))
        dispatcher.close()
        await turn()
        assert not idle.done()
        dispatcher.abandon()
        for sample in (0, 1):
            dispatcher.finished(fakes.rollout(submitted[0], sample))
        await idle
        assert dispatcher.fetch_nowait() is None and dispatcher.in_flight == 2
        assert dispatcher.state().unfinished == submitted and dispatcher.state().wasted_tokens == 2
        await running

    run_virtual(main())


def test_a_rollout_has_not_finished_before_the_version_that_sampled_it():
    async def main():
        dispatcher, _, policy, submitted = make()
        running = asyncio.create_task(dispatcher.run())
        await turn()
        ahead = fakes.rollout(submitted[0], 0, versions=[0, 1])  # its engine has swapped, the policy is not there yet
        dispatcher.finished(ahead)
        assert (policy.version, ahead.finished_version) == (0, 1)
        dispatcher.close()
        running.cancel()

    run_virtual(main())
