"""Replacing a model's parameters by the tensors of an update, without copying.

Names are those of `named_parameters()`: a tied head arrives once, as the embedding.  Knows nothing of versions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Weights:
    """The places of a model's parameters by name, and what must arrive for each."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._specs = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
        names = {id(p): name for name, p in model.named_parameters()}
        self._places: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in self._specs}
        for module in model.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    self._places[names[id(parameter)]].append((module, attribute))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Point every parameter at its tensor; ValueError if names, shapes, types or devices are not the model's."""
        missing, unknown = self._specs.keys() - tensors.keys(), tensors.keys() - self._specs.keys()
        if missing or unknown:
            raise ValueError(f"update without {sorted(missing)[:3]} and with unknown {sorted(unknown)[:3]}")
        for name, (shape, dtype) in self._specs.items():
            tensor = tensors[name]
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device.type != self._device.type:
                raise ValueError(
                    f"update of {name}: {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, "
                    f"the engine has {shape} {dtype} on {self._device}"
                )
        for name, places in self._places.items():
            parameter = nn.Parameter(tensors[name].detach(), requires_grad=False)
            for module, attribute in places:
                module._parameters[attribute] = parameter
