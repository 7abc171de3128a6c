"""What engines of every kind ask at an update: whether its tensors fit the model, and whom it overtakes.

Names are those of `weights_of`: a tied head arrives once, as the embedding.  Also the weights that a probe
swaps in before the true ones, so that what an engine keeps of them shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from spmd_rl.weights.layout import TensorSpec

DISTURBED = 2**31 - 1  # the version of disturbed weights: no run comes to it
DISTURBANCE = 2.0


def disturbed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights, those of norms and biases doubled (the smallest tensor's where there are none).

    Keys, values and states of every layer are then others, at the price of a copy of the vectors alone.
    """
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    vectors = {name for name, tensor in floats.items() if tensor.ndim == 1}
    chosen = vectors or {min(floats, key=lambda name: floats[name].numel())}
    return {name: tensor * DISTURBANCE if name in chosen else tensor for name, tensor in tensors.items()}


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
