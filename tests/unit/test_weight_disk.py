"""Weights by way of the file system."""

import queue
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.config import load
from spmd_rl.files.atomic_folder import written_aside
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

    def export(folder: Path) -> dict[str, torch.Tensor]:
        tensors = weights_of(next(versions))
        with written_aside(folder) as aside:
            save_file(tensors, aside / FILE)
        return tensors

    return DiskSender(weights=tmp_path, export=export, kept=kept, reports=True, sent=reports.append)


def make_receiver(
    tmp_path: Path,
    arrived: queue.Queue[Received | Exception],
    failed: Callable[[Exception], None] = raises,
    seen_s: float = LIMIT_S,
) -> DiskReceiver:
    made = DiskReceiver(
        weights=tmp_path,
        device=torch.device("cpu"),
        deliver=lambda version, fetch: arrived.put(fetch()),
        failed=failed,
        sender=4,
        rank=0,
        seen_s=seen_s,
    )
    made.start()
    return made


def change(path: Path) -> None:
    """One bit of "a", which comes last: of byte 57 of 60."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_a_reader_gets_the_versions_it_is_told_of_and_old_ones_go(tmp_path: Path) -> None:
    reports: list[SendReport] = []
    arrived: queue.Queue[Received] = queue.Queue()
    sender, receiver = make_sender(tmp_path, reports), make_receiver(tmp_path, arrived)
    for version in range(4):
        sender.publish(version)
        receiver.take(version, reports[version].checksums)
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


def test_a_file_that_was_damaged_is_not_delivered_and_tensor_ranks_and_sums_are_named(tmp_path: Path) -> None:
    reports: list[SendReport] = []
    arrived: queue.Queue[Received | Exception] = queue.Queue()
    make_sender(tmp_path, reports).publish(0)
    change(folder_of(tmp_path, 0) / FILE)
    receiver = make_receiver(tmp_path, arrived, failed=arrived.put)
    receiver.take(0, reports[0].checksums)
    error = arrived.get(timeout=LIMIT_S)
    sums = "a has checksum 0xf00, the sender computed 0x0"  # bit 8 of word 7, which weighs 15
    assert f"version 0 from rank 4 were damaged on the way to rank 0: {sums}" in str(error)
    assert error.__notes__ == [f"reading {folder_of(tmp_path, 0) / FILE}"]
    assert arrived.empty()


def test_what_is_written_is_compared_with_what_the_trainer_holds(tmp_path: Path) -> None:
    """A file that is whole, but of other weights."""

    def export(folder: Path) -> dict[str, torch.Tensor]:
        with written_aside(folder) as aside:
            save_file({**weights_of(0), "b": torch.arange(7) + 1}, aside / FILE)
        return weights_of(0)

    reports: list[SendReport] = []
    arrived: queue.Queue[Received | Exception] = queue.Queue()
    DiskSender(weights=tmp_path, export=export, kept=2, reports=True, sent=reports.append).publish(0)
    receiver = make_receiver(tmp_path, arrived, failed=arrived.put)
    receiver.take(0, reports[0].checksums)
    assert "damaged on the way to rank 0: b has checksum" in str(arrived.get(timeout=LIMIT_S))


def test_weights_stay_what_they_are_when_their_file_changes(tmp_path: Path) -> None:
    reports: list[SendReport] = []
    arrived: queue.Queue[Received | Exception] = queue.Queue()
    make_sender(tmp_path, reports).publish(0)
    receiver = make_receiver(tmp_path, arrived)
    receiver.take(0, reports[0].checksums)
    received = arrived.get(timeout=LIMIT_S)
    change(folder_of(tmp_path, 0) / FILE)
    assert all(torch.equal(received.tensors[name], tensor) for name, tensor in weights_of(0).items())
    receiver.join()


def test_a_folder_that_this_node_sees_late_is_waited_for(tmp_path: Path) -> None:
    reports: list[SendReport] = []
    arrived: queue.Queue[Received | Exception] = queue.Queue()
    make_sender(tmp_path / "there", reports).publish(0)
    receiver = make_receiver(tmp_path / "here", arrived)
    receiver.take(0, reports[0].checksums)
    with pytest.raises(queue.Empty):
        arrived.get(timeout=0.3)
    (tmp_path / "there").rename(tmp_path / "here")
    assert arrived.get(timeout=LIMIT_S).version == 0
    receiver.join()


def test_a_folder_that_never_comes_is_named_with_the_time(tmp_path: Path) -> None:
    arrived: queue.Queue[Received | Exception] = queue.Queue()
    receiver = make_receiver(tmp_path, arrived, failed=arrived.put, seen_s=0.25)
    receiver.take(3, (1, 2))
    error = str(arrived.get(timeout=LIMIT_S))
    assert f"{tmp_path}/step_3/model.safetensors was written, but" in error and "rank 0 does not see it 0.25 s" in error


def test_the_trainer_is_held_until_all_is_done(tmp_path: Path) -> None:
    now = 0.0

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    def export(folder: Path) -> dict[str, torch.Tensor]:
        passes(3.0)
        with written_aside(folder) as aside:
            save_file(weights_of(0), aside / FILE)
        return weights_of(0)

    sender = DiskSender(
        weights=tmp_path, export=export, kept=2, reports=True, sent=lambda report: passes(5.0), clock=lambda: now
    )
    assert sender.publish(0) == 8.0
    assert sender.report.send_s == 3.0
