"""The policy as a module that turns packed tokens into log-probs, sharded by FSDP2.

Given a causal LM of `spmd_rl.model`.  Promises: body and head run inside one forward of the sharded root, so tied
embeddings are gathered once and only the rows that are asked for go through the head.  Parameters keep the names
they have in the model.  Knows nothing of batches, losses or optimizers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from spmd_rl.model import head_weight, hidden_states, token_logprobs


class LogProbs(nn.Module):
    """Body, then chunked log-probs and entropies of chosen rows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        token_ids: Tensor,  # [T] int64
        cu_seqlens: list[int],  # [n + 1]
        rows: Tensor,  # [N] int64, whose next token is the target
        targets: Tensor,  # [N] int64
        temperature: float,
    ) -> tuple[Tensor, Tensor]:  # [N] log-probs, [N] entropies, float32
        hidden = hidden_states(self.model, token_ids, cu_seqlens)
        return token_logprobs(hidden.index_select(0, rows), head_weight(self.model), targets, temperature)


def recompute_layers(model: nn.Module) -> None:
    """Activation checkpointing of each decoder layer, in place; inside the layer's FSDP hooks, so gathered once."""
    for layer in model.base_model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def shard(policy: LogProbs, mesh: DeviceMesh, *, compute_dtype: torch.dtype, reshard_after_forward: bool) -> None:
    """fully_shard on each decoder layer and on the root, in place.

    Parameters, gradients and their reduction stay in the model's dtype (float32); layers compute in `compute_dtype`.
    The root (embedding, head, last norm) stays gathered between forward and backward.
    """
    if mesh["dp_replicate"].size() == 1:
        mesh = mesh["dp_shard"]
    master = next(policy.parameters()).dtype
    precision = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == master else compute_dtype,
        reduce_dtype=None if compute_dtype == master else master,
    )
    for layer in policy.model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=False)


def reshard(policy: nn.Module) -> None:
    """Drop gathered parameters: a forward without backward leaves them behind, and the next would read stale ones."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
