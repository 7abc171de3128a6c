"""When failed episodes end the run."""

import pytest

from spmd_rl.orchestrator.failure_rate import FailureRate
from spmd_rl.types import Rollout


def ended(error: str = "") -> Rollout:
    return Rollout(env="e", task_id="t", finish_reason="error" if error else "stop", error=error)


def test_a_few_failures_are_borne_for_ever():
    rate = FailureRate(window=8, most=0.25)
    for _ in range(100):
        for error in ("", "OSError: full", "", "", "ValueError: bad", "", "", ""):
            rate.add(ended(error))


def test_more_than_the_share_of_a_window_end_the_run_with_the_commonest_error():
    rate = FailureRate(window=8, most=0.5)
    for error in ("", "OSError: full", "ValueError: bad", "", "OSError: full", "OSError: full"):
        rate.add(ended(error))
    with pytest.raises(RuntimeError, match=r"5 of the last 7 episodes .* = 0.5 of 8; 4 times: OSError: full"):
        rate.add(ended("OSError: full"))


def test_cancelled_episodes_are_no_failures():
    rate = FailureRate(window=4, most=0.0)
    for _ in range(10):
        rate.add(ended("cancelled"))
    with pytest.raises(RuntimeError, match="1 of the last 1"):
        rate.add(ended("boom"))


def test_with_a_share_of_one_nothing_ends_the_run():
    rate = FailureRate(window=4, most=1.0)
    for _ in range(10):
        rate.add(ended("boom"))
