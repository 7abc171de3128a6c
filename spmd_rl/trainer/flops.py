"""What a step costs and what the device could do: floating-point operations, the matrix-multiply peak, memory.

The peak is measured once, on this device with its idle neighbours or busy ones, so that a share of it means something
on any machine.  Knows nothing of ranks or losses.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from functools import cache, cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spmd_rl.model.attention import spans
from spmd_rl.model.causal_lm import head, kv_shape
from spmd_rl.model.parts import decoder_layers
from spmd_rl.model.routes import num_experts
from spmd_rl.trainer.experts import num_chosen
from spmd_rl.trainer.microbatch import MicroBatch


class Flops:
    """Of training steps of one model: the forward, twice that backward, but once through weights that are frozen.

    What is recomputed does not count.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        config = model.config.get_text_config()
        layers, _, dim = kv_shape(config)
        width = layers * dim * config.num_attention_heads if layers else 0  # of all queries of a token
        self.per_input = sum(map(_per_token, decoder_layers(model)))  # a token through the body
        self.per_row = _per_row(head(model).weight)  # a loss token through the head
        self.per_pair = 3 * 4 * width  # a query with a key that it sees
        self._device, self._dtype = device, dtype

    def of(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Stand-ins cost nothing that is asked for."""
        return sum(self._of(m) for m in micro_batches if not m.is_stand_in)

    def _of(self, micro: MicroBatch) -> float:
        lengths = [(s.end - s.start, s.position) for s in spans(micro.cu_seqlens, micro.parents)]
        pairs = sum(n * (n + 1) / 2 + n * before for n, before in lengths)
        return self.per_input * len(micro.token_ids) + self.per_row * len(micro.rows) + self.per_pair * pairs

    @cached_property
    def peak(self) -> float:
        """Operations per second of this rank's device in the precision of the step."""
        return matmul_peak(self._device, self._dtype)


def _per_token(layer: nn.Module) -> float:
    """Of a decoder layer, whose experts count as far as a token goes through them."""
    chosen = num_chosen(layer)
    total = 0.0
    for module in layer.modules():
        num = num_experts(module)
        share = min(1.0, chosen / num) if num and chosen else 1.0
        total += sum(_per_row(p) * share for p in module.parameters(recurse=False))
    return total


def _per_row(weight: Tensor) -> int:
    """Forward and backward of one row that is multiplied by a weight."""
    return 2 * weight.numel() * (3 if weight.requires_grad else 2)


@cache
def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The best of a few square multiplications; some 0.2 s."""
    cuda = device.type == "cuda"
    size = 8192 if cuda else 768
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        started = time.perf_counter()
        (a @ b).sum().item() if cuda else a @ b
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def peak_memory_bytes(device: torch.device) -> float:
    """Most that this process has held so far: of the device's memory, or on the CPU of all."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1.0 if sys.platform == "darwin" else 1024.0)
