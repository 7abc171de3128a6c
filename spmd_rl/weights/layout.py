"""How weights lie in memory and on the wire: names, shapes, shards and buckets.

A shard is one flat buffer of bytes: a block that begins with the version as an int64, then the rows that one sender
holds of each tensor, in the order of the manifest, each piece aligned to 256 bytes.  FSDP2 cuts every tensor into
plain chunks of rows: of n rows, sender t of T holds those from t * ceil(n / T) on, ceil(n / T) at most.  The shard of
a single sender is the whole model, so an engine's tensors can be views on what came over the wire.  A shard travels
in buckets of equal size.  Pure: knows nothing of groups, ranks or threads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

BUCKET_BYTES = 32 << 20  # 16 to 64 MiB move as fast as one huge tensor; below 4 MiB each operation's cost shows
ALIGN_BYTES = 256  # of every tensor, so that kernels may use wide loads; also the size of the version block


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as engines know it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # on the wire and in the engine

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of one tensor inside a shard."""

    spec: TensorSpec
    first_row: int
    num_rows: int
    start: int  # byte in the shard

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.spec.row_bytes


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the pieces of one shard lie."""

    pieces: tuple[Piece, ...]  # one per tensor, in the order of the manifest; empty where the sender has no row of it
    num_bytes: int
    bucket_bytes: int

    @cached_property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """(first byte, last byte + 1) of each bucket."""
        starts = range(0, self.num_bytes, self.bucket_bytes)
        return tuple((start, min(start + self.bucket_bytes, self.num_bytes)) for start in starts)

    @cached_property
    def overlaps(self) -> tuple[tuple[tuple[Piece, int, int], ...], ...]:
        """For each bucket: the pieces in it, with the first and last + 1 byte (in the shard) that it holds of each."""
        return tuple(
            tuple(
                (piece, max(start, piece.start), min(end, piece.start + piece.num_bytes))
                for piece in self.pieces
                if piece.num_bytes and piece.start < end and piece.start + piece.num_bytes > start
            )
            for start, end in self.buckets
        )

    def names(self, bucket: int) -> list[str]:
        """The tensors that a bucket holds bytes of."""
        return [piece.spec.name for piece, _, _ in self.overlaps[bucket]]


@dataclass(frozen=True, eq=False)
class Placement:
    """Where a shard's bytes lie in the whole model, the shard of a single sender."""

    shard: Layout
    whole: Layout

    @cached_property
    def _moves(self) -> dict[str, int]:
        """Bytes from the shard to the whole, by tensor."""
        pairs = zip(self.shard.pieces, self.whole.pieces, strict=True)
        return {p.spec.name: whole.start + p.first_row * p.spec.row_bytes - p.start for p, whole in pairs}

    def spans(self, bucket: int) -> list[tuple[int, int, int]]:
        """(first byte, last + 1 in the shard, first byte in the whole) of each piece in a bucket."""
        return [
            (first, last, first + self._moves[piece.spec.name]) for piece, first, last in self.shard.overlaps[bucket]
        ]

    def in_whole(self, positions: Tensor, word: torch.dtype) -> Tensor:
        """Words of the shard, [n] int64, as words of the whole."""
        pieces = [piece for piece in self.shard.pieces if piece.num_bytes]
        if not len(positions):
            return positions
        starts = torch.tensor([piece.start // word.itemsize for piece in pieces], device=positions.device)
        moves = torch.tensor([self._moves[piece.spec.name] for piece in pieces], device=positions.device)
        return positions + (moves // word.itemsize)[torch.searchsorted(starts, positions, right=True) - 1]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of a module holds, by name: parameters, tied ones once, and the buffers that are saved.

    These are not trained, but forwards read them: a router's correction bias.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        saved = {name: b for name, b in part._buffers.items() if name not in part._non_persistent_buffers_set}
        for name, tensor in (part._parameters | saved).items():
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def manifest(
    weights: nn.Module | Mapping[str, Tensor], dtype: torch.dtype | Mapping[str, torch.dtype] | None = None
) -> list[TensorSpec]:
    """Names, full shapes and wire types of weights; `dtype`, of all or by name, replaces each tensor's own."""
    named = weights_of(weights) if isinstance(weights, nn.Module) else weights
    own = {name: tensor.dtype for name, tensor in named.items()}
    types = own if dtype is None else dtype if isinstance(dtype, Mapping) else dict.fromkeys(own, dtype)
    return [TensorSpec(name, tuple(tensor.shape), types[name]) for name, tensor in named.items()]


def manifest_hash(specs: Sequence[TensorSpec], *, num_senders: int, bucket_bytes: int) -> int:
    """63 bits that differ when two ranks would lay the weights out differently."""
    text = repr((num_senders, bucket_bytes, ALIGN_BYTES, [(spec.name, spec.shape, str(spec.dtype)) for spec in specs]))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def chunk(num_rows: int, *, index: int, count: int) -> tuple[int, int]:
    """(first row, rows) that sender `index` of `count` holds.

    Example: 5 rows over 4 senders are (0, 2), (2, 2), (4, 1), (5, 0).
    """
    size = -(-num_rows // count)
    first = min(index * size, num_rows)
    return first, min(size, num_rows - first)


def shard_layout(
    specs: Sequence[TensorSpec], *, index: int = 0, count: int = 1, bucket_bytes: int = BUCKET_BYTES
) -> Layout:
    """The shard of sender `index` of `count`; of 1, the whole model."""
    if bucket_bytes % ALIGN_BYTES:
        raise ValueError(f"bucket_bytes {bucket_bytes} is not a multiple of {ALIGN_BYTES}")
    pieces = []
    start = ALIGN_BYTES
    for spec in specs:
        first, num = chunk(spec.num_rows, index=index, count=count)
        pieces.append(Piece(spec, first, num, start))
        start += -(-pieces[-1].num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return Layout(tuple(pieces), start, bucket_bytes)


def views(buffer: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Each piece of a shard's buffer ([num_bytes] uint8) as rows of its tensor."""
    return {
        piece.spec.name: buffer[piece.start : piece.start + piece.num_bytes]
        .view(piece.spec.dtype)
        .view((piece.num_rows, *piece.spec.shape[1:]) if piece.spec.shape else ())
        for piece in layout.pieces
        if piece.spec.shape or piece.num_rows
    }


def local_rows(parameter: Tensor, piece: Piece, *, count: int) -> Tensor:
    """The rows of a piece as this sender holds them: its FSDP2 shard, or a cut of a plain tensor."""
    spec = piece.spec
    if tuple(parameter.shape) != spec.shape:
        raise RuntimeError(f"{spec.name} has shape {tuple(parameter.shape)}, the manifest says {spec.shape}")
    if not isinstance(parameter, DTensor):
        return (
            parameter.detach()[piece.first_row : piece.first_row + piece.num_rows] if spec.shape else parameter.detach()
        )
    sharded = [placement for placement in parameter.placements if isinstance(placement, Shard)]
    if any(placement.dim != 0 for placement in sharded) or len(sharded) > 1:
        raise RuntimeError(f"{spec.name} is sharded as {parameter.placements}; only chunks of rows can be sent")
    local = parameter.to_local().detach()
    if not sharded:
        return local[piece.first_row : piece.first_row + piece.num_rows]
    if local.shape[0] != piece.num_rows:
        raise RuntimeError(
            f"{spec.name}: this rank holds {local.shape[0]} of {spec.num_rows} rows, the layout of {count} senders "
            f"says {piece.num_rows}"
        )
    return local
