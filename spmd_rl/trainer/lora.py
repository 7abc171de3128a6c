"""LoRA (Hu et al. 2021, arXiv:2106.09685): a frozen model with trained low-rank additions, merged for whoever asks.

Given a causal LM; replaces the chosen linear layers in place.  Promises: parameters of the model keep their names, the
additions are beside them as `lora_a` and `lora_b`; at the start they add exactly 0.  The merged weight is
W + (alpha / rank) · B A.  Knows nothing of losses or shards.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from spmd_rl.folders import written_aside


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """What is added where."""

    rank: int
    alpha: float  # the addition is scaled by alpha / rank
    targets: Sequence[str]  # last parts of the names of linear layers, such as "q_proj"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LoraLinear(nn.Linear):
    """A linear layer's weight, frozen, and its addition."""

    def __init__(self, linear: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = lora.scale
        like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.lora_a = nn.Parameter(torch.empty(lora.rank, linear.in_features, **like))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, lora.rank, **like))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_lora(model: nn.Module, lora: Lora, seed: int = 0) -> None:
    """Freeze the model and put additions beside its targets, equal on all ranks for one seed."""
    model.requires_grad_(False)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in lora.targets
    }
    missing = set(lora.targets) - {name.rpartition(".")[2] for name in layers}
    if missing:
        have = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ValueError(f"lora.targets {sorted(missing)}: no such linear layers; the model has {', '.join(have)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, layer in layers.items():
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, LoraLinear(layer, lora))


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """By name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def merged(layer: LoraLinear, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Rows of W + scale · B A, from the same rows of W and B and the whole of A."""
    return torch.addmm(weight, b, a, alpha=layer.scale)


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], lora: Lora, base: str) -> None:
    """A folder that PEFT loads: `tensors` by layer name + ".lora_a" and ".lora_b", whole."""
    names = {"lora_a": "lora_A", "lora_b": "lora_B"}
    state = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        state[f"base_model.model.{layer}.{names[part]}.weight"] = tensor.contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with written_aside(folder) as aside:
        save_file(state, aside / "adapter_model.safetensors", {"format": "pt"})
        (aside / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if folder.exists():  # of an earlier end of the same run
            shutil.rmtree(folder)
