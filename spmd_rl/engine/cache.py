"""Keys and values of the running sequences.

Sequences live in slabs: rows of one capacity (64, 128, 256 … tokens), always packed without holes, so that the decode
attention of a slab is one call on a view, without copying.  A sequence that outgrows its slab moves to the next, so
memory and padding stay within a factor of two of the tokens held, however long the longest sequence is.  Prompts are
computed in a `Prefix` of their own and copied into a row for each sequence that starts from it.  What a layer holds of
a token has the shape that it came in with; a layer without attention holds nothing.  With a budget, rows kept in
reserve go before it would be exceeded.  Knows nothing of sampling or versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakSet

from torch import Tensor

from spmd_rl.engine.sampling import Uniforms
from spmd_rl.engine.states import States
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
    states: States | None = None  # what layers carry beside keys and values, until it is joined with others


@dataclass(eq=False, kw_only=True, slots=True, weakref_slot=True)
class Prefix:
    """Keys and values of some tokens, computed chunk by chunk, for one sequence or a group that shares them."""

    tokens: list[int]
    kv: dict[int, Tensor] = field(default_factory=dict)  # by layer [2, H_kv, len(tokens), D], from its first chunk on
    is_open: bool = False  # there is memory for it
    num_done: int = 0
    states: States | None = None  # after its last token, of a model whose layers carry any
    last_hidden: Tensor | None = None  # [d] of the last token, once all are done
    waiting: list[Sequence] = field(default_factory=list)  # start when it is done
    base: Prefix | None = None  # a shorter one that this extends and waits for

    def hold(self, layer: int, k: Tensor, v: Tensor, begin: int) -> Tensor:
        """Keys and values of the tokens from `begin` on, each [H_kv, n, D]; returns the layer's memory."""
        if layer not in self.kv:
            self.kv[layer] = k.new_empty(2, k.shape[0], len(self.tokens), k.shape[2])
        kept, end = self.kv[layer], begin + k.shape[1]
        kept[0, :, begin:end], kept[1, :, begin:end] = k, v
        return kept


class Slab:
    """Rows of one capacity; its sequences sit in rows 0 … n - 1, in this order."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_rows = capacity, 0
        self.sequences: list[Sequence] = []
        self.kv: dict[int, Tensor] = {}  # by layer [2, num_rows, H_kv, capacity, D]

    def add(self, sequence: Sequence, kv: Mapping[int, Tensor]) -> None:
        """Into the next row, which exists; kv: by layer [2, H_kv, tokens held, D]."""
        sequence.slab, sequence.row = self, len(self.sequences)
        self.sequences.append(sequence)
        self._write(sequence.row, kv)

    def held(self, sequence: Sequence, num_tokens: int) -> dict[int, Tensor]:
        return {layer: x[:, sequence.row, :, :num_tokens] for layer, x in self.kv.items()}

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
        for layer, old in self.kv.items():  # masked positions get weight 0, and 0 times garbage could be NaN
            self.kv[layer] = old.new_zeros(2, num_rows, *old.shape[2:])
            self.kv[layer][:, :kept] = old[:, :kept]
        self.num_rows = num_rows

    def _write(self, row: int, kv: Mapping[int, Tensor]) -> None:
        for layer, theirs in kv.items():
            if layer not in self.kv:
                _, heads, _, dim = theirs.shape
                self.kv[layer] = theirs.new_zeros(2, self.num_rows, heads, self.capacity, dim)
            self.kv[layer][:, row, :, : theirs.shape[2]] = theirs


class Cache:
    """All slabs and prefixes."""

    def __init__(
        self,
        *,
        max_rows: int,  # sequences that have a row at a time
        budget: int,  # tokens for which keys and values may be held
        state_tokens: int = 0,  # as many more take the states of a sequence, or of a prefix
    ) -> None:
        self._max_rows, self._budget, self._state_tokens = max_rows, budget, state_tokens
        self._slabs: dict[int, Slab] = {}
        self._prefixes: WeakSet[Prefix] = WeakSet()  # that hold any

    @staticmethod
    def capacity(num_tokens: int) -> int:
        """Of the row that a sequence of so many tokens has."""
        return max(SMALLEST, 1 << (num_tokens - 1).bit_length())

    @property
    def num_tokens(self) -> int:
        """Tokens for which there is memory."""
        rows = sum(slab.num_rows * (slab.capacity + self._state_tokens) for slab in self._slabs.values())
        return rows + sum(len(prefix.tokens) + self._state_tokens for prefix in self._prefixes)

    def slabs(self) -> list[Slab]:
        return [slab for _, slab in sorted(self._slabs.items()) if slab.sequences]

    def open(self, prefix: Prefix) -> None:
        """Memory for a prefix that is about to be computed."""
        self._fit(len(prefix.tokens) + self._state_tokens)
        prefix.is_open = True
        self._prefixes.add(prefix)

    def start(self, sequence: Sequence, prefix: Prefix) -> None:
        """Give a sequence a row that holds the prefix and has room for the next token."""
        self._slab_for(len(prefix.tokens) + 1).add(sequence, prefix.kv)
        sequence.states = None if prefix.states is None else prefix.states.copy()

    def make_room(self, sequence: Sequence) -> None:
        """Before its last token is computed: move it to a larger slab where its own is full."""
        slab, row, held = sequence.slab, sequence.row, len(sequence.tokens) - 1
        assert slab is not None
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
            self._slabs[capacity] = Slab(capacity)
        slab = self._slabs[capacity]
        used = len(slab.sequences)
        if used == slab.num_rows:
            more, each = min(max(used, 1), self._max_rows - used), capacity + self._state_tokens
            more = more if self._fits(more * each) else 1
            self._fit(more * each)
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
