import random

import pytest

from spmd_rl.orchestrator.order import make_order
from tests import fakes


def finished(group_id: int, size: int = 1, version: int = 0):
    return fakes.group(fakes.work(group_id, size=size, version=version))


def test_completion_order_takes_what_finished_first():
    order = make_order("completion")
    for group_id in (3, 1, 2):
        order.finished(finished(group_id), 0)
    assert [g.group_id for g in order.take(2)] == [3, 1]
    assert order.num_ready == 1


def test_oldest_order_takes_the_oldest_version_first():
    order = make_order("oldest")
    for group_id, oldest in ((1, 5), (2, 3), (3, 4), (4, 3)):
        order.finished(finished(group_id), oldest)
    order.gone(3)
    assert [g.group_id for g in order.take(3)] == [2, 4, 1]


def test_admission_order_with_window_one_is_strict():
    order = make_order("admission", 1)
    for ticket in range(3):
        order.admitted(ticket)
    order.finished(finished(1), 0)
    order.finished(finished(2), 0)
    assert order.num_ready == 0
    order.finished(finished(0), 0)
    assert [g.group_id for g in order.take(3)] == [0, 1, 2]


def test_groups_done_with_still_occupy_the_window():
    order = make_order("admission", 3)
    for ticket in range(5):
        order.admitted(ticket)
    order.gone(1)
    order.finished(finished(2), 0)
    order.finished(finished(3), 0)
    assert [g.group_id for g in order.ready()] == [2]
    order.take(1)
    assert order.num_ready == 0
    order.gone(0)
    assert [g.group_id for g in order.ready()] == [3]


def test_a_group_larger_than_the_window_is_taken_when_it_is_the_lowest():
    order = make_order("admission", 1)
    for group_id in range(2):
        order.admitted(group_id * 4)
    order.finished(finished(0, size=4), 0)
    assert order.num_ready == 1
    order.finished(finished(1, size=4), 0)
    assert [g.group_id for g in order.take(2)] == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_ready_groups_are_those_of_deciding_anew_each_time(seed):
    """The incremental window against the rule as it is written."""
    rng = random.Random(seed)
    size, window, num = rng.choice([1, 2, 4]), rng.randint(1, 12), 40
    order, running, done, waiting = make_order("admission", window), [], set(), set()
    next_group = 0
    for _ in range(600):
        if next_group < num and rng.random() < 0.5:
            order.admitted(next_group * size)
            running.append(next_group)
            next_group += 1
        elif running:
            group_id = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.2:
                order.gone(group_id * size)
                done.add(group_id)
            else:
                order.finished(finished(group_id, size), 0)
                waiting.add(group_id)
        want = rng.randint(1, 3)
        expected = by_the_rule(waiting, done, next_group, size, window)
        assert [g.group_id for g in order.ready()] == expected
        if len(expected) >= want:
            taken = [g.group_id for g in order.take(want)]
            assert taken == expected[:want]
            waiting -= set(taken)
            done |= set(taken)


def by_the_rule(waiting: set[int], done: set[int], next_group: int, size: int, window: int) -> list[int]:
    done, taken = set(done), []
    while True:
        lowest = next((g for g in range(next_group) if g not in done), None)
        if lowest is None:
            return taken
        may = [g for g in sorted(waiting - done) if g == lowest or (g + 1) * size <= lowest * size + window]
        if not may:
            return taken
        taken.append(may[0])
        done.add(may[0])
