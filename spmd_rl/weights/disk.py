"""Weights by way of the file system: weights/step_<V>/, an ordinary Hugging Face folder for each version.

For engines that no process group reaches, outside the job or inside it.  A folder is complete or absent; the newest are
kept, the live one and the next among them however far the trainers are ahead.  Same interface as WeightSender and
WeightReceiver.  The checksums, one a tensor in the order of names in the file, are of what the trainers hold in memory;
readers are told them with the version, by another way than the file, and compare them with those of what they have read
before it is delivered.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from spmd_rl.weights.checksum import tensor_checksum
from spmd_rl.weights.delta import squared_change
from spmd_rl.weights.wire import END, Deliver, Failed, Received, SendReport, check_sums

FILE = "model.safetensors"
SEEN_S = 60.0  # until a folder that is there is seen on another node: for so long may an NFS client trust its cache
LOOK_S = 0.1  # between two looks meanwhile


def folder_of(weights: Path, version: int) -> Path:
    return weights / f"step_{version}"


class DiskSender:
    """On every trainer rank, for gathering takes them all; one of them reports."""

    def __init__(
        self,
        *,
        weights: Path,
        export: Callable[[Path], Mapping[str, Tensor]],  # writes the folder, complete or not at all, and gives what
        # it holds to the rank that reports; all trainer ranks together
        kept: int,  # versions
        reports: bool,
        sent: Callable[[SendReport], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.report: SendReport | None = None
        self._weights, self._export, self._kept, self._reports, self._sent = weights, export, kept, reports, sent
        self._clock = clock

    def publish(self, version: int) -> float:
        """Write the version; the trainer is held as long.  Returns the seconds."""
        start = self._clock()
        folder = folder_of(self._weights, version)
        tensors = self._export(folder)
        if self._reports:
            num_bytes = (folder / FILE).stat().st_size
            self.report = SendReport(
                version=version,
                num_bytes=num_bytes,
                send_s=self._clock() - start,
                sent_bytes=num_bytes,
                update_norm=_update_norm(tensors, folder_of(self._weights, version - 1) / FILE),
                checksums=tuple(int(tensor_checksum(tensors[name])) for name in sorted(tensors)),
            )
            shutil.rmtree(folder_of(self._weights, version - self._kept), ignore_errors=True)
            self._sent(self.report)
        return self._clock() - start

    def wait(self) -> SendReport | None:
        return self.report

    def close(self) -> None:
        """Nothing waits for an end: readers are told of versions one by one."""


class DiskReceiver:
    """Reads the versions that it is told of, in a thread, and delivers them one by one."""

    def __init__(
        self,
        *,
        weights: Path,
        loaded: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,  # by the file's names to the model's
        device: torch.device,
        deliver: Deliver,
        failed: Failed,
        sender: int,  # rank that reports
        rank: int,  # this one
        seen_s: float = SEEN_S,
    ) -> None:
        self._weights, self._loaded, self._device = weights, loaded, device
        self._deliver, self._failed = deliver, failed
        self._sender, self._rank, self._seen_s = sender, rank, seen_s
        self._told: queue.SimpleQueue[tuple[int, Sequence[int]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weight reader", daemon=True)

    def start(self) -> None:
        """From here on versions are delivered."""
        self._thread.start()

    def take(self, version: int, checksums: Sequence[int]) -> None:
        """Its folder is there, and these are the sender's checksums."""
        self._told.put((version, checksums))

    def release(self, version: int) -> None:
        """Each version has memory of its own."""

    def join(self, *, timeout_s: float = 20.0) -> None:
        self._told.put((END, ()))
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"still reading weights from {self._weights} after {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            while (told := self._told.get())[0] != END:
                self._read(*told)
        except Exception as error:
            error.add_note(f"reading {folder_of(self._weights, told[0]) / FILE}")
            self._failed(error)

    def _read(self, version: int, sent: Sequence[int]) -> None:
        start = time.perf_counter()
        path = folder_of(self._weights, version) / FILE
        self._see(path)
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            copies = (file.get_tensor(name).to(self._device, copy=True) for name in names)  # not the file's pages
            tensors = dict(zip(names, copies, strict=True))
        checksums = [int(tensor_checksum(tensor)) for tensor in tensors.values()]
        check_sums(sent, checksums, name=names.__getitem__, version=version, sender=self._sender, rank=self._rank)
        size = path.stat().st_size
        received = Received(
            version=version,
            tensors=dict(self._loaded(tensors)),
            checksums=checksums,
            num_bytes=size,
            receive_s=time.perf_counter() - start,
            received_bytes=size,
        )
        self._deliver(version, lambda: received)

    def _see(self, path: Path) -> None:
        """Wait until this node sees it: that it is there was said, but a network's file system may be behind."""
        deadline = time.perf_counter() + self._seen_s
        while not path.exists():
            if time.perf_counter() > deadline:
                raise FileNotFoundError(
                    f"{path} was written, but the node of rank {self._rank} does not see it {self._seen_s:g} s later: "
                    "is run.dir the same folder on all nodes?"
                )
            time.sleep(LOOK_S)


def _update_norm(tensors: Mapping[str, Tensor], old: Path) -> float:
    """L2 norm of their change since the file `old`; of themselves if there is none."""
    before: Any = safe_open(old, "pt") if old.exists() else None  # safetensors has no types for what it reads
    squares = (
        squared_change(tensor, torch.zeros_like(tensor) if before is None else before.get_tensor(name))
        for name, tensor in tensors.items()
    )
    total: float = sum(map(float, squares))
    norm: float = total**0.5
    return norm
