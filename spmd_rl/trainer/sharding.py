"""The policy as a module that turns packed tokens into log-probs, sharded by FSDP2.

Given a causal LM of `model/causal_lm.py`.  Promises: body and head run inside one forward of the sharded root, so tied
embeddings are gathered once and only the rows that are asked for go through the head.  Parameters keep the names
they have in the model.  Knows nothing of batches, losses or optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from spmd_rl.model.attention import spans, under
from spmd_rl.model.causal_lm import head, hidden_states, weight_dtypes
from spmd_rl.model.logprobs import token_logprobs
from spmd_rl.model.parts import body, decoder_layers
from spmd_rl.trainer.context_parallel import Part, num_dealt, split_hidden_states, together


class LogProbs(nn.Module):
    """Body, then chunked log-probs and entropies of chosen rows, and their values where there is a value head."""

    def __init__(
        self,
        model: PreTrainedModel,
        value_head: nn.Linear | None = None,
        context: ProcessGroup | None = None,  # ranks that share the tokens of a micro-batch
        head_dtype: torch.dtype | None = None,  # of logits and the products that they are made of; None: the model's
    ) -> None:
        super().__init__()
        self.model = model
        self.value_head = value_head
        self.context = context
        self.head_dtype = head_dtype

    def forward(
        self,
        token_ids: Tensor,  # [T] int64
        cu_seqlens: list[int],  # [n + 1]
        rows: Tensor,  # [N] int64, whose next token is the target
        targets: Tensor,  # [N] int64
        temperature: float,
        parents: Sequence[int] = (),  # [n], see attention.spans
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # [N] log-probs, [N] entropies, [N] values, float32
        assert not self.model.training, "dropout would make log-probs of another model"
        hidden, places = _rows(self.model, token_ids, cu_seqlens, parents, rows, self.context)
        mine = targets if places is None else targets[places]
        logprobs, entropy = token_logprobs(hidden, head(self.model, self.head_dtype), mine, temperature)
        values = None if self.value_head is None else _values(self.value_head, hidden)
        if self.context is not None and places is not None:
            logprobs, entropy = (together(x, places, len(rows), self.context) for x in (logprobs, entropy))
            values = None if values is None else together(values, places, len(rows), self.context)
        return logprobs, entropy, values

    def num_here(self, cu_seqlens: list[int], parents: Sequence[int] = ()) -> int:
        """Tokens of a micro-batch that this rank computes."""
        packed = spans(cu_seqlens, parents)
        return cu_seqlens[-1] if self.context is None else num_dealt(packed, self.context)


class Values(nn.Module):
    """A body of its own with a value head in place of the language model's."""

    def __init__(self, model: PreTrainedModel, value_head: nn.Linear, context: ProcessGroup | None = None) -> None:
        super().__init__()
        self.body = body(model)
        self.value_head = value_head
        self.context = context
        self._model = [model]  # in a list, so that its head is no part of this module

    @property
    def model(self) -> PreTrainedModel:
        return self._model[0]

    def forward(
        self, token_ids: Tensor, cu_seqlens: list[int], rows: Tensor, parents: Sequence[int] = ()
    ) -> Tensor:  # [N] float32
        hidden, places = _rows(self.model, token_ids, cu_seqlens, parents, rows, self.context)
        values = _values(self.value_head, hidden)
        if self.context is None or places is None:
            return values
        return together(values, places, len(rows), self.context)


def _rows(
    model: PreTrainedModel,
    token_ids: Tensor,
    cu_seqlens: list[int],
    parents: Sequence[int],
    rows: Tensor,
    context: ProcessGroup | None,
) -> tuple[Tensor, Tensor | None]:
    """Hidden states of the rows that this rank computes, and which of them those are (None: all)."""
    if context is None:
        return hidden_states(model, token_ids, cu_seqlens, parents).index_select(0, rows), None
    part = Part(spans(cu_seqlens, parents), context, token_ids.device)
    places, at = part.rows(rows)
    return split_hidden_states(model, token_ids, part).index_select(0, at), places


