"""The simple way to bring weights to engines, to compare with: gather each tensor, broadcast it whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from spmd_rl.weights.layout import TensorSpec


def gather_and_broadcast(
    parameters: Mapping[str, Tensor] | None,  # on trainer ranks, all of which call it; None on the others
    *,
    specs: Sequence[TensorSpec],
    source: int,  # the sender rank
    group: ProcessGroup | None,  # {source} + receivers; None on other trainers
) -> dict[str, Tensor]:
    """All trainer ranks and all receivers call it."""
    received = {}
    for spec in specs:
        full = torch.empty(spec.shape, dtype=spec.dtype)
        if parameters is not None:
            parameter = parameters[spec.name].detach()
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            full = full.to("cpu", spec.dtype).contiguous()
        if group is not None:
            dist.broadcast(full, source, group=group)
        received[spec.name] = full
    return received
