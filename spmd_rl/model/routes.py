"""The modules of a model that hold experts, and to which of them a forward sent its tokens.

Knows nothing of routers' losses, batches or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spmd_rl.model.parts import decoder_layers

NO_CHOICES = np.empty((0, 0), np.int16)  # of no token


def expert_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that hold experts, in the order of layers; none in a dense model."""
    return [module for layer in decoder_layers(model) for module in layer.modules() if num_experts(module)]


def num_experts(module: nn.Module) -> int:
    """Of a module whose own weights are those of several experts, [experts, …, …]; else 0."""
    num = getattr(module, "num_experts", 0)
    return num if any(p.ndim == 3 and p.shape[0] == num for p in module.parameters(recurse=False)) else 0


@contextmanager
def choices(layers: list[nn.Module]) -> Iterator[list[Tensor]]:
    """In the block: the experts of each token, [T, k] a layer and forward, as they are called."""
    seen: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if len(args) == 3:  # hidden states, experts, their weights
            seen.append(args[1].detach())

    hooks = [layer.register_forward_pre_hook(see) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def sorted_choices(seen: list[Tensor], num_layers: int, length: int) -> np.ndarray:  # [length, layers · k] int16
    """Of one forward, each token's choices of a layer in order of expert, layer by layer; -1 after its last token.

    Empty, [length, 0], where not every layer was seen.
    """
    if not seen or len(seen) != num_layers:
        return np.empty((length, 0), np.int16)
    chosen = torch.cat([of_layer.sort(-1).values for of_layer in seen], -1).to(torch.int16).cpu().numpy()
    rows = np.full((length, chosen.shape[1]), -1, np.int16)
    rows[: len(chosen)] = chosen[:length]
    return rows
