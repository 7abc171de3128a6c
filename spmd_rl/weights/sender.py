"""A trainer rank's side of weight sync: its own shard, broadcast to all engines; nobody gathers.

The trainer is held only while its shard is copied into staging; a thread sends each bucket as soon as it is copied, or
what changed since the version before.  Over NCCL the trainer's own thread sends, so that its collectives keep one
order, and the trainer is held until all is sent.  A version is never skipped or repeated.  Knows nothing of trainers or
of who receives.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.weights.delta import Delta, encode, squared_change, word_of
from spmd_rl.weights.layout import BUCKET_BYTES, TensorSpec, local_rows, manifest_hash, shard_layout, views
from spmd_rl.weights.wire import END, IN_FLIGHT, MAGIC, Failed, Header, SendReport, bucket_checksum


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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if list(parameters) != [spec.name for spec in specs]:
            raise ValueError("the sender's parameters are not those of the manifest, or not in its order")
        self.report: SendReport | None = None  # of the last version that was sent
        self._parameters = dict(parameters)
        self._count = num_senders
        self._layout = shard_layout(specs, index=index, count=num_senders, bucket_bytes=bucket_bytes)
        self._hash = manifest_hash(specs, num_senders=num_senders, bucket_bytes=bucket_bytes)
        self._meta_group, self._payload_group = meta_group, payload_group
        self._failed, self._sent, self._clock = failed, sent, clock
        self._word = word_of(specs) if delta else None
        self._anchor_every = anchor_every
        self._rank = dist.get_rank()
        self._inline = dist.get_backend(payload_group) == "nccl"
        shards = next(iter(parameters.values())).device  # may be in host memory
        self._device = torch.device("cuda", torch.cuda.current_device()) if self._inline else shards
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
        self._copied = [threading.Event() for _ in self._layout.buckets]
        self._version: int | None = None
        self._error: Exception | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weight sender", daemon=True)
        if not self._inline:
            self._thread.start()

    def publish(self, version: int) -> float:
        """Copy this rank's shard and send it; all senders call it. Returns the seconds until the trainer may go on.

        Those that it waits for the send before are among them.
        """
        started = self._clock()
        self._wait()
        if version < 0 or (self._version is not None and version != self._version + 1):
            raise RuntimeError(
                f"weights of version {version} after {self._version}: a version is never skipped or repeated"
            )
        self._version = version
        for copied in self._copied:
            copied.clear()
        if not self._inline:
            self._submit(version)
        self._copy(version)
        if self._inline:
            self._send(version)
        return self._clock() - started

    def wait(self) -> SendReport | None:
        """Wait until the last version is sent; its report."""
        self._wait()
        return self.report

    def close(self) -> None:
        """Send what is left, then the end, and stop the thread."""
        self._wait()
        if self._inline:
            self._send(END)
            return
        self._submit(END)
        self._thread.join()
        self._wait()

    def _wait(self) -> None:
        self._idle.wait()
        if self._error is not None:
            raise RuntimeError(f"sending weights of version {self._version} failed: {self._error}") from self._error

    def _submit(self, version: int) -> None:
        self._idle.clear()
        self._jobs.put(version)

    def _run(self) -> None:
        version = 0
        while version != END and self._error is None:
            version = self._jobs.get()
            try:
                self._send(version)
            except Exception as error:
                self._error = error
                self._failed(error)
            self._idle.set()

    @torch.no_grad()
    def _copy(self, version: int) -> None:
        """The parameters into staging, in the order of buckets; the sending thread follows."""
        self._buffers[version % 2][:8].view(torch.int64).fill_(version)
        targets = self._targets[version % 2]
        waiting = deque(zip(self._layout.buckets, self._copied, strict=True))
        for piece, after in zip(self._layout.pieces, [*self._layout.pieces[1:], None], strict=True):
            if piece.num_rows:
                rows = local_rows(self._parameters[piece.spec.name], piece, count=self._count)
                targets[piece.spec.name].copy_(rows, non_blocking=self._device.type == "cuda")
            complete = self._layout.num_bytes if after is None else after.start
            if waiting and waiting[0][0][1] <= complete and self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            while waiting and waiting[0][0][1] <= complete:
                waiting.popleft()[1].set()

    @torch.no_grad()
    def _send(self, version: int) -> None:
        started = time.perf_counter()
        layout, new = self._layout, self._buffers[version % 2]
        delta = self._delta(version)
        header = Header.of(layout, self._hash, version=version, is_delta=delta is not None)
        dist.broadcast(header.words(), self._rank, group=self._meta_group)
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
            self._copied[bucket].wait()
            if delta is None:
                posted.append(self._broadcast_bucket(bucket, new[start:end]))
            sums.append(bucket_checksum(new[start:end], first=bucket == 0))
            if len(posted) == IN_FLIGHT:
                posted.popleft().wait()
        while posted:
            posted.popleft().wait()
        checksums = torch.stack(sums).tolist()
        dist.broadcast(torch.tensor([MAGIC, version, *checksums]), self._rank, group=self._meta_group)
        self.report = SendReport(
            version=version,
            num_bytes=layout.num_bytes,
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
        self._copied[-1].wait()
        old, new = self._buffers[(version - 1) % 2], self._buffers[version % 2]
        return encode(old, new, self._layout, word=self._word, version=version)

    def _update_norm(self, version: int) -> float:
        new, old = self._targets[version % 2], self._targets[(version - 1) % 2]
        return float(torch.stack([squared_change(tensor, old[name]) for name, tensor in new.items()]).sum().sqrt())

    def _broadcast_bucket(self, bucket: int, data: Tensor) -> dist.Work:
        work: dist.Work = dist.broadcast(data, self._rank, group=self._payload_group, async_op=True)
        return work
