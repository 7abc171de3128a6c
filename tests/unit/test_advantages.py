import numpy as np
import pytest

from spmd_rl.objective.advantages import (
    ADVANTAGES,
    STD_FLOOR,
    dr_grpo,
    gae,
    grpo,
    has_spread,
    overlong_penalty,
    raw,
    rloo,
    standardized,
)

THREE_OF_EIGHT = np.array([1, 0, 0, 1, 0, 1, 0, 0], float)
ALL = np.ones(8, bool)
STAGES = {
    "grpo": ADVANTAGES["grpo"].of_group,
    "grpo_population": ADVANTAGES["grpo_population"].of_group,
    "dr_grpo": ADVANTAGES["dr_grpo"].of_group,
    "rloo": ADVANTAGES["rloo"].of_group,
    "over the batch": lambda rewards, usable: standardized(rewards, usable, np.full(len(rewards), 7)),
}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("grpo", 1.2076, -0.7246),
        ("grpo_population", 1.2910, -0.7746),
        ("dr_grpo", 0.6250, -0.3750),
        ("rloo", 0.7143, -0.4286),
    ],
)
def test_three_right_of_eight(name: str, right: float, wrong: float) -> None:
    advantages = STAGES[name](THREE_OF_EIGHT, ALL)
    assert advantages.dtype == np.float32
    assert advantages == pytest.approx(np.where(THREE_OF_EIGHT == 1, right, wrong), abs=5e-5)


@pytest.mark.parametrize("name", STAGES)
def test_zero_spread_is_exactly_zero(name: str) -> None:
    assert (STAGES[name](np.full(7, 0.1), np.ones(7, bool)) == 0).all()


@pytest.mark.parametrize("name", STAGES)
def test_member_without_a_trainable_token_does_not_move_the_baseline(name: str) -> None:
    advantage = STAGES[name]
    assert advantage(np.array([100.0, 1.0]), np.array([0, 2]) > 0).tolist() == [0.0, 0.0]
    alone = advantage(np.array([1.0, 0.0, 0.5]), np.ones(3, bool))
    beside = advantage(np.array([1.0, 100.0, 0.0, 0.5]), np.array([True, False, True, True]))
    assert beside.tolist() == [alone[0], 0.0, alone[1], alone[2]]


@pytest.mark.parametrize("name", STAGES)
def test_reward_of_an_unusable_member_may_be_nan(name: str) -> None:
    assert np.isfinite(STAGES[name](np.array([np.nan, 0.0, 1.0]), np.array([False, True, True]))).all()


@pytest.mark.parametrize("name", STAGES)
def test_nan_reward_of_a_usable_member_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="finite"):
        STAGES[name](np.array([np.nan, 1.0]), np.ones(2, bool))


@pytest.mark.parametrize("name", STAGES)
def test_outlier_stays_small(name: str) -> None:
    advantages = STAGES[name](np.array([0.0] + [0.95] * 7), ALL)
    assert np.abs(advantages).max() < 10
    if name == "rloo":
        assert advantages[0] == pytest.approx(-0.95)


@pytest.mark.parametrize("name", STAGES)
def test_advantages_of_a_group_sum_to_zero(name: str) -> None:
    assert STAGES[name](np.array([0.3, 1.7, -2.0, 0.4]), np.ones(4, bool)).sum() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", STAGES)
def test_empty_group_gives_nothing(name: str) -> None:
    assert STAGES[name](np.empty(0), np.empty(0, bool)).shape == (0,)


def test_spread_of_rounding_noise_is_not_blown_up() -> None:
    assert np.abs(grpo(np.array([0.3, 0.1 + 0.2]), np.ones(2, bool))).max() < 1e-10
    assert grpo(np.array([0.0, STD_FLOOR / 10]), np.ones(2, bool))[1] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("rewards", "spread"),
    [
        ((0.3, 0.1 + 0.2), False),
        ((1.0, 1.0 - 1e-16), False),
        ((0.1 + 0.2 + 0.7, 0.7 + 0.2 + 0.1), False),
        ((-1e6, -1e6 - 1e-10), False),
        ((0.0, 0.0), False),
        ((0.0, -0.0), False),
        ((5e-17, 5e-17), False),
        ((0.0, 5e-17), False),
        ((0.0, 0.1 + 0.2 - 0.3), False),
        ((1e-9, 2e-9), True),
        ((0.3, 0.3 + 1e-8), True),
        ((0.0, 1.0), True),
        ((-1.0, 1.0), True),
    ],
)
def test_rewards_that_differ_by_rounding_have_no_spread(rewards: tuple[float, float], spread: bool) -> None:
    assert has_spread(np.array(rewards)) == spread
    for advantage in STAGES.values():
        found = advantage(np.array(rewards), np.ones(2, bool))
        assert np.abs(found).max() <= 2 and (spread or not found.any())


def test_shifting_all_rewards_changes_nothing_and_only_grpo_forgets_the_scale() -> None:
    r, all4 = np.array([0.0, 1.0, 2.0, 5.0]), np.ones(4, bool)
    for advantage in STAGES.values():
        assert advantage(r + 7, all4) == pytest.approx(advantage(r, all4), abs=1e-6)
    assert grpo(3 * r, all4) == pytest.approx(grpo(r, all4), abs=1e-6)
    assert dr_grpo(3 * r, all4) == pytest.approx(3 * dr_grpo(r, all4), abs=1e-6)
    assert rloo(3 * r, all4) == pytest.approx(3 * rloo(r, all4), abs=1e-6)


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="usable flags"):
        grpo(np.zeros(3), np.ones(2, bool))


