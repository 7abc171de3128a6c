import numpy as np
import pytest

from spmd_rl.config.age_bound import age_bound
from spmd_rl.objective.advantages import grpo, raw, standardized
from spmd_rl.orchestrator.order import make_order
from spmd_rl.orchestrator.train_sink import KEPT, TrainSink
from spmd_rl.types import GuardError
from tests import fakes


def make(*, group_size=2, batch_size=4, order="completion", window=1, max_staleness=2, max_age=None, **settings):
    bound = age_bound(
        gate="admission",
        order=order,
        max_staleness=max_staleness,
        batch_size=batch_size,
        group_size=group_size,
        window=window,
        max_age=max_age,
        over_age=settings.get("over_age", "wait"),
    )
    defaults = {"advantages": grpo, "order": make_order(order, window), "bound": bound}
    return TrainSink(batch_size=batch_size, group_size=group_size, **defaults | settings)


def put(sink: TrainSink, group_id: int, rewards=(0.0, 1.0), *, version=0, failed=()) -> str:
    work = fakes.work(group_id, size=len(rewards), version=version)
    sink.admitted(work)
    return sink.add(fakes.group(work, list(rewards), failed=failed))


def test_a_batch_is_exactly_b_rollouts_sorted_by_ticket_with_their_advantages():
    sink = make()
    put(sink, 2, (1.0, 0.0))
    assert sink.next_batch(0) is None
    put(sink, 0)
    put(sink, 1)
    batch = sink.next_batch(0)
    assert [r.ticket for r in batch.rollouts] == [0, 1, 4, 5]
    np.testing.assert_allclose(batch.advantages, [-0.7071, 0.7071, 0.7071, -0.7071], atol=1e-4)
    assert sink.num_waiting == 2 and sink.next_batch(1) is None


def test_a_group_without_spread_is_given_up_and_can_be_kept_by_switching_the_filter_off():
    assert put(make(), 0, (1.0, 1.0)) == "zero_spread"
    assert put(make(), 0, (0.3, 0.1 + 0.2)) == "zero_spread"
    assert put(make(filters={}), 0, (1.0, 1.0)) == KEPT


def test_a_failed_member_trains_nothing_but_its_slot_is_consumed():
    sink = make(group_size=4)
    assert put(sink, 0, (0.0, 1.0, 9.0, 0.0), failed=(2,)) == KEPT
    batch = sink.next_batch(0)
    assert len(batch.rollouts) == 4 and batch.advantages[2] == 0.0
    assert batch.advantages.sum() == pytest.approx(0.0, abs=1e-6)


def test_advantages_over_the_batch_see_every_group_and_no_unusable_member():
    sink = make(advantages=raw, batch_advantages=standardized, filters={}, max_empty_batches=1)
    assert put(sink, 0, (0.0, 0.0)) == KEPT  # all 0 until the batch stage
    put(sink, 1, (3.0, 3.0))
    np.testing.assert_allclose(sink.next_batch(0).advantages, [-1, -1, 1, 1], atol=1e-6)
    put(sink, 2, (0.0, 0.0))
    put(sink, 3, (6.0, 3.0))
    np.testing.assert_allclose(sink.next_batch(1).advantages, [-0.9045, -0.9045, 1.5076, 0.3015], atol=1e-4)
    assert [put(sink, group_id, (0.0, 0.0)) for group_id in (4, 5)] == [KEPT, KEPT]  # nor barren


def test_what_the_run_does_not_train_is_no_part_of_the_baseline():
    sink = make(group_size=4, trains=lambda r: r.sample != 3)
    assert put(sink, 0, (0.0, 1.0, 0.5, 100.0)) == KEPT
    batch = sink.next_batch(0)
    np.testing.assert_allclose(batch.advantages, [-1, 1, 0, 0], atol=1e-6)
    assert [sink.usable(r) for r in batch.rollouts] == [True, True, True, False]


def test_advantages_come_from_the_shaped_reward_and_filters_from_the_plain_one():
    sink = make(group_size=4, shaped_reward=lambda r: r.reward - r.sample)
    assert put(sink, 0, (1.0, 1.0, 1.0, 1.0)) == "zero_spread"
    assert put(sink, 1, (0.0, 1.0, 2.0, 4.0)) == KEPT
    assert np.argmax(sink.next_batch(0).advantages) == 3


