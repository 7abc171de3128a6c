"""Group advantages: the rewards of one prompt's rollouts in, one number for each rollout out.

Each function is given `rewards [k]` and `usable [k]` (True where the rollout has a token to train on) and returns
float32 `[k]`.  Promises: members that are not usable neither get an advantage nor move the baseline; a group whose
usable rewards are all equal, or that has fewer than two of them, is exactly 0 everywhere.

Example, k = 8 with 3 right: grpo +1.2076 / -0.7246, dr_grpo +0.625 / -0.375, rloo +0.7143 / -0.4286.

Knows nothing of tokens, batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

STD_FLOOR = 1e-4  # rewards that differ only by rounding must not become advantages of size 1

Advantage = Callable[[np.ndarray, np.ndarray], np.ndarray]


def grpo(
    rewards: np.ndarray,  # [k] floats
    usable: np.ndarray,  # [k] bool
) -> np.ndarray:  # [k] float32
    """(r - mean) / max(std, floor), std unbiased (divided by k - 1) (Shao et al. 2024, arXiv:2402.03300)."""

    def score(r: np.ndarray) -> np.ndarray:
        return (r - r.mean()) / max(float(r.std(ddof=1)), STD_FLOOR)

    return _over_usable(rewards, usable, score)


def dr_grpo(
    rewards: np.ndarray,  # [k] floats
    usable: np.ndarray,  # [k] bool
) -> np.ndarray:  # [k] float32
    """r - mean (Liu et al. 2025, arXiv:2503.20783)."""
    return _over_usable(rewards, usable, lambda r: r - r.mean())


def rloo(
    rewards: np.ndarray,  # [k] floats
    usable: np.ndarray,  # [k] bool
) -> np.ndarray:  # [k] float32
    """r - mean of the others = (r - mean) · k / (k - 1) (Ahmadian et al. 2024, arXiv:2402.14740)."""
    return _over_usable(rewards, usable, lambda r: (r - r.mean()) * (len(r) / (len(r) - 1)))


ADVANTAGES: dict[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def _over_usable(rewards: np.ndarray, usable: np.ndarray, score: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    rewards = np.asarray(rewards, np.float64)
    usable = np.asarray(usable, np.bool_)
    if rewards.shape != usable.shape:
        raise ValueError(f"{rewards.shape} rewards but {usable.shape} usable flags")
    advantages = np.zeros(rewards.shape, np.float32)
    chosen = rewards[usable]
    if not np.isfinite(chosen).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    if (
        len(chosen) >= 2 and chosen.max() > chosen.min()
    ):  # compared, since the mean of equal floats may be off by one bit
        advantages[usable] = score(chosen)
    return advantages