def test_reinforce_pp_is_standardized_over_tokens() -> None:
    """30 of 470 tokens are right: mean 0.06383, std sqrt(0.06383 · 0.93617) = 0.24445."""
    rewards, tokens = np.array([1.0, 1, 1, 0, 0, 0, 0, 0]), np.array([10] * 7 + [400])
    found = ADVANTAGES["reinforce_pp"].of_batch(rewards, np.ones(8, bool), tokens)
    assert found == pytest.approx([3.8297] * 3 + [-0.2611] * 5, abs=5e-5)
    assert (found * tokens).sum() == pytest.approx(0, abs=1e-4)
    assert (found**2 * tokens).sum() / tokens.sum() == pytest.approx(1, abs=1e-5)


def test_reinforce_pp_baseline_is_standardized_over_tokens() -> None:
    """Groups 1 0 of 10 and 30 tokens, and 0 0 of 20 each: ±0.5, 0, 0; mean -10 / 80, mean square 10 / 80."""
    advantage, both = ADVANTAGES["reinforce_pp_baseline"], np.ones(2, bool)
    staged = np.concatenate([advantage.of_group(np.array(r), both) for r in ([1.0, 0.0], [0.0, 0.0])])
    std = (0.125 - 0.125**2) ** 0.5
    expected = [0.625 / std, -0.375 / std, 0.125 / std, 0.125 / std]
    assert advantage.of_batch(staged, np.ones(4, bool), np.array([10, 30, 20, 20])) == pytest.approx(expected, abs=1e-5)


def test_tokens_of_unusable_rollouts_do_not_count() -> None:
    found = standardized(np.array([1.0, 0.0, 9.0]), np.array([True, True, False]), np.array([10, 30, 1000]))
    assert found == pytest.approx([3**0.5, -(3**-0.5), 0], abs=1e-5)


def test_reinforce_pp_compares_all_rollouts_of_the_batch() -> None:
    """Rewards 1 1 | 0 4 of two groups of equal lengths: mean 1.5, std 1.5."""
    advantage = ADVANTAGES["reinforce_pp"]
    all2 = np.ones(2, bool)
    staged = np.concatenate([advantage.of_group(np.array(r), all2) for r in ([1.0, 1.0], [0.0, 4.0])])
    expected = [-1 / 3, -1 / 3, -1, 5 / 3]
    assert advantage.of_batch(staged, np.ones(4, bool), np.full(4, 20)) == pytest.approx(expected, abs=5e-5)
    assert not advantage.within_group


def test_reinforce_pp_baseline_takes_the_mean_of_the_group_away_first() -> None:
    """The same rewards: 0 0 | -2 2, std sqrt(8 / 4) = 1.4142."""
    advantage = ADVANTAGES["reinforce_pp_baseline"]
    all2 = np.ones(2, bool)
    staged = np.concatenate([advantage.of_group(np.array(r), all2) for r in ([1.0, 1.0], [0.0, 4.0])])
    found = advantage.of_batch(staged, np.ones(4, bool), np.full(4, 20))
    assert found == pytest.approx([0, 0, -1.4142, 1.4142], abs=5e-5)


def test_raw_rewards_of_unusable_members_are_zero_and_unseen() -> None:
    assert raw(np.array([3.0, np.nan]), np.array([True, False])).tolist() == [3.0, 0.0]


def test_gae_of_the_example() -> None:
    found = gae(np.array([0.0, 1, 0]), np.array([0.0, 0, 100]), np.array([True, True, False]), gamma=1.0, lam=0.95)
    assert found.tolist() == [0.95, 1.0, 0.0]


@pytest.mark.parametrize(
    ("lam", "gamma", "expected"),
    [
        (0.0, 1.0, [2 - 1, 3 - 2, 5 - 3]),  # one step: V_t+1 - V_t
        (1.0, 1.0, [5 - 1, 5 - 2, 5 - 3]),  # Monte Carlo: R - V_t
        (1.0, 0.5, [0.25 * 5 - 1, 0.5 * 5 - 2, 5 - 3]),
    ],
)
def test_gae_between_one_step_and_monte_carlo(lam: float, gamma: float, expected: list[float]) -> None:
    found = gae(np.array([0.0, 0, 5]), np.array([1.0, 2, 3]), np.ones(3, bool), gamma=gamma, lam=lam)
    assert found == pytest.approx(expected)


def test_gae_steps_over_what_is_off_the_mask() -> None:
    mask = np.array([True, False, True])
    with_gap = gae(np.array([0.0, 9, 1]), np.array([0.5, np.nan, 0.25]), mask)
    assert with_gap[mask] == pytest.approx(gae(np.array([0.0, 1]), np.array([0.5, 0.25]), np.ones(2, bool)))


@pytest.mark.parametrize(("length", "penalty"), [(10, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1), (120, -1)])
def test_overlong_penalty(length: int, penalty: float) -> None:
    assert overlong_penalty(length, longest=100, buffer=20) == penalty
    assert overlong_penalty(length, longest=100, buffer=0) == 0
