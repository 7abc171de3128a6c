import numpy as np
import pytest

from spmd_rl.advantages import ADVANTAGES, STD_FLOOR, dr_grpo, grpo, rloo

THREE_OF_EIGHT = np.array([1, 0, 0, 1, 0, 1, 0, 0], float)
ALL = np.ones(8, bool)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [("grpo", 1.2076, -0.7246), ("dr_grpo", 0.6250, -0.3750), ("rloo", 0.7143, -0.4286)],
)
def test_three_right_of_eight(name: str, right: float, wrong: float) -> None:
    advantages = ADVANTAGES[name](THREE_OF_EIGHT, ALL)
    assert advantages.dtype == np.float32
    assert advantages == pytest.approx(np.where(THREE_OF_EIGHT == 1, right, wrong), abs=5e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_zero_spread_is_exactly_zero(name: str) -> None:
    assert (ADVANTAGES[name](np.full(7, 0.1), np.ones(7, bool)) == 0).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_member_without_a_trainable_token_does_not_move_the_baseline(name: str) -> None:
    advantage = ADVANTAGES[name]
    assert advantage(np.array([100.0, 1.0]), np.array([0, 2]) > 0).tolist() == [0.0, 0.0]
    alone = advantage(np.array([1.0, 0.0, 0.5]), np.ones(3, bool))
    beside = advantage(np.array([1.0, 100.0, 0.0, 0.5]), np.array([True, False, True, True]))
    assert beside.tolist() == [alone[0], 0.0, alone[1], alone[2]]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_reward_of_an_unusable_member_may_be_nan(name: str) -> None:
    assert np.isfinite(ADVANTAGES[name](np.array([np.nan, 0.0, 1.0]), np.array([False, True, True]))).all()


@pytest.mark.parametrize("name", ADVANTAGES)
def test_nan_reward_of_a_usable_member_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="finite"):
        ADVANTAGES[name](np.array([np.nan, 1.0]), np.ones(2, bool))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_outlier_stays_small(name: str) -> None:
    advantages = ADVANTAGES[name](np.array([0.0] + [0.95] * 7), ALL)
    assert np.abs(advantages).max() < 10
    if name == "rloo":
        assert advantages[0] == pytest.approx(-0.95)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_a_group_sum_to_zero(name: str) -> None:
    assert ADVANTAGES[name](np.array([0.3, 1.7, -2.0, 0.4]), np.ones(4, bool)).sum() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_empty_group_gives_nothing(name: str) -> None:
    assert ADVANTAGES[name](np.empty(0), np.empty(0, bool)).shape == (0,)


def test_spread_of_rounding_noise_is_not_blown_up() -> None:
    assert np.abs(grpo(np.array([0.3, 0.1 + 0.2]), np.ones(2, bool))).max() < 1e-10
    assert grpo(np.array([0.0, STD_FLOOR / 10]), np.ones(2, bool))[1] == pytest.approx(0.05)


def test_shifting_all_rewards_changes_nothing_and_only_grpo_forgets_the_scale() -> None:
    r, all4 = np.array([0.0, 1.0, 2.0, 5.0]), np.ones(4, bool)
    for advantage in ADVANTAGES.values():
        assert advantage(r + 7, all4) == pytest.approx(advantage(r, all4), abs=1e-6)
    assert grpo(3 * r, all4) == pytest.approx(grpo(r, all4), abs=1e-6)
    assert dr_grpo(3 * r, all4) == pytest.approx(3 * dr_grpo(r, all4), abs=1e-6)
    assert rloo(3 * r, all4) == pytest.approx(3 * rloo(r, all4), abs=1e-6)


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="usable flags"):
        grpo(np.zeros(3), np.ones(2, bool))
