"""Policy losses: log-probs of the loss tokens of one micro-batch in, the summed loss and sums for the metrics out.

Given `Rows`: only tokens under the loss mask, already selected, so that nothing off the mask (a NaN, a padding value)
can reach a value or a gradient.  Promises sums, never means: whoever calls divides by the number of loss tokens of the
whole optimizer step, over all micro-batches and ranks.

Three policies meet here: behavior (sampled the token), proximal (the weights at the start of the batch) and current
(being optimized).  `ratio` carries the gradient or is clipped, `weight` is the detached one that corrects for behavior.

Knows nothing of models, batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    """How far from the data a loss may go; each loss reads what it has a use for."""

    clip_low: float = 0.2  # ratio is clipped below 1 - clip_low
    clip_high: float = 0.2  # ratio is clipped above 1 + clip_high
    importance_cap: float = 2.0  # largest importance weight


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSums:
    """What a loss returns: `total` with gradient, the rest detached."""

    total: Tensor  # [] summed loss of the N tokens
    sums: dict[str, Tensor]  # [] each; divided by the number of tokens they are means
    maxima: dict[str, Tensor]  # [] each


Loss = Callable[[Rows], LossSums]


def decoupled(rows: Rows, limits: Limits) -> LossSums:
    """Decoupled PPO (Hilton et al. 2022, arXiv:2110.00641; Fu et al. 2025, arXiv:2505.24298).

    weight = min(proximal / behavior, cap), detached; ratio = current / proximal;
    loss = -weight · min(ratio · A, clip(ratio, 1 - low, 1 + high) · A).
    """
    weight = _ratio(rows.proximal, rows.behavior).detach()
    ratio = _ratio(rows.current, rows.proximal.detach())
    surrogate, clipped = _clipped_surrogate(ratio, rows.advantages, limits)
    return _result(-_capped(weight, limits) * surrogate, ratio, clipped, weight, limits)


def ppo(rows: Rows, limits: Limits) -> LossSums:
    """PPO (Schulman et al. 2017, arXiv:1707.06347) with ratio = current / behavior: no weight, so no cap."""
    ratio = _ratio(rows.current, rows.behavior)
    surrogate, clipped = _clipped_surrogate(ratio, rows.advantages, limits)
    return _result(-surrogate, ratio, clipped, _ratio(rows.proximal, rows.behavior).detach(), limits)


def tis(rows: Rows, limits: Limits) -> LossSums:
    """Policy gradient with a truncated importance weight: -min(current / behavior, cap) · A · log current.

    The weight is detached; its cap trades variance for bias (Espeholt et al. 2018, arXiv:1802.01561).  Clips nothing.
    """
    weight = _ratio(rows.current, rows.behavior).detach()
    losses = -_capped(weight, limits) * rows.advantages * rows.current
    return _result(losses, _ratio(rows.current, rows.proximal), _nothing(weight), weight, limits)


def cispo(rows: Rows, limits: Limits) -> LossSums:
    """CISPO (MiniMax 2025, arXiv:2506.13585): the detached weight current / behavior is clipped, no token is lost."""
    weight = _ratio(rows.current, rows.behavior).detach()
    bounded = weight.clamp(1 - limits.clip_low, 1 + limits.clip_high)
    losses = -bounded * rows.advantages * rows.current
    return _result(losses, _ratio(rows.current, rows.proximal), bounded != weight, weight, limits)


def gspo(rows: Rows, limits: Limits) -> LossSums:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio per sequence, the geometric mean over its loss tokens.

    Otherwise `decoupled`: the sequence ratio is against the proximal policy, the capped weight of each token against
    behavior, and the sum runs over tokens.  Its clip limits are some hundred times smaller (3e-4 and 4e-4 there).
    """
    weight = _ratio(rows.proximal, rows.behavior).detach()
    ratio = _sequence_mean(_log_ratio(rows.current, rows.proximal.detach()), rows.sequence).exp()
    surrogate, clipped = _clipped_surrogate(ratio, rows.advantages, limits)
    return _result(-_capped(weight, limits) * surrogate, ratio, clipped, weight, limits)


def _limited(loss: Callable[[Rows, Limits], LossSums]) -> Callable[..., Loss]:
    def limited(*, clip_low: float = 0.2, clip_high: float = 0.2, importance_cap: float = 2.0) -> Loss:
        return partial(loss, limits=Limits(clip_low=clip_low, clip_high=clip_high, importance_cap=importance_cap))

    return limited


LOSSES: dict[str, Callable[..., Loss]] = {
    "decoupled": _limited(decoupled),
    "ppo": _limited(ppo),
    "tis": _limited(tis),
    "cispo": _limited(cispo),
    "gspo": _limited(gspo),
}
"""By name, each given its limits: LOSSES["decoupled"](clip_low=0.2, clip_high=0.28, importance_cap=2.0)."""


def k3(
    behavior: Tensor,  # [N] log-probs of the policy that sampled
    other: Tensor,  # [N] log-probs of the policy it is compared with
) -> Tensor:  # [N], the mean over samples estimates KL(behavior || other); never negative
    """exp(d) - 1 - d with d = other - behavior, clamped to ±20 (Schulman, "Approximating KL Divergence")."""
    d = _log_ratio(other, behavior)
    return torch.expm1(d) - d


def _log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator - denominator).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return _log_ratio(numerator, denominator).exp()


def _capped(weight: Tensor, limits: Limits) -> Tensor:
    return weight.clamp(max=limits.importance_cap)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """min(ratio · A, clip(ratio) · A), and where the clipping took the gradient away."""
    plain, bounded = ratio * advantages, ratio.clamp(1 - limits.clip_low, 1 + limits.clip_high) * advantages
    return torch.minimum(plain, bounded), (bounded < plain).detach()


def _nothing(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool)


def _sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """[N] each token's value replaced by the mean over its sequence."""
    num = int(sequence.max()) + 1 if len(sequence) else 0
    totals = values.new_zeros(num).index_add(0, sequence, values)
    counts = values.new_zeros(num).index_add(0, sequence, torch.ones_like(values))
    return (totals / counts.clamp(min=1))[sequence]


def _result(losses: Tensor, ratio: Tensor, clipped: Tensor, weight: Tensor, limits: Limits) -> LossSums:
    ratio = ratio.detach()
    return LossSums(
        total=losses.sum(),
        sums={
            "ratio_mean": ratio.sum(dtype=torch.float64),
            "clip_share": clipped.sum(dtype=torch.float64),
            "importance_mean": weight.sum(dtype=torch.float64),
            "importance_capped_share": (weight > limits.importance_cap).sum(dtype=torch.float64),
        },
        maxima={"ratio_max": _max(ratio), "importance_max": _max(weight)},
    )


def _max(values: Tensor) -> Tensor:
    return values.max() if len(values) else values.new_zeros(())
