"""Context parallelism: the tokens of one micro-batch split over a group of ranks that hold the same rollouts.

Each rank runs the body over its part of the packed tokens; keys and values of all parts are gathered in every layer, so
a sequence may be longer than one rank's memory for activations.  Log-probs are put together again, so that the loss
sees the whole micro-batch on every rank.  With n ranks every segment is cut into 2 n chunks, and a rank takes one from
the front and the one as far from the end (zigzag), so that all have the same number of keys to attend to.

Gradients: what a rank computes is its part, and the parts add up over the group.  Knows nothing of losses or FSDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from spmd_rl.model.attention import Rule, Span, causal_attention, token_positions
from spmd_rl.model.causal_lm import run_body

Piece = tuple[Span, int, int]  # tokens a … b of a span


def deal(packed: Sequence[Span], num: int) -> list[list[Piece]]:
    """The pieces of each of `num` ranks: of a span chunks r and 2 · num - 1 - r, r counted from another rank each time.

    Example: 8 tokens on two ranks are 0 1 6 7 and 2 3 4 5.
    """
    dealt: list[list[Piece]] = [[] for _ in range(num)]
    for i, span in enumerate(packed):
        cuts = [span.start + (span.end - span.start) * j // (2 * num) for j in range(2 * num + 1)]
        for j, (a, b) in enumerate(pairwise(cuts)):
            if b > a:
                dealt[(min(j, 2 * num - 1 - j) + i) % num].append((span, a, b))
    return dealt


def num_dealt(packed: Sequence[Span], group: ProcessGroup) -> int:
    """How many tokens this rank has of them."""
    return sum(b - a for _, a, b in deal(packed, group.size())[dist.get_rank(group)])


class Part:
    """This rank's tokens of T packed ones, filled up to the number of the rank with the most."""

    def __init__(self, packed: Sequence[Span], group: ProcessGroup, device: torch.device) -> None:
        self.group, self.spans = group, packed
        dealt = deal(packed, group.size())
        tokens = [np.concatenate([np.arange(a, b) for _, a, b in pieces] or [np.empty(0, int)]) for pieces in dealt]
        self.size = max(map(len, tokens))
        order = np.empty(sum(map(len, tokens)), np.int64)  # [T] where each is when the parts lie one after the other
        for rank, some in enumerate(tokens):
            order[some] = rank * self.size + np.arange(len(some))
        mine = dist.get_rank(group)
        self.pieces, self.num = dealt[mine], len(tokens[mine])
        self.order = torch.from_numpy(order).to(device)
        self.mine = torch.from_numpy(np.pad(tokens[mine], (0, self.size - self.num))).to(device)  # [size]
        self._first = mine * self.size

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the [N] rows, indices of packed tokens, are here, and where."""
        at = self.order[rows] - self._first
        places = torch.nonzero((at >= 0) & (at < self.size))[:, 0]
        return places, at[places]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        """Causal attention of these tokens to their sequences, wherever the keys are."""
        keys, values = self._gathered(k), self._gathered(v)
        outs, at = [], 0
        for span, a, b in self.pieces:
            mine = q[:, :, at : at + b - a]
            outs.append(causal_attention(mine, span.keys(keys, b), span.keys(values, b), rule).transpose(1, 2))
            at += b - a
        padding = q.new_zeros(1, self.size - self.num, q.shape[1], v.shape[3])
        # a rank without a token here has gradients all the same: FSDP reduces those of all ranks together
        return torch.cat([*outs, padding + 0 * (q.sum() + keys.sum() + values.sum())], 1)

    def _gathered(self, x: Tensor) -> Tensor:
        """The parts of all ranks, in the order of the tokens."""
        whole: Tensor = _Gathered.apply(x.contiguous(), self.group)  # type: ignore[no-untyped-call]  # torch has no types for it
        return whole.index_select(2, self.order)


def split_hidden_states(model: PreTrainedModel, token_ids: Tensor, part: Part) -> Tensor:  # [size, d]
    """Body of the model over this rank's tokens."""
    places = token_positions(part.spans, token_ids.device)
    return run_body(model, token_ids[part.mine], places[part.mine], part)


def together(values: Tensor, places: Tensor, num: int, group: ProcessGroup) -> Tensor:
    """[num], of which this rank has `values` at `places`; every place is some rank's."""
    whole: Tensor = _Together.apply(values, places, num, group)  # type: ignore[no-untyped-call]  # torch has no types for it
    return whole


class _Gathered(torch.autograd.Function):  # its ctx is Any: torch types nothing of what is kept on one
    """Parts of keys or values [1, H, size, D] of all ranks, in order; gradients come back to where they belong."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine, group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = [part.contiguous() for part in grad.chunk(ctx.group.size(), 2)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.group)
        return mine, None


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, num: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        whole = values.new_zeros(num)
        whole[places] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad[places], None, None, None  # the loss is the same on all ranks
