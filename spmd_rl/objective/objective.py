"""What one micro-batch adds to the objective: losses, corrections, entropy and KL terms put together.

Promises sums, never means: token t adds scale_t · (weight_t · loss_t + β · kl_t - c · H_t), and share_t to the
denominator, which is summed over all micro-batches and ranks before anything is divided by it.  Scale and share come
with the tokens (AGGREGATIONS); rejected tokens add neither.  Knows nothing of models, batches or ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from spmd_rl.objective.corrections import Correction
from spmd_rl.objective.losses import KLS, Limits, Loss, Rows, k1, penalized


def token_mean(num_tokens: int, longest: int) -> tuple[float, float]:
    """Σ loss / tokens: every token counts the same (DAPO)."""
    return 1.0, 1.0


def sequence_mean(num_tokens: int, longest: int) -> tuple[float, float]:
    """Σ (mean loss of a rollout) / rollouts (GRPO, GSPO)."""
    return 1.0 / num_tokens, 1.0 / num_tokens


def constant(num_tokens: int, longest: int) -> tuple[float, float]:
    """Σ loss / (rollouts · longest): no preference for short or long ones (Dr. GRPO)."""
    return 1.0 / longest, 1.0 / num_tokens


class Aggregate(Protocol):
    def __call__(self, num_tokens: int, longest: int) -> tuple[float, float]:
        """(scale, share) of each loss token of a rollout of so many; `longest`: most tokens of a turn."""


AGGREGATIONS: dict[str, Aggregate] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "constant": constant,
}
"""By name: (loss tokens of the rollout, most tokens of a turn) to (scale, share) of each of its tokens."""

KL_PLACES = ("loss", "reward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """What an objective returns: `total` with gradient, the rest detached."""

    total: Tensor  # [] float64, sum over the tokens
    denominator: Tensor  # [] float64, what these tokens add to it
    sums: dict[str, Tensor]  # [] each; divided by the number of tokens they are means
    maxima: dict[str, Tensor]  # [] each
    importance: Tensor  # [N] judged / behavior, for percentiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """One choice of everything."""

    loss: Loss  # of losses.LOSSES
    limits: Limits = field(default_factory=Limits)
    correction: Correction = field(default_factory=Correction)
    entropy_coefficient: float = 0.0  # c
    kl: str = "k3"  # of losses.KLS
    kl_coefficient: float = 0.0  # β; 0: no reference is needed
    kl_in: str = "loss"  # of KL_PLACES

    @property
    def needs_every_sequence(self) -> bool:
        """A sequence with advantage 0 has a gradient, or may leave the denominator."""
        return self.entropy_coefficient != 0 or self.kl_coefficient != 0 or self.correction.reject != "none"

    def __call__(
        self,
        rows: Rows,
        *,
        entropy: Tensor,  # [N], with gradient
        scale: Tensor,  # [N] float64
        share: Tensor,  # [N] float64
        reference: Tensor | None = None,  # [N] log-probs; needed where kl_coefficient is not 0
        beside: Tensor | None = None,  # [N], with gradient, added to each token's loss: a critic's
    ) -> Sums:
        current = rows.current.detach()
        kl = torch.zeros_like(current)
        assert reference is not None or not self.kl_coefficient
        if reference is not None:
            kl = KLS[self.kl](rows.current, reference)
            if self.kl_coefficient and self.kl_in == "reward":
                rows = _penalized(rows, reference, self.kl_coefficient)
        result = self.loss(rows, self.limits)
        ratio = self.correction.ratio(result.judged, rows.behavior, rows.sequence)
        weight = self.correction.weight(self.correction.ratio(result.anchor, rows.behavior, rows.sequence), ratio)
        kept = self.correction.kept(current, rows.behavior, rows.advantages, rows.sequence)
        losses = _where(weight != 0, weight * result.losses)
        if self.kl_coefficient and self.kl_in == "loss":
            losses = losses + self.kl_coefficient * kl
        if self.entropy_coefficient:
            losses = losses - self.entropy_coefficient * entropy
        if beside is not None:
            losses = losses + beside
        total = (scale.to(losses.dtype) * _where(kept, losses)).sum(dtype=torch.float64)
        bounded = (ratio > self.correction.high) | (ratio < self.correction.low)
        return Sums(
            total=total,
            denominator=torch.where(kept, share, 0.0).sum(),
            sums={
                "ratio_mean": _sum(result.ratio),
                "clip_share": _sum(result.clipped),
                "importance_mean": _sum(ratio),
                "importance_capped_share": _sum(bounded),
                "rejected_share": _sum(~kept),
                "kl_reference": _sum(kl.detach()),
            },
            maxima={"ratio_max": _max(result.ratio), "importance_max": _max(ratio)},
            importance=ratio,
        )


def _penalized(rows: Rows, reference: Tensor, coefficient: float) -> Rows:
    """A reward is the same in all optimizer steps of a batch: it is the proximal policy's distance that tokens pay."""
    kl = k1(rows.proximal.detach(), reference)
    return replace(rows, advantages=penalized(rows.advantages, kl, rows.sequence, coefficient))


def _where(chosen: Tensor, values: Tensor) -> Tensor:
    """Selected, not multiplied: what is left out may be infinite."""
    return torch.where(chosen, values, torch.zeros_like(values))


def _sum(values: Tensor) -> Tensor:
    return values.sum(dtype=torch.float64)


def _max(values: Tensor) -> Tensor:
    return values.max() if len(values) else values.new_zeros(())
