"""Weights from trainers to engines: every sender broadcasts its own shard, nobody gathers.

On the wire, for each version and sender (payload over `wts`, the rest over `wts_meta`, always gloo):

    header    int64[8]    magic, version (-1: the end), buckets, bytes, hash of the manifest, 1 if a delta, tensors, 0
    buckets   uint8       the shard in pieces of 32 MiB; it begins with the version
    or table  int64[n,2]  of a delta (weight_delta.py), and its payload in pieces of 32 MiB
    trailer   int64[2+n]  magic, version, one checksum per bucket of the whole shard, delta or not

The trainer is held only while its shard is copied into staging; a thread compares it with the version before and sends
it, or what changed.  An engine goes on decoding while
the next version is received into the buffer that it does not use.  Over NCCL the sender's main thread sends, so that
its collectives keep one order, and a receive is posted only after the header has come.  A version is never skipped or
repeated; a checksum that differs names the tensors.  Knows nothing of engines or trainers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from spmd_rl.weight_delta import Delta, decode, encode, payload_bytes, squared_change, word_of
from spmd_rl.weight_layout import (
    ALIGN_BYTES,
    BUCKET_BYTES,
    Layout,
    TensorSpec,
    checksum,
    local_rows,
    manifest_hash,
    shard_layout,
    views,
)

MAGIC = 0x53504D445F575431  # "SPMD_WT1"
END = -1  # version of the last header
_HEADER_LENGTH = 8
_IN_FLIGHT = 3  # buckets under way at once

Deliver = Callable[[int, dict[str, Tensor], list[int]], None]  # (version, tensors, checksums of all senders)
Failed = Callable[[Exception], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class SendReport:
    """One version as its sender saw it."""

    version: int
    num_bytes: int
    hold_s: float  # the trainer stood still
    send_s: float  # from the header to the last bucket, the receivers' waiting for a free buffer included
    sent_bytes: int  # less than num_bytes if a delta was enough
    update_norm: float  # L2 norm of this shard's change as the engines see it; of the first version, of the weights
    checksums: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceiveReport:
    """One version as its receiver saw it."""

    version: int
    num_bytes: int
    wait_s: float  # from the first header until a buffer was free
    receive_s: float  # until everything had arrived and was verified
    received_bytes: int  # less than num_bytes if deltas were enough


class WeightSender:
    """Sends this trainer rank's shard of each version.

    `publish` waits for the send before it; unblocked by the receivers taking that, or by the failure of the send.
    """

    def __init__(
        self,
        *,
        parameters: Mapping[str, Tensor],  # in the order of the manifest; FSDP2 shards or plain tensors
        specs: Sequence[TensorSpec],
        index: int,  # of this sender
        num_senders: int,
        meta_group: ProcessGroup,
        payload_group: ProcessGroup,
        failed: Failed,
        sent: Callable[[SendReport], None] = lambda report: None,  # in the thread that sends
        delta: bool = False,  # send what changed, where that is less
        anchor_every: int = 16,  # versions of which one is sent whole all the same
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if list(parameters) != [spec.name for spec in specs]:
            raise ValueError("the sender's parameters are not those of the manifest, or not in its order")
        self.report: SendReport | None = None  # of the last version that was sent
        self._parameters = dict(parameters)
        self._count = num_senders
        self._layout = shard_layout(specs, index=index, count=num_senders, bucket_bytes=bucket_bytes)
        self._hash = manifest_hash(specs, num_senders=num_senders, bucket_bytes=bucket_bytes)
        self._meta_group, self._payload_group = meta_group, payload_group
        self._failed, self._sent = failed, sent
        self._word = word_of(specs) if delta else None
        self._anchor_every = anchor_every
        self._rank = dist.get_rank()
        self._inline = dist.get_backend(payload_group) == "nccl"
        self._device = next(iter(parameters.values())).device
        self._buffers = [  # by version modulo 2
            torch.zeros(
                self._layout.num_bytes,
                dtype=torch.uint8,
                device=self._device if self._inline else "cpu",
                pin_memory=self._device.type == "cuda" and not self._inline,
            )
            for _ in range(2)
        ]
        self._targets = [views(buffer, self._layout) for buffer in self._buffers]
        self._version: int | None = None
        self._error: Exception | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._jobs: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weight sender", daemon=True)
        if not self._inline:
            self._thread.start()

    def publish(self, version: int) -> float:
        """Copy this rank's shard and send it; all senders call it. Returns the seconds of the copy."""
        self._wait()
        if version < 0 or (self._version is not None and version != self._version + 1):
            raise RuntimeError(
                f"weights of version {version} after {self._version}: a version is never skipped or repeated"
            )
        started = time.perf_counter()
        self._pack(version)
        hold_s = time.perf_counter() - started
        self._version = version
        self._submit((version, hold_s))
        return hold_s

    def wait(self) -> SendReport | None:
        """Wait until the last version is sent; its report."""
        self._wait()
        return self.report

    def close(self) -> None:
        """Send what is left, then the end, and stop the thread."""
        self._wait()
        self._submit((END, 0.0))
        if not self._inline:
            self._thread.join()
        self._wait()

    def _wait(self) -> None:
        self._idle.wait()
        if self._error is not None:
            raise RuntimeError(f"sending weights of version {self._version} failed: {self._error}") from self._error

    def _submit(self, job: tuple[int, float]) -> None:
        if self._inline:
            self._send(*job)
        else:
            self._idle.clear()
            self._jobs.put(job)

    def _run(self) -> None:
        version = 0
        while version != END and self._error is None:
            version, hold_s = self._jobs.get()
            try:
                self._send(version, hold_s)
            except Exception as error:
                self._error = error
                self._failed(error)
            self._idle.set()

    @torch.no_grad()
    def _pack(self, version: int) -> None:
        self._buffers[version % 2][:8].view(torch.int64).fill_(version)
        targets = self._targets[version % 2]
        for piece in self._layout.pieces:
            if piece.num_rows:
                rows = local_rows(self._parameters[piece.spec.name], piece, count=self._count)
                targets[piece.spec.name].copy_(rows, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    @torch.no_grad()
    def _send(self, version: int, hold_s: float) -> None:
        started = time.perf_counter()
        layout, new = self._layout, self._buffers[version % 2]
        delta = self._delta(version)
        header = torch.zeros(_HEADER_LENGTH, dtype=torch.int64)
        tensors = len(layout.pieces)
        header[:7] = torch.tensor(
            [MAGIC, version, len(layout.buckets), layout.num_bytes, self._hash, int(delta is not None), tensors]
        )
        dist.broadcast(header, self._rank, group=self._meta_group)
        if version == END:
            return
        if delta is not None:
            dist.broadcast(delta.table, self._rank, group=self._meta_group)
            for start in range(0, len(delta.payload), layout.bucket_bytes):
                piece = delta.payload[start : start + layout.bucket_bytes]
                dist.broadcast(piece, self._rank, group=self._payload_group)
        posted: deque[dist.Work] = deque()
        sums = []
        for bucket, (start, end) in enumerate(layout.buckets):
            if delta is None:
                posted.append(self._broadcast_bucket(bucket, new[start:end]))
            sums.append(_bucket_checksum(new, start, end))
            if len(posted) == _IN_FLIGHT:
                posted.popleft().wait()
        while posted:
            posted.popleft().wait()
        checksums = torch.stack(sums).tolist()
        dist.broadcast(torch.tensor([MAGIC, version, *checksums]), self._rank, group=self._meta_group)
        self.report = SendReport(
            version=version,
            num_bytes=layout.num_bytes,
            hold_s=hold_s,
            send_s=time.perf_counter() - started,
            sent_bytes=layout.num_bytes if delta is None else len(delta.payload) + delta.table.nbytes,
            update_norm=self._update_norm(version),
            checksums=tuple(checksums),
        )
        self._sent(self.report)

    def _delta(self, version: int) -> Delta | None:
        """What changed, if it is less than all; None for the first version, anchors and the end."""
        if self._word is None or version == END or self.report is None or version % self._anchor_every == 0:
            return None
        old, new = self._buffers[(version - 1) % 2], self._buffers[version % 2]
        return encode(old, new, self._layout, word=self._word, version=version)

    def _update_norm(self, version: int) -> float:
        new, old = self._targets[version % 2], self._targets[(version - 1) % 2]
        return float(torch.stack([squared_change(tensor, old[name]) for name, tensor in new.items()]).sum().sqrt())

    def _broadcast_bucket(self, bucket: int, data: Tensor) -> dist.Work:
        return dist.broadcast(data, self._rank, group=self._payload_group, async_op=True)


class WeightReceiver:
    """Receives every version from all senders in a thread, into the one of two buffers that is not in use.

    `deliver(version, tensors, checksums)` is called in that thread once a version is complete and verified.  The
    tensors are views that stay as they are until a later version has been released: `release(v)` says that the engine
    has swapped to v, so what it used before may be overwritten.  At most one version is received ahead.
    The end of the senders ends the thread; any error ends it with one call of `failed`.
    """

    def __init__(
        self,
        *,
        specs: Sequence[TensorSpec],
        meta_groups: Mapping[int, ProcessGroup],  # by sender rank, in the order of shards
        payload_groups: Mapping[int, ProcessGroup],
        device: torch.device,
        deliver: Deliver,
        failed: Failed,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.report: ReceiveReport | None = None  # of the last version that was delivered
        self._meta_groups, self._payload_groups = dict(meta_groups), dict(payload_groups)
        self._deliver, self._failed = deliver, failed
        self._device = device
        self._rank = dist.get_rank()
        count = len(self._meta_groups)
        self._layouts = {
            sender: shard_layout(specs, index=index, count=count, bucket_bytes=bucket_bytes)
            for index, sender in enumerate(self._meta_groups)
        }
        self._hash = manifest_hash(specs, num_senders=count, bucket_bytes=bucket_bytes)
        self._specs = specs
        self._received_bytes = 0
        whole = shard_layout(specs, bucket_bytes=bucket_bytes)
        self._starts = {piece.spec.name: piece.start for piece in whole.pieces}
        # zeros touch every page once: a first write to fresh memory costs as much as the copy
        self._buffers = [torch.zeros(whole.num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._tensors = [views(buffer, whole) for buffer in self._buffers]
        backends = {dist.get_backend(group) for group in self._payload_groups.values()}
        self._over_host = device.type == "cuda" and backends != {"nccl"}
        self._direct = count == 1 and not self._over_host
        self._staging = []
        if not self._direct:
            largest = max(end - start for layout in self._layouts.values() for start, end in layout.buckets)
            self._staging = [
                torch.zeros(
                    largest,
                    dtype=torch.uint8,
                    device="cpu" if self._over_host else device,
                    pin_memory=self._over_host,
                )
                for _ in range(_IN_FLIGHT)
            ]
        self._free = threading.Semaphore(2)
        self._released: int | None = None
        self._version: int | None = None
        self._thread = threading.Thread(target=self._run, name="weight receiver", daemon=True)
        self._thread.start()

    def release(self, version: int) -> None:
        """The engine has swapped to `version`: the buffer of the version before may be overwritten."""
        if self._released is not None:
            if version != self._released + 1:
                raise RuntimeError(f"released version {version} after {self._released}")
            self._free.release()
        self._released = version

    def join(self, *, timeout_s: float = 20.0) -> None:
        """Wait for the end of the senders; raises if it does not come in time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"weight senders {list(self._meta_groups)} did not say the end within {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            with self._stream():
                while self._receive_version():
                    pass
        except Exception as error:
            self._failed(error)

    def _stream(self) -> torch.cuda.StreamContext | nullcontext[None]:
        if self._device.type != "cuda":
            return nullcontext()
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(torch.cuda.Stream(self._device))

    @torch.no_grad()
    def _receive_version(self) -> bool:
        version, started, wait_s = None, 0.0, 0.0
        checksums: list[int] = []
        slot = 0
        for sender in self._meta_groups:
            header = self._header(sender, version)
            if header == END:
                version = END
                continue
            if version is None:
                version = header
                started = time.perf_counter()
                self._free.acquire()  # unblocked by `release`
                wait_s = time.perf_counter() - started
                slot = version % 2
            receive = self._receive_delta if self._is_delta else self._receive_shard
            checksums += receive(sender, version, self._buffers[slot])
        if version == END:
            return False
        assert version is not None
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._version = version
        self.report = ReceiveReport(
            version=version,
            num_bytes=sum(layout.num_bytes for layout in self._layouts.values()),
            wait_s=wait_s,
            receive_s=time.perf_counter() - started - wait_s,
            received_bytes=self._received_bytes,
        )
        self._received_bytes = 0
        self._deliver(version, self._tensors[slot], checksums)
        return True

    def _header(self, sender: int, expected: int | None) -> int:
        header = torch.empty(_HEADER_LENGTH, dtype=torch.int64)
        dist.broadcast(header, sender, group=self._meta_groups[sender])
        magic, version, num_buckets, num_bytes, digest, self._is_delta, num_tensors, _ = header.tolist()
        if magic != MAGIC:
            raise RuntimeError(f"weights header from rank {sender} begins with {magic:#x}, expected {MAGIC:#x}")
        layout = self._layouts[sender]
        here = (len(layout.pieces), len(layout.buckets), layout.num_bytes)
        if digest != self._hash or here != (num_tensors, num_buckets, num_bytes):
            raise RuntimeError(
                f"rank {sender} sends {num_tensors} tensors in {num_buckets} buckets, {num_bytes} bytes; rank "
                f"{self._rank} expects {here[0]} in {here[1]}, {here[2]} bytes: names, shapes or types of the weights "
                "differ between trainer and engine"
            )
        if expected is None and version != END and self._version is not None:
            expected = self._version + 1
        if expected is not None and version != expected:
            raise RuntimeError(
                f"rank {sender} sends weights of version {version}, expected {expected}: a version is never skipped or "
                "repeated"
            )
        return version

    def _receive_shard(self, sender: int, version: int, whole: Tensor) -> list[int]:
        layout = self._layouts[sender]
        posted: deque[tuple[int, Tensor, dist.Work]] = deque()
        sums: list[Tensor] = []

        def finish() -> None:
            bucket, data, work = posted.popleft()
            work.wait()
            if bucket == 0 and (came := int(data[:8].view(torch.int64))) != version:
                raise RuntimeError(f"weights from rank {sender} begin with version {came}, the header said {version}")
            sums.append(_bucket_checksum(data, 0, len(data), first=bucket == 0))
            self._received_bytes += len(data)
            if not self._direct:
                self._place(layout, bucket, data, whole)

        for bucket, (start, end) in enumerate(layout.buckets):
            data = whole[start:end] if self._direct else self._staging[bucket % _IN_FLIGHT][: end - start]
            work = dist.broadcast(data, sender, group=self._payload_groups[sender], async_op=True)
            posted.append((bucket, data, work))
            if len(posted) == _IN_FLIGHT:
                finish()
        while posted:
            finish()
        return self._verify(sender, version, torch.stack(sums).tolist())

    def _receive_delta(self, sender: int, version: int, whole: Tensor) -> list[int]:
        """On top of the version before, which the other buffer holds."""
        layout, word = self._layouts[sender], word_of(self._specs)
        if self._version is None:
            raise RuntimeError(f"rank {sender} sends a delta of weights {version} to an engine that has none before")
        base = self._buffers[(version - 1) % 2]
        table = torch.zeros(len(layout.buckets), 2, dtype=torch.int64)
        dist.broadcast(table, sender, group=self._meta_groups[sender])
        payload = torch.zeros(
            payload_bytes(table, word=word), dtype=torch.uint8, device="cpu" if self._over_host else self._device
        )
        for start in range(0, len(payload), layout.bucket_bytes):
            piece = payload[start : start + layout.bucket_bytes]
            dist.broadcast(piece, sender, group=self._payload_groups[sender])
        if (came := int(payload[:8].view(torch.int64))) != version:
            raise RuntimeError(f"weights from rank {sender} begin with version {came}, the header said {version}")
        self._received_bytes += len(payload) + table.nbytes
        for bucket in range(len(layout.buckets)):
            for _, _, at, num in self._overlaps(layout, bucket):
                whole[at : at + num].copy_(base[at : at + num])
        words = whole.view(word)
        for positions, new in decode(Delta(table, payload), layout, word=word):
            words[self._in_whole(layout, positions, word).to(self._device)] = new.to(self._device)
        sums = []
        for bucket, (start, end) in enumerate(layout.buckets):
            data = torch.zeros(end - start, dtype=torch.uint8, device=self._device)
            for first, last, at, num in self._overlaps(layout, bucket):
                data[first - start : last - start].copy_(whole[at : at + num])
            sums.append(_bucket_checksum(data, 0, len(data), first=bucket == 0))
        return self._verify(sender, version, torch.stack(sums).tolist())

    def _in_whole(self, layout: Layout, positions: Tensor, word: torch.dtype) -> Tensor:
        """Words of a shard as words of the whole model."""
        if not len(positions):
            return positions
        pieces = [piece for piece in layout.pieces if piece.num_bytes]
        starts = torch.tensor([piece.start // word.itemsize for piece in pieces], device=positions.device)
        moves = [self._starts[p.spec.name] + p.first_row * p.spec.row_bytes - p.start for p in pieces]
        shifts = torch.tensor(moves, device=positions.device) // word.itemsize
        return positions + shifts[torch.searchsorted(starts, positions, right=True) - 1]

    def _overlaps(self, layout: Layout, bucket: int) -> Iterator[tuple[int, int, int, int]]:
        """(first byte, last + 1 in the shard, first byte in the whole, bytes) of each piece in a bucket."""
        for piece, first, last in layout.overlaps[bucket]:
            at = self._starts[piece.spec.name] + piece.first_row * piece.spec.row_bytes + first - piece.start
            yield first, last, at, last - first

    def _place(self, layout: Layout, bucket: int, data: Tensor, whole: Tensor) -> None:
        """Copy the pieces in a bucket to where the engine's tensors have them."""
        start = layout.buckets[bucket][0]
        for first, last, at, num in self._overlaps(layout, bucket):
            whole[at : at + num].copy_(data[first - start : last - start])

    def _verify(self, sender: int, version: int, received: list[int]) -> list[int]:
        trailer = torch.empty(2 + len(received), dtype=torch.int64)
        dist.broadcast(trailer, sender, group=self._meta_groups[sender])
        magic, trailer_version, *sent = trailer.tolist()
        if (magic, trailer_version) != (MAGIC, version):
            raise RuntimeError(f"weights of version {version} from rank {sender} end with version {trailer_version}")
        for bucket, (theirs, ours) in enumerate(zip(sent, received, strict=True)):
            if theirs != ours:
                raise RuntimeError(
                    f"weights of version {version} from rank {sender} were damaged on the way to rank {self._rank}: "
                    f"bucket {bucket} with {_shorten(self._layouts[sender].names(bucket))} has checksum {ours:#x}, the "
                    f"sender computed {theirs:#x}"
                )
        return received


def gather_and_broadcast(
    parameters: Mapping[str, Tensor] | None,  # on trainer ranks, all of which call it; None on the others
    *,
    specs: Sequence[TensorSpec],
    source: int,  # the sender rank
    group: ProcessGroup | None,  # {source} + receivers; None on other trainers
) -> dict[str, Tensor]:
    """The simple way, as a reference: gather each tensor on the trainers, broadcast it whole. 3 to 4 times slower."""
    received = {}
    for spec in specs:
        full = torch.empty(spec.shape, dtype=spec.dtype)
        if parameters is not None:
            parameter = parameters[spec.name].detach()
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            full = full.to("cpu", spec.dtype).contiguous()
        if group is not None:
            dist.broadcast(full, source, group=group)
        received[spec.name] = full
    return received


def _bucket_checksum(buffer: Tensor, start: int, end: int, *, first: bool | None = None) -> Tensor:
    """Of a bucket's weights: the version block is checked on its own, so that equal weights have equal checksums."""
    skip = ALIGN_BYTES if (start == 0 if first is None else first) else 0
    return checksum(buffer[start + skip : end])


def _shorten(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 6 else [*names[:3], f"… {len(names) - 5} more …", *names[-2:]])
