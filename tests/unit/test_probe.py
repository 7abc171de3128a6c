import math

import numpy as np
import pytest

from spmd_rl.bounds import age_bound
from spmd_rl.orchestrator.probe import compare_probe
from spmd_rl.orchestrator.report import Report
from tests import fakes

TRAINER = np.array([0.0, -1.0, -2.0, -3.0], np.float32)


def scores(*differences: float) -> np.ndarray:
    """Of an engine that finds these tokens that much less likely."""
    return TRAINER - np.array([0.0, *differences], np.float32)


def test_the_worst_engine_is_told_and_those_that_missed_it_are_counted():
    engines = {0: scores(0.0, 0.0, 0.0), 2: scores(0.5, 0.0, -1.0), 4: np.empty(0, np.float32)}
    assert compare_probe(TRAINER, engines, exact=False, version=7) == {
        "probe/missed": 1,
        "probe/kl": pytest.approx((math.exp(0.5) - 1.5 + math.exp(-1.0)) / 4),
        "probe/max_difference": 1.0,
        "probe/tokens": 3,
    }
    assert compare_probe(TRAINER, {4: engines[4]}, exact=True, version=7) == {"probe/missed": 1}


@pytest.mark.parametrize(
    ("difference", "said"), [(0.0011, "0.0011 where float32 allows 0.001"), (math.nan, "nan where")]
)
def test_in_float32_an_engine_with_other_weights_is_named(difference, said):
    engines = {0: scores(0.0, 0.0009, 0.0), 2: scores(0.0, difference, 0.0)}
    with pytest.raises(RuntimeError, match=f"wrong weights in the engine of rank 2: at version 7 .* by up to {said}"):
        compare_probe(TRAINER, engines, exact=True, version=7)
    assert compare_probe(TRAINER, {0: engines[0]}, exact=True, version=7)["probe/missed"] == 0


def test_elsewhere_a_large_mismatch_is_warned_of_and_told_again_only_when_it_grows():
    bound = age_bound(gate="admission", order="admission", max_staleness=1, batch_size=4, group_size=1)
    said: list[str] = []
    report = Report(steps=9, knobs=fakes.knobs(), slots=4, bound=bound, decode=lambda ids: "", say=said.append)
    for version, kl in enumerate((0.009, 0.011, 0.010, 0.012, math.nan)):
        report.probed(version, {"probe/kl": kl})
    report.probed(9, {"probe/missed": 1})
    assert [line.split(",")[0] for line in said] == [
        f"warning: at version {version} engines compute other log-probs than trainers" for version in (1, 3, 4)
    ]
    assert "by 0.011 nats per token" in said[0]
