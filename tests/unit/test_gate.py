import asyncio

import pytest

from spmd_rl.orchestrator.gate import AdaptiveAdmission, Gate
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.ship_hold import ShipHold, may_ship
from tests.clock import run_virtual


def make(version: int = 0, **settings) -> tuple[Gate, Policy]:
    policy = Policy(version)
    gate = Gate(policy, **{"max_staleness": 2, "batch_size": 8, "max_concurrent": 1000, **settings})
    return gate, policy


def test_capacity_is_the_formula():
    gate, policy = make(max_staleness=4, max_concurrent=12)
    assert gate.capacity() == 12
    gate, policy = make()
    assert gate.capacity() == 24
    gate.admit(20)
    gate.settle(accepted=8, rejected=4)
    assert gate.capacity() == 24 - (8 + 8)
    gate.consume()
    policy.advance(1)
    assert gate.capacity() == 32 - (8 + 8)


def test_a_version_is_idle_once_all_that_it_may_start_has_ended():
    gate, policy = make()

    async def scenario() -> list[str]:
        happened = []
        await asyncio.wait_for(started_and_ended(happened), 10)
        return happened

    async def started_and_ended(happened: list[str]) -> None:
        idle = asyncio.create_task(gate.idle(4))
        idle.add_done_callback(lambda _: happened.append("idle"))
        for what, call in [
            ("admits", lambda: gate.admit(24)),
            ("ends most", lambda: gate.settle(accepted=20)),
            ("gives up the rest", lambda: gate.settle(rejected=4)),
            ("starts them anew", lambda: gate.admit(4)),
            ("ends those", lambda: gate.settle(accepted=4)),
        ]:
            await asyncio.sleep(0)
            happened.append(what)
            call()
        await idle
        gate.consume()
        policy.advance(1)
        assert gate.capacity() == 8
        gate.close()
        await gate.idle(4)  # nothing will start

    happened = asyncio.run(scenario())
    assert happened == ["admits", "ends most", "gives up the rest", "starts them anew", "ends those", "idle"]


def test_in_flight_limit_of_a_synchronous_run_is_one_batch():
    gate, _ = make(max_staleness=0)
    assert gate.capacity() == 8


def test_a_restored_counter_opens_exactly_the_bound():
    gate, _ = make(40)
    gate.restore(accepted=320, running=0)
    assert gate.capacity() == 24
    gate.admit(24)


def test_a_counter_left_at_zero_opens_344_slots_and_is_refused():
    gate, _ = make(40)
    assert gate.capacity() == 344
    with pytest.raises(RuntimeError, match=r"would admit 343, bound is \(S \+ 1\) \* B = 24: was the gate restored\?"):
        gate.admit(1)


def test_a_restored_gate_counts_finished_and_unfinished_slots():
    gate, _ = make(40)
    gate.restore(accepted=320 + 8, running=4)
    assert gate.capacity() == 12


def test_more_restored_slots_than_the_settings_of_now_allow_admit_nothing_until_they_are_fewer():
    gate, policy = make(40, max_staleness=0, max_concurrent=4)
    gate.restore(accepted=320 + 16, running=8)  # 24 slots, S = 0 allows 8; 8 running, C allows 4
    assert gate.capacity() == -16
    gate.settle(accepted=4)
    for version in (41, 42):
        gate.consume()
        assert gate.capacity() < 0
        policy.advance(version)
    assert gate.capacity() == 0
    gate.settle(rejected=4)
    assert gate.capacity() == 4
    gate.admit(4)


def test_admitting_beyond_the_capacity_is_refused_with_the_numbers():
    gate, _ = make(max_concurrent=12)
    gate.admit(8)
    with pytest.raises(RuntimeError, match=r"8 rollouts admitted into a capacity of 4: .*running 8"):
        gate.admit(8)


def test_the_version_cannot_run_ahead_of_consumption():
    gate, policy = make()
    gate.admit(8)
    gate.settle(accepted=8)
    with pytest.raises(RuntimeError, match="at version 1 at least 8 slots are consumed, the gate counts 0"):
        policy.advance(1)


def test_a_batch_cannot_be_consumed_before_it_is_accepted():
    gate, _ = make()
    gate.admit(8)
    with pytest.raises(RuntimeError, match="do not add up"):
        gate.consume()


def woken_by(event, *, before=lambda gate, policy: None, **settings) -> bool | None:
    """Fill the gate, wait for room, let `event` happen: what the waiter got, None if it still waits."""

    async def main():
        gate, policy = make(**settings)
        while gate.capacity() >= 4:
            gate.admit(4)
        before(gate, policy)
        waiter = asyncio.create_task(gate.wait(4))
        await asyncio.sleep(0)
        assert not waiter.done()
        event(gate, policy)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        result = waiter.result() if waiter.done() else None
        waiter.cancel()
        return result

    return run_virtual(main())


def test_the_waiter_is_woken_by_rejected_slots():
    assert woken_by(lambda gate, policy: gate.settle(rejected=4)) is True


def test_accepted_slots_alone_do_not_open_the_gate():
    assert woken_by(lambda gate, policy: gate.settle(accepted=4)) is None


def test_the_waiter_is_woken_by_accepted_slots_where_concurrency_binds():
    assert woken_by(lambda gate, policy: gate.settle(accepted=4), max_concurrent=8) is True


