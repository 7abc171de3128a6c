"""Keys and values of the running sequences, and the attention of one engine step over them.

Sequences live in slabs: rows of one capacity (64, 128, 256 … tokens), always packed without holes, so that the decode
attention of a slab is one call on a view, without copying.  A sequence that outgrows its slab moves to the next, so
memory and padding stay within a factor of two of the tokens held, however long the longest sequence is.  Prompts are
computed in a `Prefix` of their own and copied into a row for each sequence that starts from it.  Knows nothing of
sampling or versions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.engine.sampling import Uniforms
from spmd_rl.model import causal_attention
from spmd_rl.types import Sampling

SMALLEST = 64  # tokens per row of the smallest slab


@dataclass(eq=False, kw_only=True, slots=True)
class Sequence:
    """One running request."""

    request_id: int
    sampling: Sampling
    tokens: list[int]  # prompt and what was sampled; keys and values are held for all but the last
    num_prompt: int
    uniforms: Uniforms
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    slab: Slab | None = None  # None while its prefix is being computed
    row: int = 0


@dataclass(eq=False, kw_only=True, slots=True)
class Prefix:
    """Keys and values of some tokens, computed chunk by chunk, for one sequence or a group that shares them."""

    tokens: list[int]
    kv: Tensor  # [2, layers, len(tokens), H_kv, D]
    num_done: int = 0
    last_hidden: Tensor | None = None  # [d] of the last token, once all are done
    waiting: list[Sequence] = field(default_factory=list)  # start when it is done
    base: Prefix | None = None  # a shorter one that this extends and waits for


class Slab:
    """Rows of one capacity; its sequences sit in rows 0 … n - 1, in this order."""

    def __init__(self, capacity: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.sequences: list[Sequence] = []
        layers, self._heads, self._dim = shape
        self.kv = torch.empty(2, layers, 0, capacity, self._heads, self._dim, dtype=dtype, device=device)
        self.flat: list[tuple[Tensor, Tensor]] = []  # per layer, keys and values [rows · capacity, H_kv, D]
        self.rows: list[tuple[Tensor, Tensor]] = []  # per layer, [rows, H_kv, capacity, D]

    def add(self, sequence: Sequence) -> None:
        row = len(self.sequences)
        if row == self.kv.shape[2]:
            self._resize(max(2 * row, 1))
        sequence.slab, sequence.row = self, row
        self.sequences.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Free its row; the last row moves into it."""
        last = self.sequences.pop()
        if last is not sequence:
            held = len(last.tokens)
            self.kv[:, :, sequence.row, :held] = self.kv[:, :, last.row, :held]
            self.sequences[sequence.row], last.row = last, sequence.row
        sequence.slab = None
        if not self.sequences:
            self._resize(0)

    def _resize(self, rows: int) -> None:
        old = self.kv
        shape = list(old.shape)
        shape[2] = rows
        self.kv = old.new_zeros(shape)  # masked positions get weight 0, and 0 times garbage could be NaN
        kept = min(rows, old.shape[2])
        self.kv[:, :, :kept] = old[:, :, :kept]
        layers = range(shape[1])
        self.flat = [tuple(x[layer].flatten(0, 1) for x in self.kv) for layer in layers] if rows else []
        self.rows = [tuple(x[layer].transpose(1, 2) for x in self.kv) for layer in layers] if rows else []


