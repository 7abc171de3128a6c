"""What one step reports: sums over micro-batches on the device, then once over the ranks, then means.

Promises true means (sum over all tokens of all ranks, in float64, divided by their number) and true maxima, the same
dict on every rank.  Knows nothing of models.  The names:

| name | meaning |
|---|---|
| `loss` | objective summed over the loss tokens / number of loss tokens |
| `entropy` | of the current policy at the sampling temperature |
| `ratio_mean`, `ratio_max` | current / proximal (ppo: current / behavior) |
| `clip_share` | share of tokens whose gradient (cispo: whose weight) was clipped |
| `importance_mean`, `importance_max`, `importance_capped_share` | correction for behavior, before its cap |
| `kl_behavior_proximal` | k3 estimate: how far the data is off-policy, in nats per token |
| `mismatch_kl`, `mismatch_tokens` | the same over the tokens that the trained version sampled; left out if none |
| `tokens` | loss tokens: the denominator, summed over optimizer steps |
| `computed_tokens` | those whose log-prob was computed (a sequence with advantage 0 is skipped) |
| `input_tokens` | tokens that went through the body |
| `num_microbatches` | forwards with backward, of the rank with the most |
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.losses import LossSums, Rows, k3
from spmd_rl.trainer.ranks import TrainerRanks

MEANS = (
    "entropy",
    "ratio_mean",
    "clip_share",
    "importance_mean",
    "importance_capped_share",
    "kl_behavior_proximal",
)
COUNTS = ("computed_tokens", "input_tokens", "mismatch_tokens")
MAXIMA = ("ratio_max", "importance_max")
_SUMS = (*MEANS, *COUNTS, "loss", "mismatch_kl")


class Totals:
    """Sums and maxima of this rank's micro-batches; nothing leaves the device before `reduce`."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)

    def add(self, result: LossSums, rows: Rows, entropy: Tensor, on_version: Tensor, num_inputs: int) -> None:
        """One micro-batch; `on_version [N] bool` marks tokens sampled by the version that is trained."""
        kl = k3(rows.behavior, rows.proximal.detach()).double()
        sums = {
            **result.sums,
            "loss": result.total.detach(),
            "entropy": entropy.detach().sum(dtype=torch.float64),
            "kl_behavior_proximal": kl.sum(),
            "mismatch_kl": torch.where(on_version, kl, 0.0).sum(),
            "mismatch_tokens": on_version.sum(),
            "computed_tokens": len(kl),
            "input_tokens": num_inputs,
        }
        device = self.sums.device
        self.sums += torch.stack([torch.as_tensor(sums[name], dtype=torch.float64, device=device) for name in _SUMS])
        maxima = torch.stack([result.maxima[name].double() for name in MAXIMA])
        self.maxima = torch.maximum(self.maxima, maxima)

    def reduce(self, ranks: TrainerRanks, num_tokens: int) -> dict[str, float]:
        """Means, counts and maxima over all ranks; `num_tokens` is the global number of loss tokens."""
        sums = dict(zip(_SUMS, ranks.sum(self.sums.clone()).tolist(), strict=True))
        maxima = dict(zip(MAXIMA, ranks.max(self.maxima.clone()).tolist(), strict=True))
        computed = max(sums["computed_tokens"], 1.0)
        metrics = {"loss": sums["loss"] / max(num_tokens, 1), "tokens": float(num_tokens)}
        metrics |= {name: sums[name] / computed for name in MEANS}
        metrics |= {name: sums[name] for name in COUNTS} | maxima
        if sums["mismatch_tokens"]:
            metrics["mismatch_kl"] = sums["mismatch_kl"] / sums["mismatch_tokens"]
        return metrics
