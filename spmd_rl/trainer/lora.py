"""LoRA (Hu et al. 2021, arXiv:2106.09685): a frozen model with trained low-rank additions, merged for whoever asks.

Given a causal LM, its layers perhaps split over ranks; turns the chosen linear layers into ones with additions.
Promises: parameters of the model keep their names, the additions are beside them as `lora_a` and `lora_b`; at the start
they add exactly 0.  The merged weight is that of weights/low_rank.py.  Knows nothing of losses or FSDP.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers import PreTrainedModel

from spmd_rl.config.settings import Lora as Settings
from spmd_rl.files import tensor_file
from spmd_rl.files.atomic_folder import written_aside
from spmd_rl.model.routes import expert_layers
from spmd_rl.weights.low_rank import Lora

DEFAULT = Settings().targets
EXPERTS = {"gate_proj", "up_proj", "down_proj"}  # of those, what an MLP of experts has in another form


class LoraLinear(nn.Linear):
    """A linear layer's weight, frozen, and its addition."""

    def __init__(self, linear: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(linear.__dict__)  # its parameters, and the hooks that split it over ranks
        self.scale = lora.scale
        device, dtype = linear.weight.device, linear.weight.dtype
        a = torch.empty(lora.rank, linear.in_features, device=device, dtype=dtype)
        b = torch.zeros(linear.out_features, lora.rank, device=device, dtype=dtype)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5))
        self.lora_a = nn.Parameter(_split_like(linear.weight, a, dim=1))
        self.lora_b = nn.Parameter(_split_like(linear.weight, b, dim=0))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def check_targets(model: PreTrainedModel, targets: Sequence[str]) -> None:
    """ValueError, with what to write, for targets that are no linear layers of the model's body.

    Of the default, what only experts have may be missing: their weights are no linear layers.
    """
    have = {n.rpartition(".")[2] for n, m in model.base_model.named_modules() if _is_linear(m)}
    experts = expert_layers(model)
    missing = set(targets) - have
    if not targets or missing - (EXPERTS if experts and tuple(targets) == DEFAULT else set()):
        shapes = sorted({name for module in experts for name, p in module.named_parameters() if p.ndim == 3})
        hint = f"; experts ({', '.join(shapes)}) are no linear layers, and are not trained by LoRA" if experts else ""
        raise ValueError(
            f"lora.targets = {sorted(missing)}: no such linear layers; the model has {', '.join(sorted(have))}{hint}"
        )


def _is_linear(module: nn.Module) -> bool:
    """And computes nothing else, as a router that is one may."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def add_lora(model: PreTrainedModel, lora: Lora, seed: int = 0) -> None:
    """Freeze the model and put additions beside its targets, equal on all ranks for one seed."""
    check_targets(model, lora.targets)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, layer in list(model.base_model.named_modules()):
            parent, _, last = name.rpartition(".")
            if _is_linear(layer) and last in lora.targets:
                setattr(model.base_model.get_submodule(parent), last, LoraLinear(layer, lora))


def lora_layers(model: PreTrainedModel) -> dict[str, LoraLinear]:
    """By name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def _split_like(weight: Tensor, tensor: Tensor, *, dim: int) -> Tensor:
    """A tensor that has `dim` in common with `weight`, split over the same ranks along it."""
    if not isinstance(weight, DTensor):
        return tensor
    places = [place if place.is_shard(dim) else Replicate() for place in weight.placements]
    return distribute_tensor(tensor, weight.device_mesh, places)


def write_adapter(
    folder: Path, tensors: Mapping[str, Tensor], lora: Lora, base: Path, inside: str | None = None
) -> None:
    """A folder that PEFT loads: `tensors` by layer name + ".lora_a" and ".lora_b", whole.

    `inside`: what the layers' names begin with in a multimodal model, whose text part alone has additions.
    """
    names = {"lora_a": "lora_A", "lora_b": "lora_B"}
    state = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        layer = layer if inside is None else inside + layer.partition(".")[2]
        state[f"base_model.model.{layer}.{names[part]}.weight"] = tensor.contiguous()
    targets = sorted({name.split(".")[-2] for name in tensors})  # others may mean experts to PEFT
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": targets if inside is None else rf"{re.escape(inside)}.*\.({'|'.join(targets)})",
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with written_aside(folder, replace=True) as aside:
        tensor_file.write(state, aside / "adapter_model.safetensors", {"format": "pt"})
        (aside / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
