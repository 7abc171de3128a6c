import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from spmd_rl.packing import packing
from spmd_rl.types import NO_VERSION, Rollout


def _rollout(ticket: int, prompt: int, sampled: int) -> Rollout:
    rollout = Rollout(env="e", task_id=f"t{ticket}", ticket=ticket, group_id=ticket // 2, reward=ticket / 3)
    rollout.append(np.arange(prompt))
    rollout.append(np.arange(sampled) + 5, -np.arange(sampled) / 7, np.full(sampled, 3))
    rollout.reward_parts = {"exact": 1.0}
    return rollout


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
def test_unpacking_gives_back_what_was_packed(lengths: list[tuple[int, int]]) -> None:
    rollouts = [_rollout(i, *pair) for i, pair in enumerate(lengths)]
    again = packing.unpack(packing.Packed(**packing.pack(rollouts).arrays(), words=packing.pack(rollouts).words))
    assert len(again) == len(rollouts)
    for before, after in zip(rollouts, again, strict=True):
        assert after.reward == before.reward
        assert after.reward_parts == before.reward_parts
        for name, dtype in packing.PER_TOKEN.items():
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
            assert getattr(after, name).dtype == dtype


def test_a_file_reads_back_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    packed = packing.pack([_rollout(0, 2, 3), _rollout(1, 1, 0)], np.array([0.5, -0.5]))
    packing.save(packed, tmp_path / "a.safetensors")
    again = packing.load(tmp_path / "a.safetensors")
    assert again.words == packed.words
    with safe_open(tmp_path / "a.safetensors", "numpy") as file:
        assert [row["task_id"] for row in json.loads(file.metadata()["words"])] == ["t0", "t1"]
    np.testing.assert_array_equal(again.advantage, np.float32([0.5, -0.5]))
    save_file({"x": np.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="not a file of packed rollouts"):
        packing.load(tmp_path / "b.safetensors")


def test_arrays_that_do_not_fit_together_are_refused() -> None:
    packed = packing.pack([_rollout(0, 2, 3)])
    with pytest.raises(ValueError, match="do not fit together"):
        dataclasses.replace(packed, token_ids=packed.token_ids[1:])
    with pytest.raises(ValueError, match="do not fit together"):
        dataclasses.replace(packed, cu_seqlens=packed.cu_seqlens - 1)
    with pytest.raises(ValueError, match="do not fit together"):
        dataclasses.replace(packed, words={name: packed.words[name] for name in packing.WORDS if name != "env"})
    with pytest.raises(ValueError, match="do not fit together"):
        dataclasses.replace(packed, words=packed.words | {"env": []})


def test_memory_is_packed_into_again_once_nobody_holds_it() -> None:
    rollouts = [_rollout(0, 50_000, 50_000)]
    owner = id(packing.pack(rollouts).token_ids.base)
    assert id(packing.pack(rollouts).token_ids.base) == owner


def test_rollouts_packed_one_after_another_do_not_share_memory_while_any_is_held() -> None:
    held = [packing.unpack(packing.pack([_rollout(ticket, 50, 50)]))[0] for ticket in range(20)]
    for ticket, rollout in enumerate(held):
        assert (rollout.ticket, rollout.task_id) == (ticket, f"t{ticket}")
        rollout.token_ids[:] = ticket
    assert [rollout.token_ids.tolist() for rollout in held] == [[ticket] * 100 for ticket in range(20)]


def test_costs_are_split_evenly() -> None:
    assert packing.split_evenly([5, 4, 3, 2], 2) == [[0, 3], [1, 2]]
    assert packing.split_evenly([1], 3) == [[0], [], []]


@pytest.mark.parametrize(
    ("tokens", "expected"), [([[1, 2, 3], [1, 2], [1, 2, 5]], 2), ([[1], [2]], 0), ([[4, 5]] * 3, 2)]
)
def test_what_sequences_begin_with_alike(tokens: list[list[int]], expected: int) -> None:
    assert packing.common_prefix([np.array(t) for t in tokens]) == expected


def test_shares_keep_groups_together_unless_that_leaves_a_part_too_heavy() -> None:
    """Prompts of 100 tokens, 10 replies of 10 each."""

    def indices(num_groups: int, num_parts: int) -> list[list[int]]:
        rollouts = []
        for ticket in range(10 * num_groups):
            one = Rollout(env="e", task_id="t", ticket=ticket, group_id=ticket // 10)
            one.append(np.full(100, ticket // 10))
            one.append(np.full(10, ticket), np.zeros(10), np.zeros(10))
            rollouts.append(one)
        parts = packing.shares(packing.pack(rollouts), num_parts, width=10**9, share_prefix=True)
        return [part.ticket.tolist() for part in parts]

    assert indices(2, 2) == [list(range(10)), list(range(10, 20))]
    first, second = indices(3, 2)  # 200 + 100 + 50 each; whole it were 400 and 200
    assert sorted(first + second) == list(range(30))
    assert len(first) == len(second) == 15
    assert [len(part) for part in indices(1, 2)] == [5, 5]
    assert indices(0, 2) == [[], []]


def batch(lengths: list[int], group_size: int, num_minibatches: int, *, whole_groups: bool) -> packing.Packed:
    rollouts = [_rollout(ticket, 2, n) for ticket, n in enumerate(lengths)]
    groups = np.arange(len(lengths)) // group_size
    for one, group in zip(rollouts, groups.tolist(), strict=True):
        one.group_id = group
    cut = packing.minibatches(groups, num_minibatches, whole_groups=whole_groups)
    return packing.pack(rollouts, minibatch=cut)


def steps(parts: list[packing.Packed], num_minibatches: int) -> list[list[int]]:
    """Tickets of each optimizer step, over all ranks."""
    return [
        sorted(t for part in parts for t in part.ticket[part.minibatch == m].tolist()) for m in range(num_minibatches)
    ]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=70),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
)
def test_an_optimizer_step_has_the_same_tickets_on_any_number_of_ranks(
    lengths: list[int], group_size: int, num_minibatches: int, share_prefix: bool
) -> None:
    packed = batch(lengths, group_size, num_minibatches, whole_groups=share_prefix)
    one, *others = (
        steps(packing.shares(packed, num, width=10**9, share_prefix=share_prefix), num_minibatches)
        for num in (1, 2, 4, 32)
    )
    assert all(other == one for other in others)
    assert sorted(t for step in one for t in step) == list(range(len(lengths)))
    if not share_prefix:
        sizes = [len(step) for step in one]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("num_ranks", [2, 4, 32])
def test_each_minibatch_is_shared_out_evenly_by_tokens(num_ranks: int) -> None:
    """64 rollouts of 1 to 64 tokens and 2 of prompt, four minibatches, the longest of each alone too long for 32."""
    lengths = np.random.default_rng(0).permutation(np.arange(1, 65)).tolist()
    packed = batch(lengths, 8, 4, whole_groups=False)
    parts = packing.shares(packed, num_ranks, width=10**9)
    for m in range(4):
        loads = [sum(np.diff(p.cu_seqlens)[p.minibatch == m]) for p in parts]
        costs = np.diff(packed.cu_seqlens)[packed.minibatch == m]
        assert max(loads) <= max(costs.max(), sum(costs) / num_ranks + costs.max() / 2)
        assert sum(loads) == sum(costs)
        assert sum(load > 0 for load in loads) == min(num_ranks, 16)


def test_groups_stay_whole_in_minibatches_where_their_start_is_shared() -> None:
    assert packing.minibatches(np.array([7, 7, 8, 8, 9]), 2).tolist() == [0, 0, 0, 1, 1]
    assert packing.minibatches(np.array([7, 7, 8, 8, 9]), 2, whole_groups=True).tolist() == [0, 0, 0, 0, 1]
    assert packing.minibatches(np.array([7, 7, 8, 8]), 3, whole_groups=True).tolist() == [0, 0, 1, 2]  # too few groups
    assert packing.minibatches(np.array([7]), 3).tolist() == [0]


def test_versions_are_told_over_the_loss_masked_tokens_only() -> None:
    rollout = Rollout(env="e", task_id="t")
    rollout.append([1, 2])
    rollout.append([3, 4], [-1, -1], [3, 3])
    rollout.append([9])
    rollout.append([5, 6, 7], [-1, -1, -1], [5, 5, 5])
    assert rollout.version_runs() == [(3, 2), (5, 3)]
    assert (rollout.head, rollout.tail, rollout.num_trainable) == (3, 5, 5)
    assert rollout.versions.tolist() == [NO_VERSION] * 2 + [3, 3] + [NO_VERSION] + [5, 5, 5]


def test_a_replayed_rollout_has_no_head() -> None:
    rollout = Rollout(env="e", task_id="t")
    rollout.append([3, 4], [-1, -1])
    assert (rollout.head, rollout.tail, rollout.num_trainable) == (NO_VERSION, NO_VERSION, 2)


def test_an_append_of_unequal_lengths_changes_nothing() -> None:
    rollout = Rollout(env="e", task_id="t")
    with pytest.raises(ValueError, match="append of 2 tokens"):
        rollout.append([1, 2], [-1.0], [0, 0])
    assert len(rollout.token_ids) == len(rollout.versions) == 0


def test_longest_turn_is_the_longest_run_under_the_mask() -> None:
    rollout = Rollout(env="e", task_id="t")
    assert rollout.longest_turn == 0
    for sampled in (2, 0, 3, 0, 1):
        rollout.append(np.zeros(sampled or 4), *([np.zeros(sampled)] if sampled else []))
    assert rollout.longest_turn == 3
