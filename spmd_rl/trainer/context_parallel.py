"""Context parallelism: the tokens of one micro-batch split over a group of ranks that hold the same rollouts.

Each rank runs the body over its stretch of the packed tokens; keys and values of all stretches are gathered in every
layer, so a sequence may be longer than one rank's memory for activations.  Log-probs are put together again, so that
the loss sees the whole micro-batch on every rank.  Stretches are equal in tokens: with one long causal sequence the
last rank has the most attention to compute.

Gradients: what a rank computes is its part, and the parts add up over the group.  Knows nothing of losses or FSDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from spmd_rl.model import causal_attention, run_body


class Stretch:
    """This rank's tokens: first … first + num of the T packed ones, then padding up to an equal size."""

    def __init__(self, num_tokens: int, group: ProcessGroup) -> None:
        self.group, self.num_tokens = group, num_tokens
        self.size = -(-num_tokens // group.size())
        self.first = min(dist.get_rank(group) * self.size, num_tokens)
        self.num = min(self.size, num_tokens - self.first)

    def mine(self, tokens: Tensor) -> Tensor:  # [T] to [size]
        padded = tokens.new_zeros(self.size)
        padded[: self.num] = tokens[self.first : self.first + self.num]
        return padded

    def rows(self, rows: Tensor) -> Tensor:
        """Which of the [N] rows, indices of tokens, are here."""
        return torch.nonzero((rows >= self.first) & (rows < self.first + self.num))[:, 0]


class SplitSegments:
    """Causal attention of one stretch to the sequences packed at cu_seqlens, wherever their keys are."""

    def __init__(self, cu_seqlens: Sequence[int], stretch: Stretch) -> None:
        self.stretch = stretch
        first, end = stretch.first, stretch.first + stretch.num
        self.parts = [(a, max(a, first), min(b, end)) for a, b in pairwise(cu_seqlens) if max(a, first) < min(b, end)]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        keys, values = (_Gathered.apply(x.contiguous(), self.stretch.group) for x in (k, v))
        first = self.stretch.first
        outs = [
            causal_attention(
                q[:, :, a - first : b - first],
                keys[:, :, start:b],
                values[:, :, start:b],
                scale=scale,
                window=window,
                softcap=softcap,
            ).transpose(1, 2)
            for start, a, b in self.parts
        ]
        padding = q.new_zeros(1, self.stretch.size - self.stretch.num, q.shape[1], v.shape[3])
        return torch.cat([*outs, padding + 0 * (keys.sum() + values.sum())], 1)


def split_hidden_states(
    model: nn.Module, token_ids: Tensor, cu_seqlens: Sequence[int], stretch: Stretch
) -> Tensor:  # [size, d]
    """Body of the model over this rank's stretch."""
    lengths = [b - a for a, b in pairwise(cu_seqlens)]
    positions = torch.cat([torch.arange(n, device=token_ids.device) for n in lengths])
    return run_body(model, stretch.mine(token_ids), stretch.mine(positions), SplitSegments(cu_seqlens, stretch))


def together(values: Tensor, places: Tensor, num: int, group: ProcessGroup) -> Tensor:
    """[num], of which this rank has `values` at `places`; every place is some rank's."""
    return _Together.apply(values, places, num, group)


class _Gathered(torch.autograd.Function):
    """Stretches of keys or values [1, H, size, D] of all ranks, in order; gradients come back to where they belong."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, mine: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine, group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        parts = [part.contiguous() for part in grad.chunk(ctx.group.size(), 2)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.group)
        return mine, None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, values: Tensor, places: Tensor, num: int, group: ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(num)
        whole[places] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None  # the loss is the same on all ranks
