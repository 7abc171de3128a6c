"""What one step reports: sums over micro-batches on the device, then once over the ranks, then means.

Promises true means (sum over all tokens of all ranks, in float64, divided by their number), true maxima and
percentiles of all tokens (to 1%: counted in bins of the logarithm), the same dict on every rank.  Knows nothing of
models.  The names:

| name | meaning |
|---|---|
| `loss` | objective summed over the batch / its denominator |
| `entropy` | of the current policy at the sampling temperature |
| `ratio_mean`, `ratio_max` | current / anchor: proximal (decoupled, reinforce), behavior (ppo, cispo, gspo) |
| `clip_share` | share of tokens whose gradient (cispo: whose weight) was clipped |
| `importance_mean`, `_max`, `_p1`, `_p50`, `_p99` | what its bounds judge: proximal (reinforce: current) / behavior |
| `importance_capped_share` | share of tokens outside those bounds |
| `rejected_share` | share of tokens in sequences that were dropped |
| `kl_behavior_proximal` | k3 estimate: how far the data is off-policy, in nats per token |
| `kl_reference` | the chosen estimate of KL(current, reference); 0 without a reference |
| `mismatch_kl`, `mismatch_tokens` | k3 over the tokens that the trained version sampled; left out if none |
| `mismatch_max` | the largest difference of log-probs of such a token; left out if there is none |
| `value_loss`, `value_mean` | of the critic; left out without one |
| `tokens` | loss tokens of the batch, each once however many epochs there are |
| `computed_tokens` | those whose log-prob was computed (advantage 0 is skipped where that changes nothing) |
| `input_tokens` | tokens that went through the body, in all epochs |
| `shared_tokens` | those that did not because another sequence began with them (share_prefix) |
| `num_microbatches` | forwards with backward, of the rank with the most |
| `expert_load_max`, `expert_dead_share` | see docs/metrics.md; left out without experts |
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.objective import Sums
from spmd_rl.objective.losses import LOG_RATIO_BOUND, Rows, k3
from spmd_rl.trainer.ranks import TrainerRanks

MEANS = (
    "entropy",
    "ratio_mean",
    "clip_share",
    "importance_mean",
    "importance_capped_share",
    "rejected_share",
    "kl_behavior_proximal",
    "kl_reference",
)
CRITIC_MEANS = ("value_loss", "value_mean")
COUNTS = ("computed_tokens", "mismatch_tokens")  # of the batch
WORK = ("input_tokens", "shared_tokens")  # in all epochs
MAXIMA = ("ratio_max", "importance_max", "mismatch_max")
PERCENTILES = (1, 50, 99)
_SUMS = (*MEANS, *CRITIC_MEANS, *COUNTS, *WORK, "loss", "mismatch_kl")
_BIN = 0.01  # of the log importance weight


class Totals:
    """Sums and maxima of this rank's micro-batches; nothing leaves the device before `reduce`."""

    def __init__(self, device: torch.device, *, critic: bool, experts: tuple[int, int] = (0, 0)) -> None:
        """experts: layers with experts, experts of each."""
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)
        self.bins = torch.zeros(round(2 * LOG_RATIO_BOUND / _BIN) + 1, dtype=torch.float64, device=device)
        self._critic = critic
        self._load = torch.zeros(experts, dtype=torch.float64, device=device)

    def add(
        self,
        result: Sums,
        rows: Rows,
        entropy: Tensor,
        on_version: Tensor,
        num_inputs: int,
        num_shared: int,
        values: Tensor | None = None,
        value_losses: Tensor | None = None,
    ) -> None:
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
            "shared_tokens": num_shared,
            "value_loss": 0.0 if value_losses is None else value_losses.detach().sum(dtype=torch.float64),
            "value_mean": 0.0 if values is None else values.detach().sum(dtype=torch.float64),
        }
        device = self.sums.device
        self.sums += torch.stack([torch.as_tensor(sums[name], dtype=torch.float64, device=device) for name in _SUMS])
        difference = torch.where(on_version, (rows.behavior - rows.proximal.detach()).abs(), 0.0)
        largest = {**result.maxima, "mismatch_max": difference.max()}
        maxima = torch.stack([largest[name].double() for name in MAXIMA])
        self.maxima = torch.maximum(self.maxima, maxima)
        places = ((result.importance.log() + LOG_RATIO_BOUND) / _BIN).round().nan_to_num().long()
        self.bins += torch.bincount(places.clamp(0, len(self.bins) - 1), minlength=len(self.bins))

    def add_load(self, load: Tensor) -> None:  # [layers, E] float64
        """Tokens of one micro-batch that went to each expert."""
        self._load += load.to(self._load.device)

    def reduce(self, ranks: TrainerRanks, *, num_tokens: int, denominator: float, num_epochs: int) -> dict[str, float]:
        """Means, counts and maxima over all ranks; `num_tokens` and `denominator` are global."""
        both = ranks.total(torch.cat([self.sums, self.bins]))
        sums = dict(zip(_SUMS, both[: len(_SUMS)].tolist(), strict=True))
        maxima = dict(zip(MAXIMA, ranks.max(self.maxima.clone()).tolist(), strict=True))
        computed = max(sums["computed_tokens"], 1.0)
        metrics = {"loss": sums["loss"] / denominator if denominator else 0.0, "tokens": float(num_tokens)}
        metrics |= {name: sums[name] / computed for name in (*MEANS, *(CRITIC_MEANS if self._critic else ()))}
        metrics |= {name: sums[name] / num_epochs for name in COUNTS} | {name: sums[name] for name in WORK} | maxima
        metrics |= {f"importance_p{p}": _percentile(both[len(_SUMS) :], p) for p in PERCENTILES}
        if not sums["mismatch_tokens"]:
            del metrics["mismatch_max"]
        else:
            metrics["mismatch_kl"] = sums["mismatch_kl"] / sums["mismatch_tokens"]
        return metrics | (_of_load(ranks.sum(self._load.clone())) if self._load.numel() else {})


def _of_load(load: Tensor) -> dict[str, float]:  # [layers, E]
    """Where tokens went: the fullest expert against the mean of its layer, and the share of experts without any."""
    mean = load.mean(1, keepdim=True)
    if not mean.all():  # experts of a kind that is not seen
        return {}
    return {"expert_load_max": float((load / mean).max()), "expert_dead_share": float((load == 0).double().mean())}


def _percentile(bins: Tensor, percent: int) -> float:
    """Of a histogram over log weights: the middle of the bin that holds it; 0 where nothing was counted."""
    below = bins.cumsum(0)
    if not below[-1]:
        return 0.0
    place = int(torch.searchsorted(below, below[-1] * percent / 100))
    return float(torch.tensor(place * _BIN - LOG_RATIO_BOUND, dtype=torch.float64).exp())
