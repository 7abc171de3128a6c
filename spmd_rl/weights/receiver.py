"""An engine's side of weight sync: every version from all senders, into memory that the engine does not use.

An engine goes on decoding while the next version is received.  Over NCCL a receive is posted only after the header has
come.  A version is never skipped or repeated; a checksum that differs names the tensors.  Knows nothing of engines.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.weights.delta import Delta, decode, payload_bytes, word_of
from spmd_rl.weights.layout import BUCKET_BYTES, Placement, TensorSpec, manifest_hash, shard_layout, views
from spmd_rl.weights.wire import (
    END,
    HEADER_LENGTH,
    IN_FLIGHT,
    Deliver,
    Failed,
    Header,
    Received,
    bucket_checksum,
    bucket_name,
    check_sums,
    read_header,
    read_trailer,
)


class WeightReceiver:
    """Receives every version from all senders in a thread, into the one of two buffers that is not in use.

    `deliver(version, fetch)` is called in that thread once a version is complete and verified; `fetch()` gives it.  Its
    tensors are views that stay as they are until a later version has been released: `release(v)` says that the engine
    has swapped to v, so what it used before may be overwritten.  At most one version is received ahead.
    With `in_place` there is one buffer: `deliver` is called when a version begins to come, and `fetch()`, called when
    the engine stands still, waits until it has overwritten the one before.
    With `copied` there is one buffer, which no engine computes with: `release(v)` gives it free for v + 1.
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
        ended: Callable[[], None] = lambda: None,  # in that thread, after the senders' end
        num_buffers: int = 2,  # 1 is enough for a stream of one version
        in_place: bool = False,  # one buffer for all versions; the engine waits while one comes
        copied: bool = False,  # into memory of the engine's own, before a version is released
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._meta_groups, self._payload_groups = dict(meta_groups), dict(payload_groups)
        self._deliver, self._failed, self._ended = deliver, failed, ended
        self._device = device
        self._rank = dist.get_rank()
        count = len(self._meta_groups)
        self._hash = manifest_hash(specs, num_senders=count, bucket_bytes=bucket_bytes)
        self._specs = specs
        whole = shard_layout(specs, bucket_bytes=bucket_bytes)
        self._placements = {
            sender: Placement(shard_layout(specs, index=index, count=count, bucket_bytes=bucket_bytes), whole)
            for index, sender in enumerate(self._meta_groups)
        }
        # zeros touch every page once: a first write to fresh memory costs as much as the copy
        num_buffers = 1 if in_place or copied else num_buffers
        self._buffers = [torch.zeros(whole.num_bytes, dtype=torch.uint8, device=device) for _ in range(num_buffers)]
        self._tensors = [views(buffer, whole) for buffer in self._buffers]
        backends = {dist.get_backend(group) for group in self._payload_groups.values()}
        self._over_host = device.type == "cuda" and backends != {"nccl"}
        self._direct = count == 1 and not self._over_host
        self._staging = []
        if not self._direct:
            largest = max(
                end - start for placement in self._placements.values() for start, end in placement.shard.buckets
            )
            self._staging = [
                torch.zeros(
                    largest,
                    dtype=torch.uint8,
                    device="cpu" if self._over_host else device,
                    pin_memory=self._over_host,
                )
                for _ in range(IN_FLIGHT)
            ]
        self._in_place, self._copied = in_place, copied
        self._free = threading.Semaphore(0 if in_place else num_buffers)
        self._released: int | None = None
        self._version: int | None = None
        self._arrived: Future[Received] = Future()  # of the version that comes
        self._thread = threading.Thread(target=self._run, name="weight receiver", daemon=True)

    def start(self) -> None:
        """From here on versions are delivered."""
        if self._device.type == "cuda":  # the zeros are there: the thread writes on a stream of its own
            torch.cuda.current_stream(self._device).synchronize()
        self._thread.start()

    def release(self, version: int) -> None:
        """The engine has swapped to `version`: the buffer of the version before, or `copied`, may be overwritten."""
        first = self._released is None
        if self._released is not None and version != self._released + 1:
            raise RuntimeError(f"released version {version} after {self._released}")
        self._released = version
        if self._copied or not (first or self._in_place):
            self._free.release()

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
                self._ended()
        except Exception as error:
            self._failed(error)
            if not self._arrived.done():  # frees an engine that waits for it
                self._arrived.set_exception(error)

    def _stream(self) -> torch.cuda.StreamContext | nullcontext[None]:
        if self._device.type != "cuda":
            return nullcontext()
        torch.cuda.set_device(self._device)
        return torch.cuda.stream(torch.cuda.Stream(self._device))

    @torch.no_grad()
    def _receive_version(self) -> bool:
        first, *others = self._meta_groups
        header = self._header(first, *([] if self._version is None else [self._version + 1, END]))
        if (version := header.version) == END:
            for sender in others:
                self._header(sender, END)
            return False
        arrived: Future[Received] = Future()
        self._arrived = arrived
        if self._in_place:
            self._deliver(version, partial(self._fetch_in_place, arrived))
        self._free.acquire()  # unblocked by `release`, in place by the fetch
        started = time.perf_counter()
        slot = version % len(self._buffers)
        checksums, received_bytes = [], 0
        for sender in self._meta_groups:
            if sender != first:
                header = self._header(sender, version)
            receive = self._receive_delta if header.is_delta else self._receive_shard
            sums, num_bytes = receive(sender, version, self._buffers[slot])
            checksums += sums
            received_bytes += num_bytes
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._version = version
        arrived.set_result(
            Received(
                version=version,
                tensors=self._tensors[slot],
                checksums=checksums,
                num_bytes=sum(placement.shard.num_bytes for placement in self._placements.values()),
                receive_s=time.perf_counter() - started,
                received_bytes=received_bytes,
            )
        )
        if not self._in_place:
            self._deliver(version, arrived.result)
        return True

    def _fetch_in_place(self, arrived: Future[Received]) -> Received:
        if not arrived.done():
            self._free.release()
        return arrived.result()

    def _header(self, sender: int, *expected: int) -> Header:
        words = torch.empty(HEADER_LENGTH, dtype=torch.int64)
        dist.broadcast(words, sender, group=self._meta_groups[sender])
        layout = self._placements[sender].shard
        header = read_header(words, layout=layout, manifest_hash=self._hash, sender=sender, rank=self._rank)
        if expected and header.version not in expected:
            raise RuntimeError(
                f"rank {sender} sends weights of version {header.version}, expected {expected[0]}: a version is never "
                "skipped or repeated"
            )
        return header

    def _receive_shard(self, sender: int, version: int, whole: Tensor) -> tuple[list[int], int]:
        placement = self._placements[sender]
        posted: deque[tuple[int, Tensor, dist.Work]] = deque()
        sums: list[Tensor] = []

        def finish() -> None:
            bucket, data, work = posted.popleft()
            work.wait()
            if bucket == 0 and (came := int(data[:8].view(torch.int64))) != version:
                raise RuntimeError(f"weights from rank {sender} begin with version {came}, the header said {version}")
            sums.append(bucket_checksum(data, first=bucket == 0))
            if not self._direct:
                start = placement.shard.buckets[bucket][0]
                for first, last, at in placement.spans(bucket):
                    whole[at : at + last - first].copy_(data[first - start : last - start])

        for bucket, (start, end) in enumerate(placement.shard.buckets):
            data = whole[start:end] if self._direct else self._staging[bucket % IN_FLIGHT][: end - start]
            work = dist.broadcast(data, sender, group=self._payload_groups[sender], async_op=True)
            posted.append((bucket, data, work))
            if len(posted) == IN_FLIGHT:
                finish()
        while posted:
            finish()
        return self._verify(sender, version, sums), placement.shard.num_bytes

    def _receive_delta(self, sender: int, version: int, whole: Tensor) -> tuple[list[int], int]:
        """On top of the version before, which is in the other buffer, in place in this one."""
        placement, word = self._placements[sender], word_of(self._specs)
        layout = placement.shard
        if self._version is None:
            raise RuntimeError(f"rank {sender} sends a delta of weights {version} to an engine that has none before")
        base = self._buffers[(version - 1) % len(self._buffers)]
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
        for bucket in range(len(layout.buckets) if base is not whole else 0):
            for first, last, at in placement.spans(bucket):
                whole[at : at + last - first].copy_(base[at : at + last - first])
        words = whole.view(word)
        for positions, new in decode(Delta(table, payload), layout, word=word):
            words[placement.in_whole(positions, word).to(self._device)] = new.to(self._device)
        sums = []
        for bucket, (start, end) in enumerate(layout.buckets):
            data = whole[start:end]
            if len(self._placements) > 1:
                data = torch.zeros(end - start, dtype=torch.uint8, device=self._device)
                for first, last, at in placement.spans(bucket):
                    data[first - start : last - start].copy_(whole[at : at + last - first])
            sums.append(bucket_checksum(data, first=bucket == 0))
        return self._verify(sender, version, sums), len(payload) + table.nbytes

    def _verify(self, sender: int, version: int, sums: Sequence[Tensor]) -> list[int]:
        received = torch.stack(list(sums)).tolist()
        trailer = torch.empty(2 + len(received), dtype=torch.int64)
        dist.broadcast(trailer, sender, group=self._meta_groups[sender])
        sent = read_trailer(trailer, version=version, sender=sender)
        name = partial(bucket_name, self._placements[sender].shard)
        check_sums(sent, received, name=name, version=version, sender=sender, rank=self._rank)
        return received
