"""Advantages of tokens, where one for each rollout is not enough, to one scale.

Given tensors of the loss tokens of micro-batches.  Knows nothing of models or of what the advantages are made of.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_rl.trainer.ranks import TrainerRanks


def standardize(advantages: list[Tensor | None], ranks: TrainerRanks) -> list[Tensor | None]:
    """Advantages [N] of all tokens of the batch, on all ranks, to mean 0 and standard deviation 1."""
    moments = torch.zeros(3, dtype=torch.float64, device=ranks.device)
    for a in advantages:
        if a is not None:
            a = a.double()
            moments += torch.stack([torch.ones_like(a).sum(), a.sum(), a.square().sum()])
    num, total, squares = ranks.sum(moments).tolist()
    mean = total / max(num, 1.0)
    std = max((squares / max(num, 1.0) - mean**2), 0.0) ** 0.5
    return [None if a is None else (a - mean) / max(std, 1e-8) for a in advantages]
