"""Keys and values of the running sequences, and the attention of one engine step over them.

Sequences live in slabs: rows of one capacity (64, 128, 256 … tokens), always packed without holes, so that the decode
attention of a slab is one call on a view, without copying.  A sequence that outgrows its slab moves to the next, so
memory and padding stay within a factor of two of the tokens held, however long the longest sequence is.  Prompts are
computed in a `Prefix` of their own and copied into a row for each sequence that starts from it.  With a budget, rows
kept in reserve go before it would be exceeded.  Knows nothing of sampling or versions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.attention import causal_attention
from spmd_rl.engine.sampling import Uniforms
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


@dataclass(eq=False, kw_only=True, slots=True, weakref_slot=True)
class Prefix:
    """Keys and values of some tokens, computed chunk by chunk, for one sequence or a group that shares them."""

    tokens: list[int]
    kv: Tensor | None = None  # [layers, 2, H_kv, len(tokens), D], from its first chunk on
    num_done: int = 0
    last_hidden: Tensor | None = None  # [d] of the last token, once all are done
    waiting: list[Sequence] = field(default_factory=list)  # start when it is done
    base: Prefix | None = None  # a shorter one that this extends and waits for


class Slab:
    """Rows of one capacity; its sequences sit in rows 0 … n - 1, in this order."""

    def __init__(self, capacity: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.capacity = capacity
        self.sequences: list[Sequence] = []
        layers, heads, dim = shape
        self.kv = [torch.empty(2, 0, heads, capacity, dim, dtype=dtype, device=device) for _ in range(layers)]

    @property
    def num_rows(self) -> int:
        return self.kv[0].shape[1]

    def add(self, sequence: Sequence, kv: Seq[Tensor]) -> None:
        """Into the next row, which exists; kv: per layer [2, H_kv, tokens held, D]."""
        sequence.slab, sequence.row = self, len(self.sequences)
        self.sequences.append(sequence)
        self._write(sequence.row, kv)

    def held(self, sequence: Sequence, num_tokens: int) -> list[Tensor]:
        return [x[:, sequence.row, :, :num_tokens] for x in self.kv]

    def remove(self, sequence: Sequence, row: int) -> None:
        """Free a sequence's row; the last row moves into it."""
        last = self.sequences.pop()
        if last is not sequence:
            self._write(row, self.held(last, len(last.tokens)))
            self.sequences[row], last.row = last, row
        if not self.sequences:
            self.resize(0)

    def resize(self, num_rows: int) -> None:
        kept = min(num_rows, self.num_rows)
        for layer, old in enumerate(self.kv):  # masked positions get weight 0, and 0 times garbage could be NaN
            self.kv[layer] = old.new_zeros(2, num_rows, *old.shape[2:])
            self.kv[layer][:, :kept] = old[:, :kept]

    def _write(self, row: int, kv: Seq[Tensor]) -> None:
        for mine, theirs in zip(self.kv, kv, strict=True):
            mine[:, row, :, : theirs.shape[2]] = theirs


