"""The routers of a model of experts in training: their load, and the loss that spreads tokens over experts.

Given a causal LM of causal_lm.py, sharded or not.  The auxiliary loss is that of Switch Transformer (Fedus et al.
2021, arXiv:2101.03961, equations 4 to 6) in the form that transformers has it in (`load_balancing_loss_func`): with E
experts, N rows (tokens of all layers with experts, one after the other), F_e of the k choices of all rows for expert e
and the probability p_e of each row,

    aux = E · Σ_e (F_e / N) · (Σ_rows p_e / N)

where F has no gradient.  Knows nothing of batches, other losses or ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spmd_rl.model.parts import decoder_layers
from spmd_rl.model.routes import choices, expert_layers, num_experts


def num_chosen(layer: nn.Module) -> int:
    """Experts that a token of a decoder layer goes through, as its router says; 0 where there is no router."""
    numbers = (getattr(module, "top_k", None) for module in layer.modules())
    return next((num for num in numbers if isinstance(num, int)), 0)


def check_router_loss(model: PreTrainedModel) -> None:
    """ValueError for a model that transformers has no auxiliary loss for."""
    if not _routers(model) or not hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"):
        kind = model.config.get_text_config().model_type
        raise ValueError(f"trainer.router_aux_coef: transformers has no router loss for {kind}: set it to 0")


def _routers(model: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """Each router, and which of its outputs are the logits, as the architecture says."""
    recorders = getattr(model.base_model, "_can_record_outputs", None) or {}
    said = recorders.get("router_logits", [])
    said = said if isinstance(said, list | tuple) else [said]
    return [
        (module, one.index)
        for layer in decoder_layers(model)
        for name, module in layer.named_modules()
        for one in said
        if isinstance(module, one.target_class) and (one.layer_name or "") in name
    ]


@dataclass(frozen=True, slots=True)
class Routed:
    """What the routers of one forward did with its tokens, padding included."""

    logits: list[Tensor]  # [T, E] of each layer, with gradient
    chosen: list[Tensor]  # [T, k] of each layer, experts


class Routing:
    """Sees the routers and experts of a model at work, in forwards that are watched."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.experts = expert_layers(model)
        layers = [layer for layer in decoder_layers(model) if any(map(num_experts, layer.modules()))]
        self.top_k = num_chosen(layers[0]) if layers else 0
        self.num_experts = num_experts(self.experts[0]) if self.experts else 0
        self._routers = _routers(model)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers with experts, experts of each."""
        return len(self.experts), self.num_experts

    @contextmanager
    def watched(self) -> Iterator[Routed]:
        """A forward; what is recomputed for its backward later is not seen again."""
        logits: list[Tensor] = []
        hooks = [
            module.register_forward_hook(
                lambda _, __, out, index=index: logits.append(out[index] if isinstance(out, tuple) else out)
            )
            for module, index in self._routers
        ]
        try:
            with choices(self.experts) as chosen:
                yield Routed(logits, chosen)
        finally:
            for hook in hooks:
                hook.remove()

    def nothing(self, device: torch.device) -> Tensor:
        """`balance` of no tokens."""
        return torch.zeros(2, self.num_experts + 1, dtype=torch.float64, device=device)

    def load(self, routed: Routed, num_tokens: int) -> Tensor:  # [layers, E] float64
        """How many of the first `num_tokens` tokens went to each expert."""
        layers, num = self.shape
        device = routed.chosen[0].device if routed.chosen else None
        load = torch.zeros(layers, num + 1, dtype=torch.float64, device=device)  # the last: experts without weights
        for of_layer, chosen in zip(load, routed.chosen, strict=False):
            experts = chosen[:num_tokens].flatten().long().clamp(max=num)
            of_layer.scatter_add_(0, experts, torch.ones_like(experts, dtype=torch.float64))
        return load[:, :num]

    def balance(self, routed: Routed, num_tokens: int) -> Tensor:  # [2, E + 1] float64, with gradient in [1, :E]
        """F and Σ p of the auxiliary loss over the first `num_tokens` tokens, and the number of rows behind each."""
        sums = [_balance(logits.flatten(0, -2)[:num_tokens], self.top_k) for logits in routed.logits]
        return torch.stack(sums).sum(0)


def _balance(logits: Tensor, top_k: int) -> Tensor:
    probabilities = logits.float().softmax(-1)
    counts = torch.zeros_like(probabilities).scatter_(1, probabilities.detach().topk(top_k, -1).indices, 1.0)
    rows = probabilities.new_full((2, 1), len(logits), dtype=torch.float64)
    return torch.cat([torch.stack([counts, probabilities]).sum(1, dtype=torch.float64), rows], 1)


def auxiliary_loss(total: Tensor, part: Tensor | None = None) -> Tensor:  # [] float64
    """Of the `balance` of all tokens; with `part`, what the tokens behind it add, with gradient where it has one."""
    (counts, probabilities), rows = total.detach()[:, :-1], total[0, -1].detach()
    if part is not None:
        probabilities = part[1, :-1]
    loss: Tensor = len(counts) * (counts * probabilities).sum() / rows.square()
    return loss
