"""What travels with weights from one sender to all receivers, and what both sides tell of it.

On the wire, for each version and sender (payload over `wts`, the rest over `wts_meta`, always gloo):

    header    int64[8]    magic, version (-1: the end), buckets, bytes, hash of the manifest, 1 if a delta, tensors, 0
    buckets   uint8       the shard in pieces of 32 MiB; it begins with the version
    or table  int64[n,2]  of a delta (delta.py), and its payload in pieces of 32 MiB
    trailer   int64[2+n]  magic, version, one checksum per bucket of the whole shard, delta or not

Pure: knows nothing of groups or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from spmd_rl.weights.checksum import checksum
from spmd_rl.weights.layout import ALIGN_BYTES, Layout

MAGIC = 0x53504D445F575431  # "SPMD_WT1"
END = -1  # version of the last header
HEADER_LENGTH = 8
IN_FLIGHT = 3  # buckets under way at once

Failed = Callable[[Exception], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReport:
    """One version as its sender saw it."""

    version: int
    num_bytes: int
    send_s: float  # from the header to the last bucket, the receivers' waiting for a free buffer included
    sent_bytes: int  # less than num_bytes if a delta was enough
    update_norm: float  # L2 norm of this shard's change as the engines see it; of the first version, of the weights
    checksums: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Received:
    """One version as its receiver has it, complete and verified."""

    version: int
    tensors: dict[str, Tensor]
    checksums: list[int]  # of all senders
    num_bytes: int
    receive_s: float  # from there being memory for it until it was verified
    received_bytes: int  # less than num_bytes if deltas were enough


Fetch = Callable[[], Received]
Deliver = Callable[[int, Fetch], None]  # (version, what gives it)


@dataclass(frozen=True, slots=True)
class Header:
    """What follows."""

    version: int
    num_buckets: int
    num_bytes: int
    manifest_hash: int
    is_delta: int
    num_tensors: int

    @staticmethod
    def of(layout: Layout, manifest_hash: int, *, version: int, is_delta: bool) -> Header:
        return Header(version, len(layout.buckets), layout.num_bytes, manifest_hash, int(is_delta), len(layout.pieces))

    def words(self) -> Tensor:  # [HEADER_LENGTH] int64
        return torch.tensor([MAGIC, *astuple(self), 0])


def read_header(words: Tensor, *, layout: Layout, manifest_hash: int, sender: int, rank: int) -> Header:
    """RuntimeError for what is no header, or of another model than this rank's."""
    magic, *fields, _ = words.tolist()
    if magic != MAGIC:
        raise RuntimeError(f"weights header from rank {sender} begins with {magic:#x}, expected {MAGIC:#x}")
    header = Header(*fields)
    if header != (here := Header.of(layout, manifest_hash, version=header.version, is_delta=bool(header.is_delta))):
        raise RuntimeError(
            f"rank {sender} sends {header.num_tensors} tensors in {header.num_buckets} buckets, {header.num_bytes} "
            f"bytes; rank {rank} expects {here.num_tensors} in {here.num_buckets}, {here.num_bytes} bytes: names, "
            "shapes or types of the weights differ between trainer and engine"
        )
    return header


def read_trailer(words: Tensor, *, version: int, sender: int) -> list[int]:
    """Its checksums; RuntimeError for a trailer of another version."""
    magic, trailer_version, *sent = words.tolist()
    if (magic, trailer_version) != (MAGIC, version):
        raise RuntimeError(f"weights of version {version} from rank {sender} end with version {trailer_version}")
    return sent


def check_sums(
    sent: Sequence[int],
    received: Sequence[int],  # this side's
    *,
    name: Callable[[int], str],  # of what the checksum at this place is of
    version: int,
    sender: int,
    rank: int,
) -> None:
    """RuntimeError that names tensors, ranks and both sums where what came is not what was sent."""
    if len(sent) != len(received):
        raise RuntimeError(
            f"weights of version {version}: rank {sender} sent {len(sent)} checksums, rank {rank} has {len(received)}"
        )
    for place, (theirs, ours) in enumerate(zip(sent, received, strict=True)):
        if theirs != ours:
            raise RuntimeError(
                f"weights of version {version} from rank {sender} were damaged on the way to rank {rank}: "
                f"{name(place)} has checksum {ours:#x}, the sender computed {theirs:#x}"
            )


def bucket_name(layout: Layout, bucket: int) -> str:
    """With the tensors that it holds bytes of."""
    return f"bucket {bucket} with {_shorten(layout.names(bucket))}"


def bucket_checksum(data: Tensor, *, first: bool) -> Tensor:
    """Of a bucket's weights: the version block is checked on its own, so that equal weights have equal checksums."""
    return checksum(data[ALIGN_BYTES if first else 0 :])


def _shorten(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 6 else [*names[:3], f"… {len(names) - 5} more …", *names[-2:]])
