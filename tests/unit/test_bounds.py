import pytest

from spmd_rl.config.age_bound import age_bound

BASE = {"gate": "admission", "order": "admission", "max_staleness": 2, "batch_size": 8}


@pytest.mark.parametrize(
    ("settings", "age", "line"),
    [
        ({}, 2, "age ≤ 2 = S"),
        ({"window": 8}, 3, "age ≤ 3 = S + ceil((w-G)/B)"),
        ({"window": 8, "group_size": 8}, 2, "age ≤ 2 = S"),
        ({"window": 17}, 4, "age ≤ 4 = S + ceil((w-G)/B)"),
        ({"order": "completion"}, None, "no bound: completion order; expect p99 above S = 2"),
        ({"order": "oldest", "max_age": 3}, 3, "age ≤ 3 = max_age, kept by waiting (oldest order)"),
        ({"window": 64, "max_age": 3, "over_age": "drop"}, 3, "age ≤ 3 = max_age, kept by dropping (admission order)"),
        ({"window": 8, "max_age": 3}, 3, "age ≤ 3 = S + ceil((w-G)/B)"),
        ({"order": "completion", "max_staleness": 0}, 0, "age ≤ 0 = S: at S = 0 no order can age anything"),
        ({"window": 64, "max_staleness": 0}, 0, "age ≤ 0 = S: at S = 0 no order can age anything"),
        (
            {"gate": "ship", "queue_size": 8, "max_concurrent": 64},
            12,
            "age ≤ 12 = floor(((S+2)·B + Q + C - 1 + max(0, w-G)) / B)",
        ),
    ],
)
def test_the_bound_in_force_and_its_line(settings, age, line):
    bound = age_bound(**BASE | settings)
    assert (bound.age, bound.line) == (age, line)


def test_a_cap_that_the_order_keeps_anyway_is_not_enforced():
    assert age_bound(**BASE, max_age=2).cap is None
    assert age_bound(**BASE, max_age=2, window=8).cap == 2


def test_a_cap_below_the_staleness_is_refused():
    with pytest.raises(ValueError, match="max_age = 1 is below max_staleness = 2"):
        age_bound(**BASE, max_age=1)


def test_a_cap_that_waiting_cannot_keep_is_refused():
    ship = BASE | {"gate": "ship", "order": "completion", "queue_size": 8, "max_concurrent": 64}
    with pytest.raises(ValueError, match="max_age must be at least 12"):
        age_bound(**ship, max_age=11)
    assert age_bound(**ship, max_age=11, over_age="drop").age == 11
    assert age_bound(**ship, max_age=12).age == 12
