"""What LoRA adds to which weights, for whoever trains it, sends it or merges it.

A chosen weight W [out, in] becomes W + (alpha / rank) · B A.  A [rank, in] and B [out, rank] are float32 and named
after W's layer: `layer.lora_a`, `layer.lora_b` beside `layer.weight`.  Pure: knows nothing of modules or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.weights.layout import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """What is added where."""

    rank: int
    alpha: float  # the addition is scaled by alpha / rank
    targets: Sequence[str]  # last parts of the names of linear layers, such as "q_proj"

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def chosen(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """The weights with an addition."""
        chosen = {f"{target}.weight" for target in self.targets}
        return [spec for spec in specs if ".".join(spec.name.split(".")[-2:]) in chosen]

    def additions(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        """A and B of each of them."""
        made = []
        for spec in self.chosen(specs):
            layer, (num_out, num_in) = spec.name.removesuffix(".weight"), spec.shape
            made.append(TensorSpec(f"{layer}.lora_a", (self.rank, num_in), torch.float32))
            made.append(TensorSpec(f"{layer}.lora_b", (num_out, self.rank), torch.float32))
        return made


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Rows of W + scale · B A, float32, from the same rows of W and B and the whole of A.

    The last bit of a row may depend on which rows are computed together, so whoever wants equal bits cuts alike.
    """
    return torch.addmm(weight, b, a, alpha=scale)