@pytest.mark.parametrize(
    ("failed", "masked", "verdict"),
    [
        ((0, 1, 2), (), "failed"),
        ((0, 1, 2, 3), (), "failed"),
        ((0,), (1, 2, 3), "untrainable"),
        ((0,), (1,), KEPT),
    ],
)
def test_a_group_with_fewer_than_two_usable_members_is_given_up(failed, masked, verdict):
    sink = make(group_size=4, trains=lambda rollout: rollout.sample not in masked)
    assert put(sink, 0, (0.0, 1.0, 1.0, 2.0), failed=failed) == verdict


def test_a_single_rollout_is_a_group_of_its_own():
    sink = make(group_size=1, batch_size=2, advantages=lambda rewards, usable: rewards.astype(np.float32))
    assert put(sink, 0, (1.0,)) == KEPT
    assert put(sink, 1, (1.0,), failed=(0,)) == "failed"


def test_batches_come_in_the_order_of_their_index():
    sink = make(group_size=4)
    put(sink, 0, (0.0, 1.0, 2.0, 3.0))
    sink.next_batch(0)
    with pytest.raises(RuntimeError, match="batch 2 asked for, batch 1 comes next"):
        sink.next_batch(2)


def test_an_age_above_the_bound_is_refused_with_all_the_numbers():
    sink = make(group_size=4, order="admission")
    put(sink, 0, (0.0, 1.0, 2.0, 3.0), version=1)
    with pytest.raises(RuntimeError, match=r"batch 4 would train rollout 0 at age 3, bound: age ≤ 2 = S; head 1, "):
        sink.next_batch(4)


def test_a_rollout_of_a_later_version_than_its_batch_is_refused():
    sink = make(group_size=4)
    put(sink, 0, (0.0, 1.0, 2.0, 3.0), version=5)
    with pytest.raises(RuntimeError, match="at age -1"):
        sink.next_batch(4)


def test_an_engine_that_starts_a_group_too_early_is_found_out():
    sink = make(group_size=1, batch_size=1)
    sink.admitted(fakes.work(0, version=3))
    group = fakes.group(fakes.work(0, version=2))
    group.admission_version = 3
    with pytest.raises(RuntimeError, match="admitted at version 3 and sampled by version 2"):
        sink.add(group)


def test_rollouts_without_a_version_are_consumed_at_any_age():
    sink = make(group_size=1, batch_size=1, order="admission", filters={})
    work = fakes.work(0, version=0)
    sink.admitted(work)
    group = fakes.group(work)
    group.rollouts[0] = fakes.rollout(work, versions=[-1, -1])
    sink.add(group)
    assert len(sink.next_batch(0).rollouts) == 1


def one(sink: TrainSink, group_id: int, version: int) -> None:
    assert put(sink, group_id, (1.0,), version=version) == KEPT


def capped(order="completion", **settings) -> TrainSink:
    ones = {"advantages": lambda rewards, usable: np.ones(len(rewards), np.float32), "filters": {}}
    return make(group_size=1, batch_size=2, max_age=2, order=order, **ones, **settings)


def test_waiting_holds_a_batch_back_until_the_slots_that_are_due_have_finished():
    sink = capped()
    slow = [fakes.work(group_id, version=0) for group_id in (0, 1)]
    for work in slow:
        sink.admitted(work)
    for group_id in range(2, 6):
        one(sink, group_id, 0)  # 6 slots due by batch 2 = all of batches 0, 1 and 2
    assert [r.ticket for r in sink.next_batch(0).rollouts] == [2, 3]
    assert [r.ticket for r in sink.next_batch(1).rollouts] == [4, 5]
    for group_id in (6, 7):
        one(sink, group_id, 1)
    assert sink.next_batch(2) is None
    for work in slow:
        sink.add(fakes.group(work, [1.0]))
    assert [r.ticket for r in sink.next_batch(2).rollouts] == [0, 1]