class Cache:
    """All slabs."""

    def __init__(self, *, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape  # layers, H_kv, D
        self.dtype, self.device = dtype, device
        self._slabs: dict[int, Slab] = {}

    def slabs(self) -> list[Slab]:
        return [slab for _, slab in sorted(self._slabs.items()) if slab.sequences]

    def new_prefix(self, tokens: list[int]) -> Prefix:
        layers, heads, dim = self.shape
        kv = torch.empty(2, layers, len(tokens), heads, dim, dtype=self.dtype, device=self.device)
        return Prefix(tokens=tokens, kv=kv)

    def start(self, sequence: Sequence, prefix: Prefix) -> None:
        """Give a sequence a row that holds the prefix and has room for the next token."""
        held = len(prefix.tokens)
        slab = self._slab_for(held + 1)
        slab.add(sequence)
        slab.kv[:, :, sequence.row, :held] = prefix.kv

    def make_room(self, sequence: Sequence) -> None:
        """Before its last token is computed: move it to a larger slab where its own is full."""
        slab, row, held = sequence.slab, sequence.row, len(sequence.tokens) - 1
        if held < slab.capacity:
            return
        larger = self._slab_for(held + 1)
        larger.add(sequence)
        larger.kv[:, :, sequence.row, :held] = slab.kv[:, :, row, :held]
        new_row, sequence.row = sequence.row, row
        slab.remove(sequence)
        sequence.slab, sequence.row = larger, new_row

    def remove(self, sequence: Sequence) -> None:
        if sequence.slab is not None:
            sequence.slab.remove(sequence)

    def clear(self) -> None:
        """Forget all keys and values; the sequences stay, without a row."""
        for slab in self._slabs.values():
            for sequence in slab.sequences:
                sequence.slab = None
        self._slabs.clear()

    def _slab_for(self, num_tokens: int) -> Slab:
        capacity = max(SMALLEST, 1 << (num_tokens - 1).bit_length())
        if capacity not in self._slabs:
            self._slabs[capacity] = Slab(capacity, self.shape, self.dtype, self.device)
        return self._slabs[capacity]


class _Rows:
    """The next tokens of n neighbouring rows of a slab, one each."""

    def __init__(self, slab: Slab, first: int, num: int, start: int, held: list[int], device: torch.device) -> None:
        self.slab, self.first, self.num, self.start = slab, first, num, start
        self.length = max(held) + 1
        self._even = min(held) == max(held)
        self.index = torch.tensor([(first + i) * slab.capacity + n for i, n in enumerate(held)], device=device)
        self._held = None if self._even else torch.tensor(held, device=device)[:, None]
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:  # q [n, H, D], k and v [n, H_kv, D] -> [n, H, D]
        flat_k, flat_v = self.slab.flat[layer]
        flat_k.index_copy_(0, self.index, k)
        flat_v.index_copy_(0, self.index, v)
        rows = slice(self.first, self.first + self.num)
        oldest = self.length - window if self._even and window is not None and window < self.length else 0
        keys, values = (x[rows, :, oldest : self.length] for x in self.slab.rows[layer])
        num, heads, dim = q.shape
        grouped = q.view(num, keys.shape[1], heads // keys.shape[1], dim)  # the queries of a key head, as positions
        mask = None if self._even else self._mask(window, q.dtype)
        if softcap is None:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        else:
            scores = softcap * torch.tanh(grouped @ keys.transpose(2, 3) * (scale / softcap))
            out = (scores if mask is None else scores + mask).softmax(-1, dtype=torch.float32).to(q.dtype) @ values
        return out.reshape(num, heads, dim)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            column = torch.arange(self.length, device=self.index.device)
            hidden = column > self._held
            if window is not None:
                hidden |= column <= self._held - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


class StepAttention:
    """`Attend` of one step: first the next tokens of decoding rows, slab by slab, then chunks of prefixes."""

    def __init__(
        self,
        rows: Seq[tuple[Slab, int, int]],  # slab, first row, number of rows
        chunks: Seq[tuple[Prefix, int, int]],  # prefix, first token, end
        device: torch.device,
    ) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self._rows: list[_Rows] = []
        self._chunks: list[tuple[Prefix, int, int, int]] = []
        for slab, first, num in rows:
            sequences = slab.sequences[first : first + num]
            held = [len(s.tokens) - 1 for s in sequences]
            self._rows.append(_Rows(slab, first, num, len(self.positions), held, device))
            self.token_ids += [s.tokens[-1] for s in sequences]
            self.positions += held
        for prefix, begin, end in chunks:
            self._chunks.append((prefix, begin, end, len(self.positions)))
            self.token_ids += prefix.tokens[begin:end]
            self.positions += range(begin, end)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        queries, keys, values = (x[0].transpose(0, 1) for x in (q, k, v))  # [T, H, D]
        outs = []
        for part in self._rows:
            own = slice(part.start, part.start + part.num)
            outs.append(part.attend(layer, queries[own], keys[own], values[own], scale, window, softcap))
        for prefix, begin, end, start in self._chunks:
            own = slice(start, start + end - begin)
            kept_k, kept_v = prefix.kv[0, layer], prefix.kv[1, layer]
            kept_k[begin:end] = keys[own]
            kept_v[begin:end] = values[own]
            seen = (x[None, :end].transpose(1, 2) for x in (kept_k, kept_v))
            out = causal_attention(q[:, :, own], *seen, scale=scale, window=window, softcap=softcap)
            outs.append(out[0].transpose(0, 1))
        return (outs[0] if len(outs) == 1 else torch.cat(outs))[None]
