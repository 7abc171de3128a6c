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
| `mismatch_tokens` | that the trained version sampled and whose log-probs under it were computed, each once |
| `mismatch_kl` | k3 over them; left out if there is none |
| `mismatch_max`, `mismatch_p99` | the largest difference of log-probs among them, and the 99th percentile; likewise |
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

from spmd_rl.objective.losses import LOG_RATIO_BOUND, Rows, k3
from spmd_rl.objective.objective import Sums
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
WORK = ("input_tokens", "shared_tokens")  # in all epochs
MAXIMA = ("ratio_max", "importance_max", "mismatch_max")
PERCENTILES = (1, 50, 99)
_SUMS = (*MEANS, *CRITIC_MEANS, *WORK, "computed_tokens", "loss", "mismatch_tokens", "mismatch_kl")
_BIN = 0.01  # of the logarithm of importance weights and of differences


class Totals:
    """Sums and maxima of this rank's micro-batches; nothing leaves the device before `reduce`."""

    def __init__(self, device: torch.device, *, critic: bool, experts: tuple[int, int] = (0, 0)) -> None:
        """experts: layers with experts, experts of each."""
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=device)
        self.bins, self.mismatch_bins = torch.zeros(
            2, round(2 * LOG_RATIO_BOUND / _BIN) + 1, dtype=torch.float64, device=device
        )
        self._critic = critic
        self._load = torch.zeros(experts, dtype=torch.float64, device=device)

    def add(
        self,
        result: Sums,
        rows: Rows,
        entropy: Tensor,
        compared: Tensor,
        num_inputs: int,
        num_shared: int,
        values: Tensor | None = None,
        value_losses: Tensor | None = None,
    ) -> None:
        """One micro-batch; `compared [N] bool` marks tokens of the trained version with its log-probs, each once."""
        kl = k3(rows.behavior, rows.proximal.detach()).double()
        sums = {
            **result.sums,
            "loss": result.total.detach(),
            "entropy": entropy.detach().sum(dtype=torch.float64),
            "kl_behavior_proximal": kl.sum(),
            "mismatch_kl": torch.where(compared, kl, 0.0).sum(),
            "mismatch_tokens": compared.sum(),
            "computed_tokens": len(kl),
            "input_tokens": num_inputs,
            "shared_tokens": num_shared,
            "value_loss": 0.0 if value_losses is None else value_losses.detach().sum(dtype=torch.float64),
            "value_mean": 0.0 if values is None else values.detach().sum(dtype=torch.float64),
        }
        device = self.sums.device
        self.sums += torch.stack([torch.as_tensor(sums[name], dtype=torch.float64, device=device) for name in _SUMS])
        difference = (rows.behavior - rows.proximal.detach()).abs()
        largest = {**result.maxima, "mismatch_max": torch.where(compared, difference, 0.0).max()}
        maxima = torch.stack([largest[name].double() for name in MAXIMA])
        self.maxima = torch.maximum(self.maxima, maxima)
        _count(self.bins, result.importance, torch.ones_like(compared))
        _count(self.mismatch_bins, difference, compared)

    def add_load(self, load: Tensor) -> None:  # [layers, E] float64
        """Tokens of one micro-batch that went to each expert."""
        self._load += load.to(self._load.device)

    def reduce(self, ranks: TrainerRanks, *, num_tokens: int, denominator: float, num_epochs: int) -> dict[str, float]:
        """Means, counts and maxima over all ranks; `num_tokens` and `denominator` are global."""
        sums, bins, mismatch_bins = ranks.total(torch.cat([self.sums, self.bins, self.mismatch_bins])).split(
            [len(_SUMS), len(self.bins), len(self.bins)]
        )
        sums = dict(zip(_SUMS, sums.tolist(), strict=True))
        maxima = dict(zip(MAXIMA, ranks.max(self.maxima.clone()).tolist(), strict=True))
        computed = max(sums["computed_tokens"], 1.0)
        metrics = {"loss": sums["loss"] / denominator if denominator else 0.0, "tokens": float(num_tokens)}
        metrics |= {name: sums[name] / computed for name in (*MEANS, *(CRITIC_MEANS if self._critic else ()))}
        metrics["computed_tokens"] = sums["computed_tokens"] / num_epochs
        metrics |= {name: sums[name] for name in (*WORK, "mismatch_tokens")} | maxima
        metrics |= {f"importance_p{p}": _percentile(bins, p) for p in PERCENTILES}
        if not sums["mismatch_tokens"]:
            del metrics["mismatch_max"]
        else:
            metrics["mismatch_p99"] = _percentile(mismatch_bins, 99)
            metrics["mismatch_kl"] = sums["mismatch_kl"] / sums["mismatch_tokens"]
        return metrics | (_of_load(ranks.sum(self._load.clone())) if self._load.numel() else {})


def _of_load(load: Tensor) -> dict[str, float]:  # [layers, E]
    """Where tokens went: the fullest expert against the mean of its layer, and the share of experts without any."""
    mean = load.mean(1, keepdim=True)
    if not mean.all():  # experts of a kind that is not seen
        return {}
    return {"expert_load_max": float((load / mean).max()), "expert_dead_share": float((load == 0).double().mean())}


def _count(bins: Tensor, values: Tensor, chosen: Tensor) -> None:  # [bins] float64, [N], [N] bool
    """Add the chosen values to a histogram over logarithms; 0 and NaN are in the first bin.  Nobody waits for it."""
    last = len(bins) - 1
    places = ((values.log() + LOG_RATIO_BOUND) / _BIN).round().nan_to_num(nan=0.0, posinf=last, neginf=0.0).long()
    bins.index_add_(0, places.clamp(0, last), chosen.to(bins.dtype))


def _percentile(bins: Tensor, percent: int) -> float:
    """Of a histogram over log weights: the middle of the bin that holds it; 0 where nothing was counted."""
    below = bins.cumsum(0)
    if not below[-1]:
        return 0.0
    place = int(torch.searchsorted(below, below[-1] * percent / 100))
    return float(torch.tensor(place * _BIN - LOG_RATIO_BOUND, dtype=torch.float64).exp())
