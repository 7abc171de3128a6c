"""Replacing a model's parameters by the tensors of an update, without copying.

Names are those of `named_parameters()`: a tied head arrives once, as the embedding.  Knows nothing of versions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from spmd_rl.weight_layout import TensorSpec, manifest


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


class Weights:
    """The places of a model's parameters by name, and what must arrive for each."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._specs = {spec.name: spec for spec in manifest(model)}
        names = {id(p): name for name, p in model.named_parameters()}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self._specs}
        for module in model.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    self._places[names[id(parameter)]].append((module, attribute))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Point every parameter at its tensor."""
        check_update(tensors, self._specs, self._device)
        for name, places in self._places.items():
            parameter = nn.Parameter(tensors[name].detach(), requires_grad=False)
            for module, attribute in places:
                module._parameters[attribute] = parameter
