"""The staleness bound, executed: known results of a model of the gate, reproduced by the real components.

Per step, in this order: admit while there is capacity; every remaining time falls by 1; all that reach 0 complete
together; batches form while 8 are finished, the version rising after each.  G = 1, completion order.
"""

from collections.abc import Iterator
from itertools import repeat

import numpy as np
import pytest

from spmd_rl.commands.simulate.simulation import Settings, SimResult, simulate


def executed(max_staleness: int, *, latencies: Iterator[float], max_concurrent: int = 64, steps: int = 60) -> SimResult:
    settings = Settings(
        max_staleness=max_staleness, batch_size=8, max_concurrent=max_concurrent, order="completion", window=1
    )
    return simulate(settings, latencies=latencies, trainer_seconds=0.0, until_s=float(steps))


def drawn() -> Iterator[float]:
    """{1 … 5}, one draw per admission, in admission order."""
    rng = np.random.default_rng(0)
    while True:
        yield float(int(rng.integers(1, 6)))


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
def test_equal_completion_times_reach_the_bound_exactly(max_staleness):
    assert executed(max_staleness, latencies=repeat(3.0)).age_max == max_staleness


@pytest.mark.parametrize(("max_staleness", "age_max"), [(1, 2), (2, 4), (4, 7)])
def test_variable_completion_times_overshoot_while_the_mean_tracks_the_setting(max_staleness, age_max):
    result = executed(max_staleness, latencies=drawn())
    assert result.age_max == age_max
    assert abs(result.age_mean - max_staleness) < 1


@pytest.mark.parametrize("max_concurrent", [16, 32, 64, 128, 256])
def test_without_the_staleness_term_concurrency_sets_the_age(max_concurrent):
    unlimited = executed(10**9, latencies=repeat(3.0), max_concurrent=max_concurrent, steps=80)
    limited = executed(2, latencies=repeat(3.0), max_concurrent=max_concurrent, steps=80)
    assert unlimited.age_max == max_concurrent // 8 - 1
    assert limited.age_max == min(2, max_concurrent // 8 - 1)
