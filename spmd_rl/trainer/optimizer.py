"""AdamW with warm-up, and the norm of sharded gradients.

Knows nothing of losses or batches; the norm is a collective of the trainer ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmd_rl.trainer.ranks import TrainerRanks


def adamw(
    parameters: Iterable[nn.Parameter], *, learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.AdamW:
    """AdamW whose moments exist from the start, so that a checkpoint of step 0 is one of step 0.

    Weight decay only on matrices.  (torch's state-dict helper would otherwise take an empty step to create the moments
    and save them with a step count of 1.)
    """
    chosen = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in chosen if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in chosen if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, fused=True)
    for p in chosen:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def warmed_up(learning_rate: float, num_steps: int, warmup_steps: int) -> float:
    """Learning rate of the step after `num_steps` steps: linear up to `warmup_steps`, then constant.

    Example: warm-up over 4 steps gives 1/4, 2/4, 3/4, 1, 1 … of it.
    """
    return learning_rate * min(1.0, (num_steps + 1) / max(warmup_steps, 1))


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shard of each gradient; writing to it writes the gradient."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in grads]


def square_sum(
    gradients: Iterable[Tensor], ranks: TrainerRanks, num_replicas: int, beside: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum of squares over all shards, in float64 (in float32 it would depend on the sharding), and the sum of `beside`.

    Each of the `num_replicas` replicas holds the same gradient and contributes its part.
    """
    mine = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for g in gradients:
        if g.numel():
            mine += torch.linalg.vector_norm(g, dtype=torch.float64).square()
    both = ranks.sum(torch.stack([mine / num_replicas, beside.double()]))
    return both[0], both[1]