class Cache:
    """All slabs and prefixes."""

    def __init__(
        self,
        *,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        budget: int,  # tokens for which keys and values may be held
    ) -> None:
        self.shape = shape  # layers, H_kv, D
        self.dtype, self.device = dtype, device
        self._budget = budget
        self._slabs: dict[int, Slab] = {}
        self._prefixes: WeakSet[Prefix] = WeakSet()  # that hold any

    @staticmethod
    def capacity(num_tokens: int) -> int:
        """Of the row that a sequence of so many tokens has."""
        return max(SMALLEST, 1 << (num_tokens - 1).bit_length())

    @property
    def num_tokens(self) -> int:
        """Tokens for which there is memory."""
        rows = sum(slab.num_rows * slab.capacity for slab in self._slabs.values())
        return rows + sum(len(prefix.tokens) for prefix in self._prefixes)

    def slabs(self) -> list[Slab]:
        return [slab for _, slab in sorted(self._slabs.items()) if slab.sequences]

    def open(self, prefix: Prefix) -> None:
        """Memory for a prefix that is about to be computed."""
        self._fit(len(prefix.tokens))
        layers, heads, dim = self.shape
        shape = (layers, 2, heads, len(prefix.tokens), dim)
        prefix.kv = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._prefixes.add(prefix)

    def start(self, sequence: Sequence, prefix: Prefix) -> None:
        """Give a sequence a row that holds the prefix and has room for the next token."""
        self._slab_for(len(prefix.tokens) + 1).add(sequence, prefix.kv)

    def make_room(self, sequence: Sequence) -> None:
        """Before its last token is computed: move it to a larger slab where its own is full."""
        slab, row, held = sequence.slab, sequence.row, len(sequence.tokens) - 1
        if held == slab.capacity:
            self._slab_for(held + 1).add(sequence, slab.held(sequence, held))
            slab.remove(sequence, row)

    def remove(self, sequence: Sequence) -> None:
        if sequence.slab is not None:
            sequence.slab.remove(sequence, sequence.row)
            sequence.slab = None

    def clear(self) -> None:
        """Forget all rows; the sequences stay, without one."""
        for slab in self._slabs.values():
            for sequence in slab.sequences:
                sequence.slab = None
        self._slabs.clear()

    def _slab_for(self, num_tokens: int) -> Slab:
        """With a free row."""
        capacity = self.capacity(num_tokens)
        if capacity not in self._slabs:
            self._slabs[capacity] = Slab(capacity, self.shape, self.dtype, self.device)
        slab = self._slabs[capacity]
        used = len(slab.sequences)
        if used == slab.num_rows:
            more = max(used, 1) if self._fits(max(used, 1) * capacity) else 1
            self._fit(more * capacity)
            slab.resize(used + more)
        return slab

    def _fits(self, num_tokens: int) -> bool:
        return self.num_tokens + num_tokens <= self._budget

    def _fit(self, num_tokens: int) -> None:
        """Give up the rows in reserve if so many tokens more need their memory."""
        if not self._fits(num_tokens):
            for slab in self._slabs.values():
                slab.resize(len(slab.sequences))
            assert self._fits(num_tokens), f"{self.num_tokens} + {num_tokens} tokens, budget {self._budget}"


class _Rows:
    """The next tokens of n neighbouring rows of a slab, one each."""

    def __init__(self, slab: Slab, first: int, num: int, start: int, held: list[int], device: torch.device) -> None:
        self.slab, self.first, self.num, self.start = slab, first, num, start
        self.length = max(held) + 1
        self._even = min(held) == max(held)
        self._held = torch.tensor(held, device=device)
        heads = slab.kv[0].shape[2]
        row_and_head = torch.arange(first * heads, (first + num) * heads, device=device).view(num, heads).t()
        self._index = (row_and_head * slab.capacity + self._held).flatten()  # [H_kv · n]
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:  # q [1, H, n, D], k and v [1, H_kv, n, D] -> [1, n, H, D]
        dim, kv_heads = q.shape[3], k.shape[1]
        oldest = self.length - window if self._even and window is not None and window < self.length else 0
        seen = []
        for cached, new in zip(self.slab.kv[layer], (k, v), strict=True):
            cached.view(-1, dim).index_copy_(0, self._index, new.reshape(-1, dim))
            seen.append(cached.narrow(0, self.first, self.num).narrow(2, oldest, self.length - oldest))
        keys, values = seen
        grouped = q.view(kv_heads, -1, self.num, dim).permute(2, 0, 1, 3)  # the queries of a key head, as positions
        mask = None if self._even else self._mask(window, q.dtype)
        if q.device.type == "cpu" and q.dtype == torch.float32:  # numpy multiplies many small matrices twice as fast
            scores = torch.from_numpy((grouped * scale).numpy() @ keys.numpy().swapaxes(2, 3))
            if softcap is not None:
                scores = scores.div_(softcap).tanh_().mul_(softcap)
            weights = (scores if mask is None else scores.add_(mask)).softmax(-1)
            out = torch.from_numpy(weights.numpy() @ values.numpy())
        elif softcap is None:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        else:
            scores = softcap * torch.tanh(grouped @ keys.transpose(2, 3) * (scale / softcap))
            out = (scores if mask is None else scores + mask).softmax(-1, dtype=torch.float32).to(q.dtype) @ values
        return out.reshape(1, self.num, -1, dim)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            column = torch.arange(self.length, device=self._held.device)
            held = self._held[:, None]
            hidden = column > held
            if window is not None:
                hidden |= column <= held - window
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
        outs = []
        for rows in self._rows:
            own = (x if rows.num == x.shape[2] else x.narrow(2, rows.start, rows.num) for x in (q, k, v))
            outs.append(rows.attend(layer, *own, scale, window, softcap))
        for prefix, begin, end, start in self._chunks:
            own, kept = slice(start, start + end - begin), prefix.kv[layer]
            kept[0, :, begin:end], kept[1, :, begin:end] = k[0, :, own], v[0, :, own]
            out = causal_attention(q[:, :, own], *kept[:, None, :, :end], scale=scale, window=window, softcap=softcap)
            outs.append(out.transpose(1, 2))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)
