"""Policy losses: log-probs of the loss tokens of one micro-batch in, a loss for each token out.

Given `Rows`: only tokens under the loss mask, already selected, so that nothing off the mask (a NaN, a padding value)
can reach a value or a gradient.

Three policies meet here: behavior (sampled the token), proximal (the weights at the start of the batch) and current
(being optimized).  A loss is exact for data of one of them, its `anchor`: what separates that from behavior is the
business of the corrections (corrections.py), which weigh the tokens of any loss by anchor / behavior and leave out
those whose `judged` / behavior is out of bounds.

Knows nothing of models, batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp(20) = 5e8 is far beyond any use, and finite in float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The N loss tokens of one micro-batch."""

    current: Tensor  # [N] float32 log-probs under the policy being optimized, with gradient
    proximal: Tensor  # [N] float32 log-probs under the policy at the start of the batch
    behavior: Tensor  # [N] float32 log-probs at sampling
    advantages: Tensor  # [N] float32
    sequence: Tensor  # [N] int64, index of each token's sequence within the micro-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far from its anchor a loss may go; each loss reads what it has a use for."""

    clip_low: float = 0.2  # ratio is clipped below 1 - clip_low
    clip_high: float = 0.2  # ratio is clipped above 1 + clip_high
    clip_dual: float = 0.0  # where A < 0, a token's loss is at most clip_dual · |A|; 0: no bound


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLosses:
    """What a loss returns."""

    losses: Tensor  # [N], with gradient
    ratio: Tensor  # [N], detached: current / anchor
    clipped: Tensor  # [N] bool: the clip took the gradient (cispo: changed the weight)
    anchor: Tensor  # [N] log-probs, detached, of the policy whose data the loss is exact for
    judged: Tensor  # [N] log-probs, detached, of the policy that is compared with behavior


Loss = Callable[[Rows, Limits], TokenLosses]


def decoupled(rows: Rows, limits: Limits) -> TokenLosses:
    """Decoupled PPO (Hilton et al. 2022, arXiv:2110.00641; Fu et al. 2025, arXiv:2505.24298).

    ratio = current / proximal, loss = -min(ratio · A, clip(ratio, 1 - low, 1 + high) · A); with the correction
    "truncate" it is weighed by min(proximal / behavior, cap).
    """
    return _clip(rows, rows.proximal.detach(), limits)


def ppo(rows: Rows, limits: Limits) -> TokenLosses:
    """PPO (Schulman et al. 2017, arXiv:1707.06347) with ratio = current / behavior: the clip is its correction.

    Data that is stale from the start is clipped from the start.
    """
    return _clip(rows, rows.behavior, limits)


def cispo(rows: Rows, limits: Limits) -> TokenLosses:
    """CISPO (MiniMax 2025, arXiv:2506.13585): the detached weight current / behavior is clipped, no token is lost.

    There the weight has no lower bound: clip_low = 1.
    """
    ratio = ratio_of(rows.current, rows.behavior).detach()
    bounded = ratio.clamp(1 - limits.clip_low, 1 + limits.clip_high)
    losses = -bounded * rows.advantages * rows.current
    return TokenLosses(
        losses=losses, ratio=ratio, clipped=bounded != ratio, anchor=rows.behavior, judged=rows.proximal.detach()
    )


def gspo(rows: Rows, limits: Limits) -> TokenLosses:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio per sequence, s = exp(mean log(current / behavior)).

    loss_t = -min(s_t · A_t, clip(s_t) · A_t) with s_t = s in value, whose gradient is s · ∇ log current_t: the paper's
    GSPO-token, which is GSPO where all tokens of a sequence have one advantage, and leaves each its own where they have
    not.  Its limits are some thousand times smaller than those of a token's ratio.
    """
    mean = sequence_mean(log_ratio(rows.current.detach(), rows.behavior), rows.sequence)
    ratio = mean.exp() * (rows.current - rows.current.detach()).exp()
    return _clip(rows, rows.behavior, limits, ratio)


def reinforce(rows: Rows, limits: Limits) -> TokenLosses:
    """Plain policy gradient: -A · log current, exact for the current policy's own data; clips nothing."""
    losses = -rows.advantages * rows.current
    current = rows.current.detach()
    ratio = ratio_of(current, rows.proximal)
    clipped = torch.zeros_like(ratio, dtype=torch.bool)
    return TokenLosses(losses=losses, ratio=ratio, clipped=clipped, anchor=current, judged=current)