def test_the_waiter_is_woken_by_slots_given_back():
    def accept(gate, policy):
        gate.settle(accepted=8)

    assert woken_by(lambda gate, policy: gate.give_back(4), before=accept) is True


def test_a_new_version_alone_wakes_the_waiter():
    def consume(gate, policy):
        gate.settle(accepted=8)
        gate.consume()

    assert woken_by(lambda gate, policy: policy.advance(1), before=consume) is True


def test_closing_wakes_the_waiter_with_a_no():
    assert woken_by(lambda gate, policy: gate.close()) is False


def test_consumption_opens_the_ship_gate():
    def accept(gate, policy):
        gate.settle(accepted=8)
        assert gate.capacity() == 0

    assert woken_by(lambda gate, policy: gate.consume(), before=accept, mode="ship", max_concurrent=8) is True


def test_the_ship_gate_counts_concurrency_and_queue_only():
    gate, _ = make(mode="ship", max_staleness=0, max_concurrent=16, queue_size=8)
    gate.admit(16)
    gate.settle(accepted=16)
    assert gate.capacity() == 8
    gate.admit(8)
    assert gate.capacity() == 0
    gate.consume()
    assert gate.capacity() == 8


def test_a_closed_gate_knows_for_how_long_c_alone_said_no_and_for_how_long_the_bound():
    """C = 8, bound 24: 8 run until 3 s, 8 until 5 s, 8 until 9 s; version 1 comes at 15 s, the end at 20 s."""

    async def main():
        loop = asyncio.get_running_loop()
        gate, policy = make(max_concurrent=8, clock=loop.time)
        for at in (3.0, 5.0, 9.0, 18.0):
            loop.call_at(at, lambda: gate.settle(accepted=8))
        loop.call_at(15.0, lambda: (gate.consume(), policy.advance(1)))
        for _ in range(3):
            assert await gate.wait(8)
            gate.admit(8)
        seen = {}
        for at in (8.0, 14.0, 17.0):
            loop.call_at(at, lambda at=at: seen.update({at: tuple(gate.closed_s().values())}))
        loop.call_at(20.0, gate.close)
        assert await gate.wait(8)  # at 15 s
        gate.admit(8)
        assert not await gate.wait(8)
        return seen, gate.closed_s()

    seen, closed_s = run_virtual(main())
    # concurrency: 0 to 3 and 3 to 5 s; then all 24 are under way, and 8 of them run until 9 s
    assert seen == {8.0: (5.0, 3.0), 14.0: (5.0, 9.0), 17.0: (5.0, 12.0)}
    assert closed_s == {"concurrency": 5.0, "bound": 15.0}


def test_a_ship_gate_that_could_never_fill_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"queue_size \+ max_concurrent = 7 is below batch_size = 8"):
        make(mode="ship", max_concurrent=4, queue_size=3)


def test_a_batch_is_shipped_at_most_s_versions_early():
    assert [k for k in range(10) if may_ship(k, version=3, max_staleness=2)] == [0, 1, 2, 3, 4, 5]


def test_a_held_batch_is_parked_until_the_version_comes_and_the_time_is_counted():
    async def main():
        policy, loop = Policy(), asyncio.get_running_loop()
        hold = ShipHold(policy, max_staleness=1, clock=loop.time)
        assert await hold.wait(1) == 0.0
        loop.call_later(5.0, policy.advance, 1)
        assert await hold.wait(2) == 5.0
        assert hold.parked_s == 5.0

    run_virtual(main())


def test_adaptive_admission_never_leaves_its_limits():
    adaptive = AdaptiveAdmission(max_staleness=8, batch_size=64, target_idle=0.02)
    for _ in range(1000):
        adaptive.observe(waited_s=0.0, busy_s=1.0, used=64)
    assert adaptive.limit == 64
    for _ in range(1000):
        adaptive.observe(waited_s=9.0, busy_s=1.0, used=64)
    assert adaptive.limit == 9 * 64


def test_adaptive_admission_lets_go_of_what_lies_ready_and_not_of_what_runs():
    idle_stock, long_runs = (AdaptiveAdmission(max_staleness=8, batch_size=64, target_idle=0.02) for _ in range(2))
    for _ in range(30):
        idle_stock.observe(waited_s=0.0, busy_s=1.0, used=100)
        long_runs.observe(waited_s=0.0, busy_s=1.0, used=550)
    assert idle_stock.limit == pytest.approx(164 - 19 * 0.64, abs=13)  # used + B, and from there step by step
    assert long_runs.limit == pytest.approx(9 * 64 - 19 * 0.64)


def test_a_restored_limit_is_kept_within_the_ceiling_of_now():
    adaptive = AdaptiveAdmission(max_staleness=1, batch_size=8, target_idle=0.02)
    for limit, kept in ((11.5, 11.5), (300.0, 16.0), (1.0, 8.0)):
        adaptive.restore(limit)
        assert adaptive.limit == kept


def test_adaptive_admission_narrows_the_capacity():
    gate, _ = make(adaptive=AdaptiveAdmission(max_staleness=2, batch_size=8, target_idle=0.02))
    assert gate.capacity() == 24
    gate.adaptive.limit = 13.7
    assert gate.capacity() == 13
