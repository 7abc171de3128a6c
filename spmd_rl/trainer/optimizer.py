"""AdamW with warm-up, and the norm of sharded gradients.

Knows nothing of losses or batches; the norm is a collective of the trainer ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmd_rl.trainer.ranks import TrainerRanks


def adamw(
    parts: Sequence[tuple[Iterable[nn.Parameter], float]],  # parameters with their learning rate
    *,
    betas: tuple[float, float],
    weight_decay: float,
) -> tuple[torch.optim.AdamW, list[float]]:
    """AdamW whose moments exist from the start, and the learning rate of each of its groups after warm-up.

    Weight decay only on matrices.  (torch's state-dict helper would otherwise take an empty step to create the moments
    and save them with a step count of 1, so that a checkpoint of step 0 were not one of step 0.)
    """
    groups: list[dict[str, Any]] = []  # as torch takes them
    rates: list[float] = []
    for parameters, rate in parts:
        chosen = [p for p in parameters if p.requires_grad]
        alike: dict[
            tuple[bool, DeviceMesh | None], list[nn.Parameter]
        ] = {}  # the fused kernel takes tensors of one mesh at a time
        for p in chosen:
            alike.setdefault((p.ndim >= 2, getattr(p, "device_mesh", None)), []).append(p)
        for (is_matrix, _), some in alike.items():
            groups.append({"params": some, "weight_decay": weight_decay if is_matrix else 0.0, "lr": rate})
            rates.append(rate)
    optimizer = torch.optim.AdamW(groups, betas=betas, fused=True)
    for group in groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
    return optimizer, rates


def warmed_up(learning_rate: float, version: int, warmup_steps: int) -> float:
    """Learning rate of the batch that trains `version`: linear over the first `warmup_steps` batches, then constant.

    Example: warm-up over 4 steps gives 1/4, 2/4, 3/4, 1, 1 … of it.
    """
    return learning_rate * min(1.0, (version + 1) / max(warmup_steps, 1))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, on its device; a collective of the ranks that hold it, between the devices of their mesh."""
    if not isinstance(tensor, DTensor):
        return tensor
    between = tensor.to(tensor.device_mesh.device_type)
    assert isinstance(between, DTensor)
    gathered: Tensor = between.full_tensor()
    return gathered.to(tensor.device)


def square_sum(tensors: Iterable[Tensor], ranks: TrainerRanks) -> Tensor:
    """What this rank adds to the sum of squares over all shards, in float64: a float32 sum depends on the sharding.

    A tensor that several ranks hold the same part of is contributed by each of them in equal parts.
    """
    mine = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for tensor in tensors:
        shard = local(tensor)
        if shard.numel():
            square = torch.linalg.vector_norm(shard, dtype=torch.float64).square()
            mine += square.to(ranks.device) / (ranks.num / _num_parts(tensor))
    return mine


def _num_parts(tensor: Tensor) -> int:
    """Of how many ranks it takes the shards to make it whole."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = [tensor.device_mesh.size(axis) for axis, place in enumerate(tensor.placements) if not place.is_replicate()]
    return math.prod(sizes)
