"""Weights by way of the file system."""

import queue
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.folders import written_aside
from spmd_rl.weights.disk import FILE, KEPT, DiskReceiver, DiskSender, folder_of
from spmd_rl.weights.wire import Received, SendReport

LIMIT_S = 20.0


def raises(error: Exception) -> None:
    raise error


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), float(version)), "b": torch.arange(7) + version}


def make_sender(tmp_path: Path, reports: list[SendReport]) -> DiskSender:
    versions = iter(range(10))

    def export(folder: Path) -> None:
        with written_aside(folder) as aside:
            save_file(weights_of(next(versions)), aside / FILE)

    return DiskSender(weights=tmp_path, export=export, reports=True, sent=reports.append)


def make_receiver(tmp_path: Path, arrived: queue.Queue[Received]) -> DiskReceiver:
    device = torch.device("cpu")
    deliver = lambda version, fetch: arrived.put(fetch())  # noqa: E731
    made = DiskReceiver(weights=tmp_path, device=device, deliver=deliver, failed=raises)
    made.start()
    return made


def test_a_reader_gets_the_versions_it_is_told_of_and_old_ones_go(tmp_path: Path) -> None:
    reports: list[SendReport] = []
    arrived: queue.Queue[Received] = queue.Queue()
    sender, receiver = make_sender(tmp_path, reports), make_receiver(tmp_path, arrived)
    for version in range(4):
        sender.publish(version)
        receiver.take(version)
        received = arrived.get(timeout=LIMIT_S)
        assert received.version == version
        assert all(torch.equal(received.tensors[name], tensor) for name, tensor in weights_of(version).items())
        assert tuple(received.checksums) == reports[version].checksums
        assert reports[version].update_norm == pytest.approx((91**0.5, 22**0.5)[version > 0])
    receiver.join()
    assert sorted(tmp_path.iterdir()) == [folder_of(tmp_path, version) for version in range(4 - KEPT, 4)]


def test_a_file_that_was_changed_has_other_sums(tmp_path: Path) -> None:
    reports: list[SendReport] = []
    arrived: queue.Queue[Received] = queue.Queue()
    make_sender(tmp_path, reports).publish(0)
    path = folder_of(tmp_path, 0) / FILE
    data = bytearray(path.read_bytes())
    data[-3] ^= 1  # in one of the two tensors
    path.write_bytes(data)
    receiver = make_receiver(tmp_path, arrived)
    receiver.take(0)
    sums = arrived.get(timeout=LIMIT_S).checksums
    receiver.join()
    assert [ours == theirs for ours, theirs in zip(sums, reports[0].checksums, strict=True)].count(False) == 1
