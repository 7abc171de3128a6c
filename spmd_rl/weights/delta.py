"""What changed between two versions of a shard, to the bit, and no larger than that.

A shard is taken as words of one element each (of several where another element is smaller).  For each bucket: how many
words changed, where, and their new bits.  Positions are gap-coded: the number of unchanged words before each changed
one, 255 meaning "255 and more follow", so one byte for all but rare long gaps.

    payload    int64 version, then for each bucket: its gaps, its new words, each padded to 8 bytes
    table      int64[buckets, 2]: changed words, bytes of their gaps

Example: of words 7 7 7 7 now 7 8 7 9, the gaps are 1 1 and the new words 8 9.
Pure: knows nothing of ranks, groups or versions' order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmd_rl.weights.layout import ALIGN_BYTES, Layout, TensorSpec

MOST = 0.25  # share of words that changed from which on a whole shard is sent: coding would take as long as sending
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_ESCAPE = 255
_PIECE = 1 << 18  # elements


@dataclass(frozen=True, eq=False)
class Delta:
    table: Tensor
    payload: Tensor  # uint8


def word_of(specs: Sequence[TensorSpec]) -> torch.dtype:
    """The integer type of one element, the smallest where there are several sizes; ValueError for single bytes."""
    sizes = {spec.dtype.itemsize for spec in specs}
    if not sizes <= _WORDS.keys():
        raise ValueError(f"weights of {sorted(sizes)} bytes an element cannot be sent as deltas: 2, 4 or 8 are needed")
    return _WORDS[min(sizes)]


def encode(old: Tensor, new: Tensor, layout: Layout, *, word: torch.dtype, version: int) -> Delta | None:
    """From a shard's buffers ([num_bytes] uint8) of two versions; None if more than `MOST` changed."""
    size = word.itemsize
    changed = []
    for start, end in layout.buckets:
        changed.append(old[start:end].view(word) != new[start:end].view(word))
    changed[0][: ALIGN_BYTES // size] = False  # the version
    counts = torch.stack([bits.count_nonzero() for bits in changed]).tolist()
    if sum(counts) > MOST * sum(piece.num_bytes for piece in layout.pieces) / size:
        return None
    parts, table = [torch.tensor([version], device=new.device).view(torch.uint8)], []
    for (start, end), bits, count in zip(layout.buckets, changed, counts, strict=True):
        where = bits.nonzero()[:, 0]
        gaps = _gap_bytes(where)
        parts += [_padded(gaps), _padded(new[start:end].view(word)[where].view(torch.uint8))]
        table.append((count, len(gaps)))
    return Delta(torch.tensor(table, dtype=torch.int64), torch.cat(parts))


def payload_bytes(table: Tensor, *, word: torch.dtype) -> int:
    """Size of the payload that a table describes."""
    counts, gaps = table.unbind(1)
    return 8 + int((_aligned(counts * word.itemsize) + _aligned(gaps)).sum())


def decode(
    delta: Delta, layout: Layout, *, word: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:  # positions [n] int64 in words of the shard, their new words [n]
    """Bucket by bucket."""
    at = 8
    for (start, _), (count, num_gaps) in zip(layout.buckets, delta.table.tolist(), strict=True):
        gaps = delta.payload[at : at + num_gaps]
        at += int(_aligned(torch.tensor(num_gaps)))
        words = delta.payload[at : at + count * word.itemsize].view(word)
        at += int(_aligned(torch.tensor(count * word.itemsize)))
        sums = gaps.cumsum(0, dtype=torch.int64)[gaps != _ESCAPE]
        if len(sums) != count:
            raise RuntimeError(f"a delta's gaps are of {len(sums)} words, its table says {count}")
        yield start // word.itemsize + sums + torch.arange(count, device=sums.device), words


def squared_change(new: Tensor, old: Tensor) -> Tensor:
    """[] float64: squared L2 norm of the difference, in pieces that stay in the cache."""
    total = torch.zeros((), dtype=torch.float64, device=new.device)
    for after, before in zip(new.reshape(-1).split(_PIECE), old.reshape(-1).split(_PIECE), strict=True):
        change = after.float() - before.float()
        total += torch.dot(change, change)
    return total


def _gap_bytes(where: Tensor) -> Tensor:
    """Of rising positions [n] int64."""
    gaps = torch.diff(where, prepend=where.new_full((1,), -1)) - 1
    ends = (gaps // _ESCAPE + 1).cumsum(0) - 1
    coded = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), _ESCAPE, dtype=torch.uint8, device=where.device)
    coded[ends] = (gaps % _ESCAPE).to(torch.uint8)
    return coded


def _aligned(num_bytes: Tensor) -> Tensor:
    return (num_bytes + 7) // 8 * 8


def _padded(data: Tensor) -> Tensor:
    return torch.nn.functional.pad(data, (0, -len(data) % 8))
