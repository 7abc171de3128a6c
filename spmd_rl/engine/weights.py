"""What engines of every kind ask at an update: whether its tensors fit the model, and whom it overtakes.

Names are those of `named_parameters()`: a tied head arrives once, as the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from spmd_rl.weights.layout import TensorSpec


def check_update(tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], device: torch.device) -> None:
    """ValueError if names, shapes, types or devices are not those of the model."""
    missing, unknown = specs.keys() - tensors.keys(), tensors.keys() - specs.keys()
    if missing or unknown:
        raise ValueError(f"update without {sorted(missing)[:3]} and with unknown {sorted(unknown)[:3]}")
    for name, spec in specs.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype or tensor.device.type != device.type:
            raise ValueError(
                f"update of {name}: {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, "
                f"the engine has {spec.shape} {spec.dtype} on {device}"
            )


def sampled_before(version: int, requests: Iterable[Sequence[int]]) -> bool:
    """Whether the newest token of a request, given by the versions of its tokens, is of an older version."""
    return any(versions and versions[-1] < version for versions in requests)
