"""Attention of packed sequences, each kept to itself, for every architecture of `transformers`.

A model's attention layers call the `Attend` object that the caller passes along with the forward: `Segments` for packed
sequences here, the engine's cache elsewhere.  The object travels as a keyword argument through every layer, so two
models never share state and activation checkpointing finds it again in whatever thread runs the backward.
Promises: a packed forward equals the forwards of its sequences one by one.  Knows nothing of models, ranks or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

ATTENTION = "spmd_varlen"


class Attend(Protocol):
    """Attention of one layer over one forward's tokens."""

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [1, H, T, D]
        k: Tensor,  # [1, H_kv, T, D]
        v: Tensor,  # [1, H_kv, T, D]
        *,
        scale: float,
        window: int | None,  # a token sees itself and the window - 1 tokens before it; None = all before it
        softcap: float | None,
    ) -> Tensor:  # [1, T, H, D]
        ...


class Span(NamedTuple):
    """Tokens start … end of a packed forward; they go on from tokens first … last (from nothing where first = last).

    Example: 5 tokens of a prompt and 2 and 3 of two replies to it are (0, 5, 0, 0), (5, 7, 0, 5) and (7, 10, 0, 5).
    """

    start: int
    end: int
    first: int
    last: int

    @property
    def position(self) -> int:
        """Of its first token in the sequence."""
        return self.last - self.first

    def keys(self, x: Tensor, end: int | None = None) -> Tensor:  # [1, H, T, D] to [1, H, K, D]
        """What its last token, or the one before `end`, sees of x."""
        own = x[:, :, self.start : self.end if end is None else end]
        return torch.cat([x[:, :, self.first : self.last], own], 2) if self.position else own


def spans(cu_seqlens: Sequence[int], parents: Sequence[int] = ()) -> list[Span]:
    """Of packed segments, of which segment j goes on from segment parents[j] (itself: from nothing; (): all do)."""
    bounds = list(pairwise(map(int, cu_seqlens)))
    packed = []
    for j, ((a, b), parent) in enumerate(zip(bounds, parents or range(len(bounds)), strict=True)):
        first, last = bounds[parent] if parent != j else (a, a)
        packed.append(Span(a, b, first, last))
    return [span for span in packed if span.end > span.start]


def token_positions(packed: Sequence[Span], device: torch.device) -> Tensor:  # [T] int64
    """Of each token in its sequence."""
    return torch.cat([torch.arange(s.position, s.position + s.end - s.start, device=device) for s in packed])


class Segments:
    """Causal attention within packed sequences, whose starts may be shared; on CPU a loop of SDPA calls."""

    def __init__(self, cu_seqlens: Sequence[int], parents: Sequence[int] = ()) -> None:
        self.spans = spans(cu_seqlens, parents)
        self._on_device: tuple[Tensor, ...] = ()

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and _has_flash_attn():
            return self._flash(q, k, v, scale, window, softcap)
        outs = [
            causal_attention(
                q[:, :, s.start : s.end], s.keys(k), s.keys(v), scale=scale, window=window, softcap=softcap
            ).transpose(1, 2)
            for s in self.spans
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _flash(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Keys of a shared start are repeated for each that goes on from it; queries are the last of their keys."""
        from flash_attn import flash_attn_varlen_func

        queries = [s.end - s.start for s in self.spans]
        keys = [n + s.position for n, s in zip(queries, self.spans, strict=True)]
        if not self._on_device:
            where = [torch.cat([torch.arange(s.first, s.last), torch.arange(s.start, s.end)]) for s in self.spans]
            sums = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (queries, keys)]
            self._on_device = tuple(x.to(q.device) for x in (torch.cat(where), *sums))
        where, cu_queries, cu_keys = self._on_device
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        if keys != queries:
            k, v = k.index_select(0, where), v.index_select(0, where)
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_queries,
            cu_keys,
            max(queries),
            max(keys),
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
        )
        return out[None]


@cache
def _has_flash_attn() -> bool:
    return find_spec("flash_attn") is not None


def causal_attention(
    q: Tensor,  # [1, H, Q, D], the last Q of the K positions
    k: Tensor,  # [1, H_kv, K, D]
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # [1, H, Q, D]
    """Attention of the last Q positions of one sequence to itself and what came before."""
    num_q, num_k = q.shape[2], k.shape[2]
    banded = window is not None and num_k > window
    mask = None
    if banded or softcap is not None or 1 < num_q < num_k:
        row = torch.arange(num_k - num_q, num_k, device=q.device)[:, None]
        col = torch.arange(num_k, device=q.device)
        mask = col <= row
        if banded:
            mask &= col > row - window
    if softcap is None:
        causal = mask is None and num_q > 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * scale
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v.repeat_interleave(groups, 1)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    attend: Attend | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; `attend` is the keyword that came with the forward."""
    name = type(module).__name__
    if attend is None:
        raise ValueError(f"{name}: forward without `attend=`: call model.hidden_states, not the model itself")
    if attention_mask is not None or dropout or others.get("s_aux") is not None:
        raise ValueError(f"{name}: masks, attention dropout and attention sinks are not supported by {ATTENTION}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attend(module.layer_idx, query, key, value, scale=scale, window=sliding_window, softcap=softcap), None


def _no_mask(*_: object, **__: object) -> None:
    return None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _no_mask)
