"""Weights by way of the file system: weights/step_<V>/, an ordinary Hugging Face folder for each version.

For engines that no process group reaches, outside the job or inside it.  A folder is complete or absent; the newest are
kept, the live one and the next among them however far the trainers are ahead.  Who tells readers of a version polls for
its folder.  Same interface as WeightSender and WeightReceiver; the checksums are of the tensors as both sides read them
back.  Knows nothing of ranks or of who reads.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from spmd_rl.weights.checksum import tensor_checksum
from spmd_rl.weights.delta import squared_change
from spmd_rl.weights.wire import END, Deliver, Failed, Received, SendReport

FILE = "model.safetensors"


def folder_of(weights: Path, version: int) -> Path:
    return weights / f"step_{version}"


class DiskSender:
    """On every trainer rank, for gathering takes them all; one of them reports."""

    def __init__(
        self,
        *,
        weights: Path,
        export: Callable[[Path], None],  # writes the folder, complete or not at all; all trainer ranks together
        kept: int,  # versions
        reports: bool,
        sent: Callable[[SendReport], None],
    ) -> None:
        self.report: SendReport | None = None
        self._weights, self._export, self._kept, self._reports, self._sent = weights, export, kept, reports, sent

    def publish(self, version: int) -> float:
        """Write the version; the trainer is held as long.  Returns the seconds."""
        start = time.perf_counter()
        folder = folder_of(self._weights, version)
        self._export(folder)
        hold_s = time.perf_counter() - start
        if self._reports:
            sums, norm = _compared(folder / FILE, folder_of(self._weights, version - 1) / FILE)
            self.report = SendReport(
                version=version,
                num_bytes=(folder / FILE).stat().st_size,
                send_s=hold_s,
                sent_bytes=(folder / FILE).stat().st_size,
                update_norm=norm,
                checksums=tuple(sums),
            )
            shutil.rmtree(folder_of(self._weights, version - self._kept), ignore_errors=True)
            self._sent(self.report)
        return hold_s

    def wait(self) -> SendReport | None:
        return self.report

    def close(self) -> None:
        """Nothing waits for an end: readers are told of versions one by one."""


class DiskReceiver:
    """Reads the versions that it is told of, in a thread, and delivers them one by one."""

    def __init__(self, *, weights: Path, device: torch.device, deliver: Deliver, failed: Failed) -> None:
        self._weights, self._device, self._deliver, self._failed = weights, device, deliver, failed
        self._told: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="weight reader", daemon=True)

    def start(self) -> None:
        """From here on versions are delivered."""
        self._thread.start()

    def take(self, version: int) -> None:
        """Its folder is there."""
        self._told.put(version)

    def release(self, version: int) -> None:
        """Each version has memory of its own."""

    def join(self, *, timeout_s: float = 20.0) -> None:
        self._told.put(END)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"still reading weights from {self._weights} after {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            while (version := self._told.get()) != END:
                self._read(version)
        except Exception as error:
            self._failed(error)

    def _read(self, version: int) -> None:
        start = time.perf_counter()
        path = folder_of(self._weights, version) / FILE
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        checksums = [int(tensor_checksum(tensor)) for tensor in tensors.values()]
        size = path.stat().st_size
        received = Received(
            version=version,
            tensors={name: tensor.to(self._device) for name, tensor in tensors.items()},
            checksums=checksums,
            num_bytes=size,
            receive_s=time.perf_counter() - start,
            received_bytes=size,
        )
        self._deliver(version, lambda: received)


def _compared(new: Path, old: Path) -> tuple[list[int], float]:
    """Checksums of the tensors in a file, and the L2 norm of their change (of themselves if there is no old one)."""
    before = safe_open(old, "pt") if old.exists() else None
    sums, squares = [], 0.0
    with safe_open(new, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name)
            sums.append(int(tensor_checksum(tensor)))
            was = before.get_tensor(name) if before is not None else torch.zeros_like(tensor)
            squares += float(squared_change(tensor, was))
    return sums, squares**0.5