def test_slots_that_are_due_go_before_what_the_order_prefers():
    sink = capped()
    for group_id in (2, 3, 4, 5):
        one(sink, group_id, 2)
    early = [fakes.work(group_id, version=0) for group_id in (0, 1)]
    sink = capped()
    for work in early:
        sink.admitted(work)
    for group_id in (2, 3):
        one(sink, group_id, 2)
    for work in early:
        sink.add(fakes.group(work, [1.0]))
    assert [r.ticket for r in sink.next_batch(2).rollouts] == [0, 1]


def test_dropping_gives_up_what_is_finished_and_what_still_runs_too_late():
    sink = capped(over_age="drop")
    running = fakes.work(0, version=0)
    sink.admitted(running)
    one(sink, 1, 0)
    one(sink, 2, 1)
    expired = sink.expire(3)
    assert [g.group_id for g in expired.finished] == [1]
    assert expired.running == [running]
    assert sink.expire(3).running == []
    assert sink.add(fakes.group(running, [1.0])) == "over_age"
    assert sink.num_waiting == 1


def test_empty_batches_in_a_row_stop_the_run_and_say_why():
    sink = make(max_empty_batches=2)
    for group_id in range(3):
        put(sink, group_id, (0.5, 0.5))
    assert sink.still_teaches()
    put(sink, 3, (0.5, 0.5), failed=(0, 1))
    with pytest.raises(GuardError, match=r"2 empty batches in a row, 8 rollouts in groups 3 zero_spread, 1 failed; "):
        sink.still_teaches()


def test_one_trainable_group_ends_the_row():
    sink = make(max_empty_batches=2)
    for group_id in range(20):
        put(sink, group_id, (0.5, 0.5) if group_id % 4 else (0.0, 1.0))
        assert sink.still_teaches()


def test_groups_kept_without_any_advantage_count_as_empty_too():
    sink = make(max_empty_batches=1, filters={})
    put(sink, 0, (0.5, 0.5))
    put(sink, 1, (0.5, 0.5))
    with pytest.raises(GuardError, match="2 zero_advantage"):
        sink.still_teaches()


@pytest.mark.parametrize(
    ("unsolved", "failed", "solved"),
    [(0, (), True), (1, (), True), (2, (), False), (10, (), False), (0, (0, 1), False)],
)
@pytest.mark.parametrize("filters", [None, {}])
def test_what_is_solved_is_told_from_what_is_hopeless(filters, unsolved, failed, solved):
    """Of ten groups, `unsolved` have the least reward in all members, or all have failed; 0.8 counts as solved."""
    sink = make(max_empty_batches=5, filters=filters, solved_at=0.8)
    for group_id in range(10):
        put(sink, group_id, (0.0, 0.0) if group_id < unsolved else (0.8, 0.8), failed=failed)
    if solved:
        assert not sink.still_teaches()
    else:
        with pytest.raises(GuardError, match="5 empty batches in a row"):
            sink.still_teaches()


@pytest.mark.parametrize("order", ["completion", "oldest", "admission"])
def test_a_restored_sink_goes_on_as_the_old_one_would_have(order):
    def fill() -> tuple[TrainSink, list]:
        sink = make(order=order, window=4, max_age=3)
        slow = fakes.work(1, size=2)
        for group_id in (0, 2, 3, 4, 5):
            if group_id == 2:
                sink.admitted(slow)
            put(sink, group_id)
        return sink, [slow]

    straight, unfinished = fill()
    first = straight.next_batch(0)
    groups, _ = straight.snapshot()
    resumed = make(order=order, window=4, max_age=3)
    resumed.restore(index=0, next_ticket=12, groups=groups, batches=[first], unfinished=unfinished)
    assert resumed.num_waiting == 10
    again = resumed.next_batch(0)
    assert [r.ticket for r in again.rollouts] == [r.ticket for r in first.rollouts]
    for sink in (straight, resumed):
        sink.add(fakes.group(unfinished[0]))
    for index in (1, 2):
        tickets = [[r.ticket for r in sink.next_batch(index).rollouts] for sink in (straight, resumed)]
        assert tickets[0] == tickets[1]
