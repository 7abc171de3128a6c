import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.objective.objective import AGGREGATIONS, token_mean
from spmd_rl.trainer import microbatch
from spmd_rl.trainer.microbatch import Share, pack_bins


def share(*rollouts: tuple[list[int], list[int], float]) -> Share:
    """Rollouts as (token ids, loss mask, advantage); ticket 10 · index; behavior -token / 10; version = token."""
    ids = [np.array(r[0], np.int32) for r in rollouts]
    tokens = np.concatenate([*ids, np.empty(0, np.int32)])
    return SimpleNamespace(
        cu_seqlens=np.cumsum([0, *(len(i) for i in ids)], dtype=np.int64),
        token_ids=tokens,
        loss_mask=np.concatenate([*(np.array(r[1], bool) for r in rollouts), np.empty(0, bool)]),
        behavior_logprobs=(-tokens / 10).astype(np.float32),
        versions=tokens.copy(),
        ticket=10 * np.arange(len(rollouts), dtype=np.int64),
        group_id=np.zeros(len(rollouts), np.int64),
        advantage=np.array([r[2] for r in rollouts], np.float32),
        usable=np.ones(len(rollouts), bool),
        minibatch=np.zeros(len(rollouts), np.int32),
    )


def cut(batch: Share, *, num_minibatches: int, micro_batch_tokens: int, **settings: object):
    defaults = {"aggregation": partial(token_mean, longest=9), "skip_zero": True}
    return microbatch.cut(
        batch, num_minibatches=num_minibatches, micro_batch_tokens=micro_batch_tokens, **defaults | settings
    )


def only(batch: Share, **settings: object):
    (minibatch,) = cut(batch, num_minibatches=1, micro_batch_tokens=100, **settings)
    (micro,) = minibatch.micro_batches
    return micro


def test_log_prob_of_a_token_comes_from_the_row_before_it_in_its_own_sequence() -> None:
    micro = only(share(([1, 2, 3, 4], [0, 0, 1, 1], 1.0), ([5, 6, 7], [0, 1, 1], -1.0)))
    assert micro.token_ids.tolist() == [1, 2, 3, 5, 6]  # the last loss token of each is a target, never an input
    assert micro.cu_seqlens == [0, 3, 5]
    assert micro.targets.tolist() == [3, 4, 6, 7]
    assert micro.token_ids[micro.rows].tolist() == [2, 3, 5, 6]
    assert micro.advantages.tolist() == [1, 1, -1, -1]
    assert micro.behavior == pytest.approx([-0.3, -0.4, -0.6, -0.7])
    assert micro.versions.tolist() == [3, 4, 6, 7]
    assert micro.sequence.tolist() == [0, 0, 1, 1]
    assert micro.tickets == (0, 10)


def test_tokens_after_the_last_loss_token_are_not_computed() -> None:
    micro = only(share(([1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 0, 0], 1.0)))
    assert micro.token_ids.tolist() == [1, 2, 3]
    assert micro.targets.tolist() == [2, 4]


def test_nan_off_the_mask_is_not_selected() -> None:
    batch = share(([1, 2, 3], [0, 1, 0], 1.0))
    batch.behavior_logprobs[[0, 2]] = math.nan
    assert np.isfinite(only(batch).behavior).all()


def test_sequences_without_an_advantage_are_skipped_but_counted() -> None:
    batch = share(([1, 2, 3], [0, 1, 1], 0.0), ([4, 5], [0, 1], 1.0), ([6, 7], [0, 0], 1.0))
    (minibatch,) = cut(batch, num_minibatches=1, micro_batch_tokens=100)
    assert (minibatch.num_loss_tokens, minibatch.skipped_share) == (3, 2)
    assert [m.tickets for m in minibatch.micro_batches] == [(10,)]


def test_sequences_without_an_advantage_are_computed_where_something_else_trains_them() -> None:
    batch = share(([1, 2, 3], [0, 1, 1], 0.0), ([4, 5], [0, 1], 1.0))
    (minibatch,) = cut(batch, num_minibatches=1, micro_batch_tokens=100, skip_zero=False)
    assert minibatch.skipped_share == 0
    assert [m.tickets for m in minibatch.micro_batches] == [(0, 10)]


def test_rollouts_that_are_not_usable_are_not_there() -> None:
    """30 tokens of which a truncated rollout's 5 are masked divide by 25."""
    batch = share(*[(list(range(6)), [0] + 5 * [1], 1.0)] * 6)
    batch.usable[2] = False
    (minibatch,) = cut(batch, num_minibatches=1, micro_batch_tokens=100)
    assert minibatch.num_loss_tokens == 25
    assert minibatch.micro_batches[0].share.sum() == 25
    assert 20 not in minibatch.micro_batches[0].tickets


@pytest.mark.parametrize(
    ("name", "scale", "shares"),
    [("token_mean", [1, 1, 1], 3), ("sequence_mean", [0.5, 0.5, 1], 2), ("constant", [0.1, 0.1, 0.1], 2)],
)
def test_scale_and_share_of_each_aggregation(name: str, scale: list[float], shares: float) -> None:
    batch = share(([1, 2, 3], [0, 1, 1], 1.0), ([4, 5], [0, 1], 1.0))
    aggregation = partial(AGGREGATIONS[name], longest=10)
    micro = only(batch, aggregation=aggregation)
    assert micro.scale == pytest.approx(scale)
    assert micro.share.sum() == shares