def _values(head: nn.Linear, hidden: Tensor) -> Tensor:  # [N, d] to [N] float32
    values: Tensor = head(hidden)
    return values.sum(1, dtype=torch.float32)  # over one column: FSDP warns of outputs that are views


def value_head(model: PreTrainedModel) -> nn.Linear:
    """Zeros, so that a critic starts by expecting nothing."""
    like = model.get_output_embeddings().weight
    values = nn.Linear(like.shape[1], 1, bias=False, device=like.device, dtype=like.dtype)
    nn.init.zeros_(values.weight)
    return values


def recompute_layers(model: PreTrainedModel) -> None:
    """Activation checkpointing of each decoder layer, in place; inside the layer's FSDP hooks, so gathered once."""
    for layer in decoder_layers(model):
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., object], *args: object, **kwargs: Any) -> object:  # what the layer takes
    return checkpoint(under(forward), *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def compute_in(root: LogProbs | Values, dtype: torch.dtype) -> None:
    """Forwards of a root that is not sharded run in `dtype`, as mixed precision of FSDP2 does; parameters stay as they
    are, and get their gradients.

    Not together with `recompute_layers`: a layer that is computed again is out of the forward.
    """
    kept = _kept(root.model, dtype)
    places = [
        (module, name, parameter)
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter not in kept
    ]

    def cast(*_: object) -> None:
        made = {id(p): p.to(dtype) for _, _, p in places}  # tied ones once
        for module, name, parameter in places:
            parameters: dict[str, Any] = module._parameters  # what a forward reads, a parameter or not
            parameters[name] = made[id(parameter)]

    def restore(*_: object) -> None:
        for module, name, parameter in places:
            module._parameters[name] = parameter

    root.register_forward_pre_hook(cast)
    root.register_forward_hook(restore, always_call=True)


def shard(
    policy: LogProbs | Values,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    cpu_offload: bool = False,
) -> None:
    """fully_shard on each decoder layer and on the root, in place.

    Parameters, gradients and their reduction stay in the model's dtype (float32); layers compute in `compute_dtype`,
    but with parameters that the architecture keeps in float32 (a router's) as they are.
    The root (embedding, head, last norm) stays gathered between forward and backward.  cpu_offload keeps shards,
    gradients and so the optimizer in host memory.
    """
    mesh = mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]
    master = next(policy.parameters()).dtype
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == master else compute_dtype,
        reduce_dtype=None if compute_dtype == master else master,
    )
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    split = partial(fully_shard, mesh=mesh, offload_policy=offload)
    kept = _kept_in_whole_modules(policy.model, compute_dtype)
    for module in list(policy.modules()):
        if kept.isdisjoint(module.parameters(recurse=False)):
            continue
        split(module, mp_policy=MixedPrecisionPolicy(), reshard_after_forward=reshard_after_forward)
    for layer in decoder_layers(policy.model):
        split(layer, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    split(policy, mp_policy=precision, reshard_after_forward=False)


def check_dtype(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """ValueError for a model of which a module has parameters of two types where it is computed in `dtype`."""
    _kept_in_whole_modules(model, dtype)


def _kept_in_whole_modules(model: PreTrainedModel, dtype: torch.dtype) -> set[nn.Parameter]:
    kept = _kept(model, dtype)
    for name, module in model.named_modules():
        own = set(module.parameters(recurse=False))
        if own & kept and own - kept:
            raise ValueError(f"model.dtype: only a part of {name} may be computed in {dtype}: use float32")
    return kept


def _kept(model: PreTrainedModel, dtype: torch.dtype) -> set[nn.Parameter]:
    """Parameters that a model of `dtype` has in another type; none where it is of that type already."""
    if all(p.dtype == dtype for p in model.parameters()):
        return set()
    types = weight_dtypes(model, dtype)
    return {p for name, p in model.named_parameters() if types.get(name, dtype) != dtype}


def reshard(policy: nn.Module) -> None:
    """Drop gathered parameters: a forward without backward leaves them behind, and the next would read stale ones."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
