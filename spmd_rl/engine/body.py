"""What turns tokens into hidden states and logits: the `transformers` modules of any architecture, or a shorter way.

A body takes the tensors of an update by name, as in `weights_of`: a tied head arrives once, as the embedding.
Knows nothing of versions, sequences or caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spmd_rl.engine.states import States
from spmd_rl.model.attention import Attend
from spmd_rl.model.causal_lm import head, run_body, run_rows
from spmd_rl.model.logprobs import Head
from spmd_rl.weights.layout import manifest, weights_of

W = TypeVar("W")  # what a body computes with


class Body(Protocol[W]):
    def prepare(self, tensors: Mapping[str, Tensor]) -> W:
        """For `load`: the tensors, which must stay as they are, or what is made of them; from any thread."""

    def load(self, weights: W) -> None:
        """Compute with what `prepare` gave, from now on."""

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend, states: States | None = None) -> Tensor:
        """[T], [T] -> hidden states [T, d] after the last norm.

        Of a model whose layers carry states the tokens are the first ones of one sequence, where its states are empty,
        or one more token of each of the T sequences that they are of.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, d] -> [n, V]."""

    @property
    def head(self) -> Head:
        """What `logits` computes."""


class Modules:
    """The modules themselves, their parameters and saved buffers pointed at the tensors of an update."""

    def __init__(self, model: PreTrainedModel, head_dtype: torch.dtype | None = None) -> None:
        """`head_dtype`: of logits and the products that they are made of; None: the weights'."""
        self._model, self._head_dtype = model, head_dtype
        self._places: dict[str, list[tuple[nn.Module, str]]] = {spec.name: [] for spec in manifest(model)}
        names = {id(tensor): name for name, tensor in weights_of(model).items()}
        for module in model.modules():
            for attribute, tensor in (module._parameters | module._buffers).items():
                if id(tensor) in names:
                    self._places[names[id(tensor)]].append((module, attribute))

    def prepare(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        for name, places in self._places.items():
            parameter = nn.Parameter(tensors[name].detach(), requires_grad=False)
            for module, attribute in places:
                if attribute in module._parameters:
                    module._parameters[attribute] = parameter
                else:
                    module._buffers[attribute] = tensors[name]
        made = head(self._model, self._head_dtype)
        weight, bias = made.cast(made.weight), None if made.bias is None else made.cast(made.bias)
        self._head = replace(made, weight=weight, bias=bias)

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend, states: States | None = None) -> Tensor:
        run = run_rows if states is not None and states.held else run_body
        return run(self._model, token_ids, positions, attend, states)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head.logits(hidden)

    @property
    def head(self) -> Head:
        return self._head