@pytest.mark.parametrize(
    ("name", "scale", "shares"), [("token_mean", 1, 5), ("sequence_mean", 1 / 3, 2), ("constant", 1 / 10, 2)]
)
def test_segments_of_a_rollout_are_one_rollout_for_the_aggregation(name: str, scale: float, shares: float) -> None:
    """Two segments of 2 and 1 loss tokens, and another rollout with 2."""
    batch = share(([1, 2, 3], [0, 1, 1], 1.0), ([4, 5], [0, 1], 1.0), ([6, 7, 8], [0, 1, 1], 1.0))
    batch.ticket[:] = [7, 7, 8]
    micro = only(batch, aggregation=partial(AGGREGATIONS[name], longest=10))
    assert micro.scale[:3].tolist() == [scale] * 3
    assert micro.share.sum() == pytest.approx(shares)


def test_a_nan_advantage_is_not_taken_for_zero() -> None:
    assert only(share(([1, 2], [0, 1], math.nan))).tickets == (0,)


def test_first_token_under_the_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="ticket 10: the first token"):
        cut(share(([1, 2], [0, 1], 1.0), ([1, 2], [1, 1], 1.0)), num_minibatches=1, micro_batch_tokens=9)


def test_an_empty_share_is_minibatches_of_nothing() -> None:
    minibatches = cut(share(), num_minibatches=3, micro_batch_tokens=9)
    assert [(m.micro_batches, m.num_loss_tokens) for m in minibatches] == [([], 0)] * 3


def test_minibatches_keep_the_order_and_lose_nothing() -> None:
    batch = share(*[([1, i + 2], [0, 1], 1.0) for i in range(5)])
    batch.minibatch[:] = [1, 0, 1, 1, 0]
    minibatches = cut(batch, num_minibatches=2, micro_batch_tokens=100)
    assert [m.micro_batches[0].targets.tolist() for m in minibatches] == [[3, 6], [2, 4, 5]]
    with pytest.raises(ValueError, match="minibatch 1 of 0 … 0: the batch was cut for another trainer"):
        cut(batch, num_minibatches=1, micro_batch_tokens=100)


def test_members_of_a_group_go_on_from_what_they_begin_with_alike() -> None:
    """1 2 3 is there once; the third member is of another group, the fourth of one token that is only a target."""
    batch = share(
        ([1, 2, 3, 4, 5], [0, 0, 0, 1, 1], 1.0),
        ([1, 2, 3, 6, 7, 8], [0, 0, 0, 1, 1, 1], 2.0),
        ([1, 2, 9], [0, 0, 1], 3.0),
        ([1, 2, 3, 8], [0, 0, 0, 1], 4.0),
    )
    batch.group_id[2] = 1
    micro = only(batch, share_prefix=True)
    assert micro.token_ids.tolist() == [1, 2, 3, 4, 6, 7, 1, 2]
    assert micro.cu_seqlens == [0, 3, 4, 6, 6, 8]
    assert micro.parents == [0, 0, 0, 0, 4]
    assert micro.targets.tolist() == [4, 5, 6, 7, 8, 8, 9]
    assert micro.rows.tolist() == [2, 3, 2, 4, 5, 2, 7]  # the first of every member comes from the last shared token
    assert micro.positions.tolist() == [3, 4, 3, 4, 5, 3, 2]
    assert micro.tickets == (0, 10, 30, 20)
    assert micro.sequence.tolist() == [0, 0, 1, 1, 1, 2, 3]
    assert micro.num_shared == 2 * 3
    assert only(batch).num_shared == microbatch.STAND_IN.num_shared == 0


def test_loss_tokens_that_a_group_has_in_common_are_rows_of_the_shared_start() -> None:
    micro = only(share(([1, 2, 3, 4], [0, 1, 1, 1], 1.0), ([1, 2, 3, 5], [0, 1, 1, 1], -1.0)), share_prefix=True)
    assert micro.token_ids.tolist() == [1, 2, 3]
    assert micro.rows.tolist() == [0, 1, 2] * 2
    assert micro.targets.tolist() == [2, 3, 4, 2, 3, 5]


def test_a_group_beyond_the_budget_repeats_its_start_in_each_micro_batch() -> None:
    batch = share(*[([1, 2, 3, 10 + i, 20, 30], [0, 0, 0, 1, 1, 1], 1.0) for i in range(5)])
    (minibatch,) = cut(batch, num_minibatches=1, micro_batch_tokens=7, share_prefix=True)
    assert [len(m.token_ids) for m in minibatch.micro_batches] == [7, 7, 5]  # 3 + 2 · 2 twice, then one alone
    assert [m.parents for m in minibatch.micro_batches] == [[0, 0, 0], [0, 0, 0], [0]]


def test_without_packing_every_sequence_has_a_micro_batch_of_its_own() -> None:
    batch = share(([1, 2, 3], [0, 1, 1], 1.0), ([1, 2], [0, 1], 1.0), ([1, 2, 3, 4], [0, 0, 0, 1], -1.0))
    (minibatch,) = cut(batch, num_minibatches=1, micro_batch_tokens=100, pack=False)
    assert sorted(m.tickets for m in minibatch.micro_batches) == [(0,), (10,), (20,)]
    assert [len(m.cu_seqlens) for m in minibatch.micro_batches] == [2, 2, 2]
    with pytest.raises(ValueError, match="needs a model that packs"):
        cut(batch, num_minibatches=1, micro_batch_tokens=100, pack=False, share_prefix=True)


def test_bins_of_the_example() -> None:
    assert pack_bins([5, 4, 3, 2, 1], 7) == [[0, 3], [1, 2], [4]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 30))
def test_bins_hold_everything_once_and_stay_in_the_budget(lengths: list[int], budget: int) -> None:
    bins = pack_bins(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= budget or len(b) == 1 for b in bins)
