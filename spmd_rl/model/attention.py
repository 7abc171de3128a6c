"""Attention of packed sequences, each kept to itself, for every architecture of `transformers`.

A model's attention layers call the `Attend` object under which its forward runs: `Segments` for packed sequences here,
the engine's cache elsewhere.  It is a context variable, for some architectures pass no keyword through their layers and
some pass every keyword on to kernels.  Two threads never share it, and what runs a layer again in a backward runs it
`under` the object of its forward.
Promises: a packed forward equals the forwards of its sequences one by one.  Knows nothing of models, ranks or engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function

ATTENTION = "spmd_varlen"

P = ParamSpec("P")
T = TypeVar("T")


_ATTEND: ContextVar[Attend | None] = ContextVar("attend", default=None)


@contextmanager
def attending(attend: Attend | None) -> Iterator[None]:
    """Forwards in this block attend so."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def under(function: Callable[P, T]) -> Callable[P, T]:
    """The same function, called as if in the block that this is called in, from any thread."""
    attend = _ATTEND.get()

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with attending(attend):
            return function(*args, **kwargs)

    return call


class Rule(NamedTuple):
    """What a token of one layer sees, and how scores q·k become weights."""

    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None = all before it
    chunk: int | None = None  # and of these only those whose position divided by the chunk is as its own
    softcap: float | None = None  # scores are softcap · tanh(score / softcap)
    sinks: Tensor | None = None  # [H], one more score in the softmax, whose weight goes nowhere

    def oldest(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        first = 0 if self.window is None else max(0, position + 1 - self.window)
        return first if self.chunk is None else max(first, position // self.chunk * self.chunk)

    def hidden(self, row: Tensor, col: Tensor) -> Tensor:
        """Bool, True where the token at position `row` does not see that at `col`; the two broadcast."""
        hidden = col > row
        if self.window is not None:
            hidden |= col <= row - self.window
        if self.chunk is not None:
            hidden |= col // self.chunk != row // self.chunk
        return hidden


class Attend(Protocol):
    """Attention of one layer over one forward's tokens."""

    def __call__(
        self,
        layer: int,
        q: Tensor,  # [1, H, T, D]
        k: Tensor,  # [1, H_kv, T, D]
        v: Tensor,  # [1, H_kv, T, D]
        rule: Rule,
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

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        low = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
        if low and rule.chunk is None and rule.sinks is None and _has_flash_attn():
            return self._flash(q, k, v, rule)
        outs = [
            causal_attention(q[:, :, s.start : s.end], s.keys(k), s.keys(v), rule).transpose(1, 2) for s in self.spans
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        """Keys of a shared start are repeated for each that goes on from it; queries are the last of their keys."""
        from flash_attn import flash_attn_varlen_func

        queries = [s.end - s.start for s in self.spans]
        keys = [n + s.position for n, s in zip(queries, self.spans, strict=True)]
        if not self._on_device:
            seen = [torch.cat([torch.arange(s.first, s.last), torch.arange(s.start, s.end)]) for s in self.spans]
            sums = [torch.tensor([0, *accumulate(n)], dtype=torch.int32) for n in (queries, keys)]
            self._on_device = tuple(x.to(q.device) for x in (torch.cat(seen), *sums))
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
            softmax_scale=rule.scale,
            causal=True,
            window_size=(-1, -1) if rule.window is None else (rule.window - 1, 0),
            softcap=rule.softcap or 0.0,
        )
        batch: Tensor = out[None]
        return batch


@cache
def _has_flash_attn() -> bool:
    return find_spec("flash_attn") is not None


class ByRow:
    """`Attend` of layers whose tokens lie in n rows of one, as [n, H, 1, D]: a step of n sequences."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:  # [n, 1, H, D]
        return self._attend(layer, q.transpose(0, 2), k.transpose(0, 2), v.transpose(0, 2), rule).transpose(0, 1)


def causal_attention(
    q: Tensor,  # [1, H, Q, D], the last Q of the K positions
    k: Tensor,  # [1, H_kv, K, D]
    v: Tensor,
    rule: Rule,
) -> Tensor:  # [1, H, Q, D]
    """Attention of the last Q positions of one sequence to itself and what came before."""
    num_q, num_k = q.shape[2], k.shape[2]
    near = min(rule.window or num_k, rule.chunk or num_k)  # that far back all is seen
    plain = rule.softcap is None and rule.sinks is None
    hidden = None
    if num_k > near or not plain or 1 < num_q < num_k:
        row = torch.arange(num_k - num_q, num_k, device=q.device)[:, None]
        hidden = rule.hidden(row, torch.arange(num_k, device=q.device))
    if plain:
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if hidden is None else ~hidden,
            is_causal=hidden is None and num_q > 1,
            scale=rule.scale,
            enable_gqa=True,
        )
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    assert hidden is not None  # it is made wherever the rule is not plain
    scores = scores.masked_fill(hidden, float("-inf"))
    if rule.sinks is not None:
        scores = torch.cat([scores, rule.sinks.to(scores.dtype)[None, :, None, None].expand(1, -1, num_q, 1)], 3)
    weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, q.dtype)).to(q.dtype)
    return weights[..., :num_k] @ v.repeat_interleave(groups, 1)


@dataclass(frozen=True, slots=True)
class Mask:
    """What an architecture asks of its attention mask beside causality, in place of a tensor."""

    window: int | None = None
    chunk: int | None = None


def _mask(
    *,
    config: PretrainedConfig,
    mask_function: Callable[..., object],
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: object,
) -> Mask | None:  # None: causal, and no more
    """What transformers makes masks with.  ValueError for one that no `Mask` describes."""
    if use_vmap or not getattr(config, "is_causal", True) or mask_function is bidirectional_mask_function:
        raise ValueError(
            f"{config.model_type}: an attention mask that is not causal, or one of its own, is not supported"
        )
    if local_size is None:
        return None
    chunked = getattr(config, "attention_chunk_size", None) == local_size
    return Mask(chunk=local_size) if chunked else Mask(window=local_size)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # attention sinks
    **_: object,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer.

    The mask says what a token sees, as it does for transformers' own attention: the keyword `sliding_window`, which
    some architectures leave out and some pass where the mask has no window, is for kernels without masks.
    """
    name, attend = type(module).__name__, _ATTEND.get()
    if attend is None:
        raise ValueError(f"{name}: forward of a model alone: call model.hidden_states")
    if isinstance(attention_mask, Tensor) or dropout:
        raise ValueError(f"{name}: masks of its own and attention dropout are not supported by {ATTENTION}")
    mask = attention_mask or Mask()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = Rule(scale=scale, window=mask.window, chunk=mask.chunk, softcap=softcap, sinks=s_aux)
    width = value.shape[-1]
    if width != query.shape[-1]:  # keys and values are held side by side: zeros change neither scores nor sums
        most = max(width, query.shape[-1])
        query, key, value = (F.pad(x, (0, most - x.shape[-1])) for x in (query, key, value))
    layer = module.layer_idx
    assert isinstance(layer, int)
    return attend(layer, query, key, value, rule)[..., :width], None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
