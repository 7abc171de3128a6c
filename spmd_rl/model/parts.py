"""Where a causal LM of any architecture keeps its body and the list of its layers.

Knows nothing of what they compute.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def body(model: PreTrainedModel) -> nn.Module:
    """All but the head: token ids in, hidden states after the last norm out."""
    if model.base_model is not model:
        return model.base_model
    return next(child for child in model.children() if isinstance(child, PreTrainedModel))  # not by the name it says


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """What hidden states go through one after the other."""
    num = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in body(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == num:
            return module
    raise ValueError(f"{type(model).__name__}: has no list of its {num or 'decoder'} layers")
