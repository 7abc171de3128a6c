"""Advantages: rewards in, one number for each rollout out, in two stages.

`of_group` is given the rewards and usable flags of one prompt's rollouts, `of_batch` what the first stage made of all
rollouts of a batch, with the number of tokens of each; both return float32 of the same shape, and neither looks at an
order.
Promises: members that are not usable (failed, masked, without a token to train on) neither get an advantage
nor move a baseline or a scale; where all rewards that are compared are equal, everything is exactly 0.

Example, k = 8 with 3 right: grpo +1.2076 / -0.7246, dr_grpo +0.625 / -0.375, rloo +0.7143 / -0.4286.

`gae` credits tokens or turns by a critic's values; it runs where the values are, in the trainer.
Knows nothing of batches, models or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

STD_FLOOR = 1e-4  # rewards that differ hardly at all must not become advantages of size 1
ROUNDING = 1e-9  # by which equal rewards may differ, relative to the largest: sums of the same parts in another order
NOTHING = 1e-12  # by which they may differ whatever the largest: parts that cancel, 0.1 + 0.2 - 0.3

Stage = Callable[[np.ndarray, np.ndarray], np.ndarray]  # ([k] floats, [k] bool usable) -> [k] float32
BatchStage = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # and [B] ints, loss tokens of each


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantage:
    """How rewards become advantages."""

    of_group: Stage
    of_batch: BatchStage | None = None  # None: the first stage is all
    within_group: bool = True  # the group is compared with itself: one rollout, or equal rewards, teach nothing


def grpo(
    rewards: np.ndarray,  # [k] floats
    usable: np.ndarray,  # [k] bool
) -> np.ndarray:  # [k] float32
    """(r - mean) / max(std, floor), std unbiased (divided by k - 1) (Shao et al. 2024, arXiv:2402.03300)."""
    return _over_usable(rewards, usable, _standard)


def grpo_population(
    rewards: np.ndarray,  # [k] floats
    usable: np.ndarray,  # [k] bool
) -> np.ndarray:  # [k] float32
    """grpo with the population std (divided by k)."""
    return _over_usable(rewards, usable, lambda r: (r - r.mean()) / max(float(r.std()), STD_FLOOR))


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


def raw(
    rewards: np.ndarray,  # [k] floats
    usable: np.ndarray,  # [k] bool
) -> np.ndarray:  # [k] float32
    """The rewards themselves."""
    rewards, usable = _checked(rewards, usable)
    return np.where(usable, rewards, 0).astype(np.float32)


def standardized(
    advantages: np.ndarray,  # [B] floats
    usable: np.ndarray,  # [B] bool
    num_tokens: np.ndarray,  # [B] ints, loss tokens: each has the advantage of its rollout
) -> np.ndarray:  # [B] float32
    """(a - mean) / max(std, floor), both over all tokens of usable rollouts: the global step of REINFORCE++.

    Example: seven rollouts of 10 tokens and one of 400, three of the short ones right: +3.83 and -0.26.
    """

    def score(a: np.ndarray) -> np.ndarray:
        tokens = np.asarray(num_tokens, np.float64)[np.asarray(usable, np.bool_)]
        mean = np.average(a, weights=tokens)
        std = np.sqrt(np.average((a - mean) ** 2, weights=tokens))
        scored: np.ndarray = (a - mean) / max(float(std), STD_FLOOR)
        return scored

    return _over_usable(advantages, usable, score)


ADVANTAGES: dict[str, Advantage] = {
    "grpo": Advantage(of_group=grpo),
    "grpo_population": Advantage(of_group=grpo_population),
    "dr_grpo": Advantage(of_group=dr_grpo),
    "rloo": Advantage(of_group=rloo),
    # Hu et al. 2025, arXiv:2501.03262: rewards standardized over the tokens of the batch; the baseline form takes the
    # group's mean away first.  Where a KL is in the rewards it is standardized with them, by the trainer
    "reinforce_pp": Advantage(of_group=raw, of_batch=standardized, within_group=False),
    "reinforce_pp_baseline": Advantage(of_group=dr_grpo, of_batch=standardized),
    "gae": Advantage(of_group=raw, within_group=False),  # the trainer's critic does the rest
}


def gae(
    rewards: np.ndarray,  # [N] floats, at the steps of one rollout, 0 where there is none
    values: np.ndarray,  # [N] floats, of the state before each step
    mask: np.ndarray,  # [N] bool, the steps that were actions; the others do not exist for the estimate
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> np.ndarray:  # [N] float64, 0 off the mask
    """A_t = δ_t + γ λ A_t+1 with δ_t = r_t + γ V_t+1 - V_t, V = 0 after the last (Schulman et al. 2015, 1506.02438).

    Example: rewards 0 1 0, values 0 0 100, mask 1 1 0, γ = 1, λ = 0.95 give 0.95 1.00 0.
    """
    advantages = np.zeros(len(rewards))
    after, value_after = 0.0, 0.0
    for t in np.flatnonzero(mask)[::-1]:
        delta = rewards[t] + gamma * value_after - values[t]
        after = delta + gamma * lam * after
        advantages[t], value_after = after, values[t]
    return advantages


def overlong_penalty(length: int, *, longest: int, buffer: int) -> float:
    """0 until `buffer` tokens before the longest, then linearly down to -1 (DAPO, Yu et al. 2025, arXiv:2503.14476).

    Example: longest 100 and buffer 20 give 0 at 80, -0.5 at 90, -1 at 100.
    """
    if not buffer:
        return 0.0
    return -min(1.0, max(0.0, (length - (longest - buffer)) / buffer))


def has_spread(rewards: np.ndarray) -> bool:  # [k] floats
    """Whether they differ by more than rounding."""
    return bool(rewards.max() - rewards.min() > max(ROUNDING * np.abs(rewards).max(), NOTHING))


def _standard(r: np.ndarray) -> np.ndarray:
    scored: np.ndarray = (r - r.mean()) / max(float(r.std(ddof=1)), STD_FLOOR)
    return scored


def _checked(rewards: np.ndarray, usable: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rewards = np.asarray(rewards, np.float64)
    usable = np.asarray(usable, np.bool_)
    if rewards.shape != usable.shape:
        raise ValueError(f"{rewards.shape} rewards but {usable.shape} usable flags")
    if not np.isfinite(rewards[usable]).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}")
    return rewards, usable


def _over_usable(rewards: np.ndarray, usable: np.ndarray, score: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    rewards, usable = _checked(rewards, usable)
    advantages = np.zeros(rewards.shape, np.float32)
    chosen = rewards[usable]
    if len(chosen) >= 2 and has_spread(chosen):  # else the mean alone may be off by one bit
        advantages[usable] = score(chosen)
    return advantages
