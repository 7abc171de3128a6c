"""When failed episodes end the run."""

import random

import pytest

from spmd_rl.orchestrator.failure_rate import FailureRate
from spmd_rl.types import Finish, Rollout


def ended(ticket: int, error: str = "", finish: Finish = Finish.ERROR) -> Rollout:
    return Rollout(env="e", task_id="t", ticket=ticket, finish_reason=finish if error else Finish.STOP, error=error)


def test_a_few_failures_are_borne_for_ever():
    rate = FailureRate(window=8, most=0.25)
    for ticket in range(800):
        rate.add(ended(ticket, {1: "OSError: full", 4: "ValueError: bad"}.get(ticket % 8, "")))


def test_more_than_the_share_of_a_window_end_the_run_with_the_commonest_error():
    rate = FailureRate(window=8, most=0.5)
    errors = ("", "OSError: full", "ValueError: bad", "", "OSError: full", "OSError: full", "OSError: full")
    for ticket, error in enumerate(errors[:-1]):
        rate.add(ended(ticket, error))
    with pytest.raises(RuntimeError, match=r"5 of 8 episodes drawn in a row .* = 0.5; 4 times: OSError: full"):
        rate.add(ended(6, errors[-1]))


def test_failures_that_end_first_and_are_replaced_at_once_are_no_larger_share_of_what_was_drawn():
    """3 of 10 fail at once, the others end 60 draws later: nearly all of the first 18 to end have failed."""
    rate = FailureRate(window=16, most=0.5)
    fails = [ticket % 10 in (1, 4, 8) for ticket in range(400)]
    order = sorted(range(400), key=lambda ticket: ticket + (0 if fails[ticket] else 60))
    for ticket in order:
        rate.add(ended(ticket, "ValueError: bad" if fails[ticket] else ""))


@pytest.mark.parametrize("seed", range(20))
def test_whether_the_run_ends_does_not_depend_on_the_order_in_which_episodes_end(seed):
    rng = random.Random(seed)
    window, most = rng.choice([4, 8, 12]), rng.choice([0.25, 0.5, 0.75])
    fails = [rng.random() < most for _ in range(40)]
    too_many = any(sum(fails[first : first + window]) > most * window for first in range(40))
    order = rng.sample(range(40), 40)
    rate, ends = FailureRate(window=window, most=most), False
    for ticket in order:
        try:
            rate.add(ended(ticket, "boom" if fails[ticket] else ""))
        except RuntimeError:
            ends = True
    assert ends == too_many


def test_cancelled_and_skipped_episodes_are_no_failures():
    rate = FailureRate(window=4, most=0.0)
    for ticket in range(10):
        rate.add(ended(ticket, "cancelled", Finish.CANCELLED))
        if ticket % 4:
            rate.add(ended(ticket, "PromptTooLong: 9 tokens", Finish.SKIPPED))
    with pytest.raises(RuntimeError, match="1 of 4 episodes"):
        rate.add(ended(10, "boom"))


def test_a_window_of_which_all_was_skipped_ends_the_run():
    rate = FailureRate(window=4, most=1.0)
    for ticket in (0, 1, 3, 4, 5):
        rate.add(ended(ticket, "PromptTooLong: 9 tokens", Finish.SKIPPED))
    with pytest.raises(RuntimeError, match=r"all of 4 prompts .* inference\.max_seq_len.*PromptTooLong: 9 tokens"):
        rate.add(ended(2, "PromptTooLong: 9 tokens", Finish.SKIPPED))


def test_with_a_share_of_one_nothing_ends_the_run():
    rate = FailureRate(window=4, most=1.0)
    for ticket in range(10):
        rate.add(ended(ticket, "boom"))
