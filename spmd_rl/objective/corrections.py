"""Corrections for data of another policy: log-probs in, a detached weight for each token out, 0 = left out.

Two stages that go with any loss.  The importance correction weighs tokens by anchor / behavior, where the anchor is the
policy whose data the loss is exact for: truncated (Espeholt et al. 2018, arXiv:1802.01561), or masked where judged /
behavior is out of bounds (MIS; IcePop on token level); taken for each token, as the product over its sequence, or as
the geometric mean over it.  The two ratios differ only for losses that hold anchor / behavior themselves (ppo, cispo):
their weight is 1, or 0 where proximal / behavior is out of bounds.  The rejection drops whole sequences that the
current policy has moved away from.

A masked token trains nothing and still counts in the denominator, since it belongs to the data; a rejected sequence
does not.  Knows nothing of losses, models or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.objective.losses import LOG_RATIO_BOUND, log_ratio, sequence_mean, sequence_sum


def none(weight: Tensor, judged: Tensor, low: float, high: float) -> Tensor:
    """1."""
    return torch.ones_like(weight)


def truncate(weight: Tensor, judged: Tensor, low: float, high: float) -> Tensor:
    """The weight within its bounds: less variance for some bias."""
    return weight.clamp(low, high)


def mask(weight: Tensor, judged: Tensor, low: float, high: float) -> Tensor:
    """The weight, 0 where the judged ratio is out of bounds."""
    return torch.where((judged >= low) & (judged <= high), weight, 0.0)


CORRECTIONS: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "none": none,
    "truncate": truncate,
    "mask": mask,
}

LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log, sequence: log,
    "sequence": sequence_sum,
    "geometric": sequence_mean,
}
"""By name: ([N] log ratio, [N] sequence) to the [N] log ratio that a token is weighed by."""


def keep_all(k1: Tensor, advantages: Tensor, above: float) -> Tensor:
    return torch.ones_like(k1, dtype=torch.bool)


def off_policy(k1: Tensor, advantages: Tensor, above: float) -> Tensor:
    """Keep sequences that the current policy has not moved away from, whatever their advantage."""
    return k1 <= above


def off_policy_negative(k1: Tensor, advantages: Tensor, above: float) -> Tensor:
    """The off-policy sequence mask (DeepSeek-V3.2): only what has a negative advantage is dropped."""
    return (k1 <= above) | (advantages >= 0)


REJECTIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "none": keep_all,
    "off_policy": off_policy,
    "off_policy_negative": off_policy_negative,
}
"""By name: ([N] mean over the sequence of log behavior - log current, [N] advantages, threshold) to [N] bool, kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """One choice of each; the defaults are decoupled PPO's and AReaL's."""

    kind: str = "truncate"  # of CORRECTIONS
    level: str = "token"  # of LEVELS
    low: float = 0.0  # bounds of the ratio
    high: float = 2.0
    reject: str = "none"  # of REJECTIONS
    reject_above: float = 0.1  # nats per token

    def ratio(self, policy: Tensor, behavior: Tensor, sequence: Tensor) -> Tensor:  # [N]
        """policy / behavior on the chosen level, before any bound."""
        log = LEVELS[self.level](log_ratio(policy, behavior), sequence)
        return log.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()

    def weight(self, weight: Tensor, judged: Tensor) -> Tensor:  # [N]
        """Of two ratios."""
        return CORRECTIONS[self.kind](weight, judged, self.low, self.high)

    def kept(self, current: Tensor, behavior: Tensor, advantages: Tensor, sequence: Tensor) -> Tensor:  # [N] bool
        k1 = sequence_mean(behavior - current, sequence)
        return REJECTIONS[self.reject](k1, advantages, self.reject_above)
