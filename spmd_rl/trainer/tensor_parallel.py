"""Tensor parallelism for the Llama and Qwen family: heads, hidden units and vocabulary split over the axis "tp".

Given a whole causal LM, equal on all ranks of the axis; splits it in place by torch's parallelize_module.  Promises:
activations between layers are whole and equal on all ranks of the axis, so whatever comes after need not know; only the
head does (its rows are this rank's part of the vocabulary).  Knows nothing of FSDP, losses or batches.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from spmd_rl.model.parts import decoder_layers

LAYER: dict[str, Callable[[], ParallelStyle]] = {
    "self_attn.q_proj": ColwiseParallel,
    "self_attn.k_proj": ColwiseParallel,
    "self_attn.v_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}
NORMS = ("self_attn.q_norm", "self_attn.k_norm")  # over one head: each rank has its heads' part of the gradient
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def check_split(model: PreTrainedModel, num: int) -> None:
    """ValueError for a model that cannot be split over `num` ranks."""
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        raise ValueError(f"tensor parallelism: {config.model_type} is not one of {', '.join(FAMILIES)}")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % num:
            raise ValueError(f"tensor parallelism over {num} ranks does not divide {name} = {getattr(config, name)}")


def parallelize(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split `model` over the one axis of `mesh`.  ValueError for what cannot be split."""
    check_split(model, mesh.size())
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for layer in decoder_layers(model):
        plan: dict[str, ParallelStyle] = {name: style() for name, style in LAYER.items()}
        plan |= {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in NORMS if _has(layer, name)}
        parallelize_module(layer, mesh, plan)
    body, head = model.base_model, model.get_output_embeddings()
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(body, mesh, {"embed_tokens": embedding})
    split = model.get_input_embeddings().weight
    head.weight = split if tied else nn.Parameter(distribute_tensor(head.weight, mesh, [Shard(0)]))


def _has(layer: nn.Module, name: str) -> bool:
    parent, _, last = name.rpartition(".")
    return hasattr(layer.get_submodule(parent), last)
