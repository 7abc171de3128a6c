"""Weights by way of the file system."""

import queue
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.config import load
from spmd_rl.folders import written_aside
from spmd_rl.orchestrator.ship_hold import may_ship
from spmd_rl.weights.disk import FILE, DiskReceiver, DiskSender, folder_of
from spmd_rl.weights.wire import Received, SendReport

LIMIT_S = 20.0
ROOT = Path(__file__).parents[2]


def raises(error: Exception) -> None:
    raise error


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), float(version)), "b": torch.arange(7) + version}


def make_sender(tmp_path: Path, reports: list[SendReport], kept: int = 2) -> DiskSender:
    versions = iter(range(20))

    def export(folder: Path) -> None:
        with written_aside(folder) as aside:
            save_file(weights_of(next(versions)), aside / FILE)

    return DiskSender(weights=tmp_path, export=export, kept=kept, reports=True, sent=reports.append)


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
    assert sorted(tmp_path.iterdir()) == [folder_of(tmp_path, version) for version in (2, 3)]


@pytest.mark.parametrize(("gate", "ahead"), [("admission", 1), ("ship", 0), ("ship", 3)])
def test_however_far_trainers_are_ahead_the_live_version_and_the_next_one_are_there(
    tmp_path: Path, gate: str, ahead: int
) -> None:
    settings = ["staleness.gate=" + gate, f"staleness.max_staleness={ahead if gate == 'ship' else 5}"]
    config = load(ROOT / "configs" / "tiny_cpu.toml", settings)
    sender = make_sender(tmp_path, [], config.weights_kept)
    live = 2
    for version in range(live + 1):
        sender.publish(version)
    shipped = [batch for batch in range(live, 9) if may_ship(batch, version=live, max_staleness=config.batches_ahead)]
    assert len(shipped) == ahead + 1
    for batch in shipped:
        sender.publish(batch + 1)
    assert folder_of(tmp_path, live).is_dir() and folder_of(tmp_path, live + 1).is_dir()
    assert len(list(tmp_path.iterdir())) == config.weights_kept


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