LOSSES: dict[str, Loss] = {
    "decoupled": decoupled,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "reinforce": reinforce,
}


# ---- how far two policies are apart, on tokens that the first sampled: the mean estimates KL(first || second)


def k1(first: Tensor, second: Tensor) -> Tensor:
    """log first - log second: unbiased, of either sign."""
    return -log_ratio(second, first)


def k2(first: Tensor, second: Tensor) -> Tensor:
    """(log first - log second)² / 2: its gradient is that of the KL on-policy."""
    return log_ratio(second, first).square() / 2


def k3(first: Tensor, second: Tensor) -> Tensor:
    """exp(d) - 1 - d with d = log second - log first: unbiased and never negative (Schulman, "Approximating KL")."""
    d = log_ratio(second, first)
    return torch.expm1(d) - d


KLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Difference of log-probs, clamped to ±20, where its gradient is 0."""
    return (numerator - denominator).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ratio_of(numerator: Tensor, denominator: Tensor) -> Tensor:
    return log_ratio(numerator, denominator).exp()


def sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """[N] each token's value replaced by the sum over its sequence."""
    num = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(num).index_add(0, sequence, values)[sequence]


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """[N] each token's value replaced by the mean over its sequence."""
    return sequence_sum(values, sequence) / sequence_sum(torch.ones_like(values), sequence)


def to_go(values: Tensor, sequence: Tensor) -> Tensor:
    """[N] each token's value replaced by the sum over it and the later tokens of its sequence.

    Example: 1 2 4 | 8 becomes 7 6 4 | 8.
    """
    before = values.cumsum(0) - values  # over the micro-batch, up to t
    first = torch.ones_like(sequence, dtype=torch.bool)
    first[1:] = sequence[1:] != sequence[:-1]
    start = sequence_sum(torch.where(first, before, 0.0), sequence)
    return sequence_sum(values, sequence) - (before - start)


def penalized(
    advantages: Tensor,  # [N]
    kl: Tensor,  # [N] log policy - log reference
    sequence: Tensor,  # [N] ints
    coefficient: float,  # β
) -> Tensor:  # [N]
    """The KL as part of the reward: A - β · Σ kl over the token and the later ones of its sequence.

    Ouyang et al. 2022, arXiv:2203.02155; Hu et al. 2025, arXiv:2501.03262.
    """
    return advantages - coefficient * to_go(kl, sequence)


def _clip(rows: Rows, anchor: Tensor, limits: Limits, ratio: Tensor | None = None) -> TokenLosses:
    """-min(ratio · A, clip(ratio) · A), where A < 0 at most clip_dual · |A| (Ye et al. 2020, arXiv:1912.09729)."""
    ratio = ratio_of(rows.current, anchor) if ratio is None else ratio
    advantages = rows.advantages
    plain, bounded = ratio * advantages, ratio.clamp(1 - limits.clip_low, 1 + limits.clip_high) * advantages
    surrogate, clipped = torch.minimum(plain, bounded), bounded < plain
    if limits.clip_dual:
        floor = torch.where(advantages < 0, limits.clip_dual * advantages, -torch.inf)
        clipped = clipped | (surrogate < floor)
        surrogate = torch.maximum(surrogate, floor)
    return TokenLosses(
        losses=-surrogate,
        ratio=ratio.detach(),
        clipped=clipped.detach(),
        anchor=anchor,
        judged=rows.proximal.detach(),
    )
