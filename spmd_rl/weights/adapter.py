"""Weights of a LoRA run by what was trained: the frozen model travels once, then A and B alone.

Two streams of versions over the same groups, one after the other, each with the checks of sender.py:

    once           every tensor of the model, the chosen ones unmerged and in a type that holds them exactly
    each version   A and B in float32, and a checksum of each chosen weight as this sender's rows of it are merged

An engine's rank merges in the thread that receives, into weights that the engine does not use: the rows of one sender
at a time, in float32, by the operation of the trainer, rounded once, to the engine's type.  So it holds the bits that
would have been sent merged; the checksums prove it for each version, before it is delivered.  The price is memory, for
a receiver keeps the frozen model beside its two sets of weights.  Same interface as sender and receiver.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.weights.checksum import tensor_checksum
from spmd_rl.weights.delta import squared_change
from spmd_rl.weights.layout import BUCKET_BYTES, TensorSpec, chunk, local_rows, shard_layout, views
from spmd_rl.weights.low_rank import Lora, merged
from spmd_rl.weights.receiver import WeightReceiver
from spmd_rl.weights.sender import WeightSender
from spmd_rl.weights.wire import Deliver, Failed, Fetch, SendReport

PROOF = "merged"  # the tensor of checksums [senders, chosen weights]


def frozen_specs(specs: Sequence[TensorSpec], lora: Lora, exact: torch.dtype) -> list[TensorSpec]:
    """What travels once: the chosen weights in the type `exact`, the others as engines have them."""
    chosen = lora.chosen(specs)
    return [replace(spec, dtype=exact) if spec in chosen else spec for spec in specs]


def version_specs(specs: Sequence[TensorSpec], lora: Lora, num_senders: int) -> list[TensorSpec]:
    """What travels with each version."""
    proof = TensorSpec(PROOF, (num_senders, len(lora.chosen(specs))), torch.int64)
    return [*lora.additions(specs), proof]


class AdapterSender:
    """Given frozen parameters, additions and merged weights: memory that is up to date when it publishes."""

    def __init__(
        self,
        *,
        frozen: Mapping[str, Tensor],  # FSDP2 shards or plain tensors, as are the others
        additions: Mapping[str, Tensor],
        merged: Mapping[str, Tensor],  # at least the chosen weights
        specs: Sequence[TensorSpec],  # as engines have them
        lora: Lora,
        exact: torch.dtype,
        index: int,  # of this sender
        num_senders: int,
        meta_group: ProcessGroup,
        payload_group: ProcessGroup,
        failed: Failed,
        sent: Callable[[SendReport], None] = lambda report: None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        sender = partial(
            WeightSender,
            index=index,
            num_senders=num_senders,
            meta_group=meta_group,
            payload_group=payload_group,
            failed=failed,
            bucket_bytes=bucket_bytes,
        )
        device = next(iter(additions.values())).device
        chosen = lora.chosen(specs)
        self._index, self._count, self._merged, self._sent = index, num_senders, merged, sent
        self._pieces = shard_layout(chosen, index=index, count=num_senders).pieces
        self._last = [  # this sender's rows as engines have them
            torch.zeros(piece.num_rows, *piece.spec.shape[1:], dtype=piece.spec.dtype, device=device)
            for piece in self._pieces
        ]
        self._proof = torch.zeros(num_senders, len(chosen), dtype=torch.int64, device=device)
        self._first: WeightSender | None = sender(parameters=frozen, specs=frozen_specs(specs, lora, exact))
        self._sender = sender(
            parameters={**additions, PROOF: self._proof},
            specs=version_specs(specs, lora, num_senders),
            sent=self._tell,
        )
        self._first_bytes, self._norm = 0, 0.0

    @property
    def report(self) -> SendReport | None:
        """Of the last version that was sent."""
        return self._sender.report and self._told(self._sender.report)

    def publish(self, version: int) -> float:
        """Returns the seconds that the trainer was held; the first time, until the frozen model has arrived."""
        started = time.perf_counter()
        self._sender.wait()
        self._first_bytes = 0
        if self._first is not None:
            self._first.publish(version)
            self._first.close()
            assert self._first.report is not None  # it has published
            self._first_bytes, self._first = self._first.report.sent_bytes, None
        self._prove()
        self._sender.publish(version)
        return time.perf_counter() - started

    def wait(self) -> SendReport | None:
        self._sender.wait()
        return self.report

    def close(self) -> None:
        if self._first is not None:
            self._first.close()
        self._sender.close()

    @torch.no_grad()
    def _prove(self) -> None:
        """Checksums of what engines must come to, and how far that has moved."""
        squares = []
        for i, (piece, last) in enumerate(zip(self._pieces, self._last, strict=True)):
            rows = local_rows(self._merged[piece.spec.name], piece, count=self._count).to(last.dtype)
            squares.append(squared_change(rows, last))
            last.copy_(rows)
            self._proof[self._index, i] = tensor_checksum(last)
        self._norm = float(torch.stack(squares).sum().sqrt())

    def _told(self, report: SendReport) -> SendReport:
        return replace(report, sent_bytes=report.sent_bytes + self._first_bytes, update_norm=self._norm)

    def _tell(self, report: SendReport) -> None:
        self._sent(self._told(report))


class AdapterReceiver:
    """Delivers whole models, as WeightReceiver does."""

    def __init__(
        self,
        *,
        specs: Sequence[TensorSpec],
        lora: Lora,
        exact: torch.dtype,
        meta_groups: Mapping[int, ProcessGroup],  # by sender rank, in the order of shards
        payload_groups: Mapping[int, ProcessGroup],
        device: torch.device,
        deliver: Deliver,
        failed: Failed,
        copied: bool = False,  # see WeightReceiver: one set of weights is enough
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._specs, self._lora, self._senders = specs, lora, list(meta_groups)
        self._device, self._deliver = device, deliver
        self._frozen: dict[str, Tensor] = {}
        self._copied = copied
        self._models: list[dict[str, Tensor]] = []  # by version modulo their number
        self._make = partial(
            WeightReceiver,
            meta_groups=meta_groups,
            payload_groups=payload_groups,
            device=device,
            failed=failed,
            bucket_bytes=bucket_bytes,
        )
        frozen = frozen_specs(specs, lora, exact)
        self._receiver = self._make(specs=frozen, num_buffers=1, deliver=self._take_frozen, ended=self._go_on)

    def start(self) -> None:
        """From here on versions are delivered."""
        self._receiver.start()

    def release(self, version: int) -> None:
        self._receiver.release(version)

    def join(self, *, timeout_s: float = 20.0) -> None:
        for _ in range(2):  # of the frozen model, whose end makes the one of versions
            self._receiver.join(timeout_s=timeout_s)

    def _take_frozen(self, version: int, fetch: Fetch) -> None:
        self._frozen = fetch().tensors
        layout = shard_layout(self._specs)
        for _ in range(1 if self._copied else 2):
            model = views(torch.zeros(layout.num_bytes, dtype=torch.uint8, device=self._device), layout)
            for name, tensor in model.items():
                tensor.copy_(self._frozen[name])
            self._models.append(model)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # another thread goes on, on a stream of its own

    def _go_on(self) -> None:
        specs = version_specs(self._specs, self._lora, len(self._senders))
        self._receiver = self._make(specs=specs, deliver=self._merge, copied=self._copied)
        self._receiver.start()

    def _merge(self, version: int, fetch: Fetch) -> None:
        received, started = fetch(), time.perf_counter()
        additions = received.tensors
        model, names, sums = self._models[version % len(self._models)], [], []
        for spec in self._lora.chosen(self._specs):
            layer = spec.name.removesuffix(".weight")
            a, b, frozen = additions[f"{layer}.lora_a"], additions[f"{layer}.lora_b"], self._frozen[spec.name]
            for index in range(len(self._senders)):
                first, num = chunk(spec.num_rows, index=index, count=len(self._senders))
                rows = slice(first, first + num)
                model[spec.name][rows] = merged(frozen[rows].float(), a, b[rows], self._lora.scale)
                sums.append(tensor_checksum(model[spec.name][rows]))
            names.append(spec.name)
        ours = torch.stack(sums).view(len(names), -1).t().tolist()
        for sender, mine, theirs in zip(self._senders, ours, additions[PROOF].tolist(), strict=True):
            if wrong := [name for name, x, y in zip(names, mine, theirs, strict=True) if x != y]:
                raise RuntimeError(
                    f"weights of version {version}: {wrong[0]} and {len(wrong) - 1} more differ, as merged here, from "
                    f"what rank {sender} merged; lora.sync = 'merged' sends the trainer's bits"
                )
        seconds = received.receive_s + time.perf_counter() - started
        whole = replace(received, tensors=model, receive_s=seconds)
        self._deliver(version, lambda: whole)
