import json

import numpy as np

from spmd_rl.metrics.ages import AgeStats, Histogram
from spmd_rl.types import Batch, Rollout
from tests import fakes


def usable(rollout: Rollout) -> bool:
    return not rollout.failed


def batch(index: int, *versions: list[int], failed: tuple[int, ...] = ()) -> Batch:
    rollouts = []
    for i, of in enumerate(versions):
        member = fakes.rollout(fakes.work(i, version=0), versions=of, failed=i in failed)
        member.finished_version = max(of)
        rollouts.append(member)
    return Batch(index=index, rollouts=rollouts, advantages=np.zeros(len(rollouts), np.float32))


def test_ages_are_of_heads_and_of_tokens():
    stats = AgeStats()
    stats.add(batch(6, [3, 3, 5, 5, 5], [6], [4, 4]), usable)
    summary = stats.summary()
    assert (summary["rollout_max"], summary["rollout_mean"]) == (3, (3 + 0 + 2) / 3)
    assert (summary["token_max"], summary["token_mean"]) == (3, (3 * 2 + 1 * 3 + 0 + 2 * 2) / 8)
    assert summary["in_flight_mean"] == 2 / 3 and summary["in_queue_mean"] == (1 + 0 + 2) / 3


def test_what_the_live_policy_did_not_sample_is_counted_apart():
    stats = AgeStats()
    stats.add(batch(5, [-1, -1], [-1, 4], [5]), usable)
    summary = stats.summary()
    assert (summary["unversioned_rollouts"], summary["unversioned_tokens"]) == (1, 3)
    assert summary["rollout_mean"] == 0.5 and summary["rollout_max"] == 1


def test_failed_members_enter_no_figure():
    stats = AgeStats()
    stats.add(batch(5, [0], [5], failed=(0,)), usable)
    assert stats.summary()["rollout_max"] == 0


def test_rollouts_that_train_nothing_enter_no_figure():
    """Of 351 tokens under the loss mask 75 are trained: the rest was cut off, and such rollouts are masked."""
    stats, of = AgeStats(), batch(5, [0] * 200, [3] * 75, [1] * 76)
    stats.add(of, lambda rollout: rollout.num_trainable == 75)
    assert (stats.rollouts.counts.sum(), stats.tokens.counts.sum(), stats.tokens.mean) == (1, 75, 2.0)


def test_statistics_of_parts_add_up():
    whole, a, b = AgeStats(), AgeStats(), AgeStats()
    one, two = batch(4, [1, 2], [4]), batch(30, [3], [29])
    whole.add(one, usable)
    whole.add(two, usable)
    a.add(one, usable)
    b.add(two, usable)
    a.merge(b)
    assert a.summary() == whole.summary()
    assert a.summary()["rollout_max"] == 27


def test_what_is_recorded_of_batches_gives_the_same_statistics_again():
    whole, again = AgeStats(), AgeStats()
    for one in (batch(4, [1, 2], [-1], [4]), batch(30, [3], [29, -1]), batch(5, [0], failed=(0,))):
        whole.add(one, usable)
        own = AgeStats()
        own.add(one, usable)
        again.merge(AgeStats.from_record(json.loads(json.dumps(own.record()))))
    assert again.summary() == whole.summary()
    assert (again.summary()["rollout_max"], again.summary()["unversioned_tokens"]) == (27, 2)


def test_percentiles_are_exact():
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = rng.integers(0, 12, rng.integers(1, 300))
        histogram = Histogram()
        histogram.add(values)
        for q in (50, 99):
            assert histogram.percentile(q) == np.percentile(values, q, method="inverted_cdf")
        assert histogram.max == values.max() and histogram.mean == np.mean(values)


def test_an_empty_histogram_has_no_age():
    assert (Histogram().mean, Histogram().max, Histogram().percentile(99)) == (0.0, 0, 0)
