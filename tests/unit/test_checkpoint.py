"""A checkpoint is complete or absent at any instant, and what is not as it was written is refused by name."""

import json
import os
import pickle
import random
import shutil
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from spmd_rl.packing.messages import CheckpointWritten
from spmd_rl.ranks.trainer_rank import TrainerRank
from spmd_rl.storage import checkpoint
from spmd_rl.types import Rollout

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
]
STATE = {"path": {"version": 2}, "tasks": {"cursor": 7, "sources": {}}}


def rollouts() -> list[Rollout]:
    rollout = Rollout(env="e", task_id="t", finish_reason="stop", reward=0.5, ticket=3)
    rollout.append(np.arange(5), np.full(5, -0.1), np.full(5, 2))
    return [rollout]


def trainer_state(value: float = 1.0) -> dict[str, object]:
    return {"weight": torch.full((4, 4), value), "lr": 0.1, "num_steps": torch.tensor(2)}


def save(checkpoints: Path, version: int, value: float = 1.0) -> Path:
    folder = checkpoint.aside(checkpoints, version)
    checkpoint.save_trainer(trainer_state(value), folder / "trainer", None).result()
    checkpoint.save_orchestrator(STATE, rollouts(), folder)
    return checkpoint.complete(checkpoints, version, {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("saved"), 2)


def read(folder: Path) -> tuple[dict[str, object], float]:
    checkpoint.verify(folder)
    words, loaded = checkpoint.load_orchestrator(folder)
    assert loaded[0].token_ids.tolist() == [0, 1, 2, 3, 4]
    state = trainer_state(0.0) | {"lr": 0.0}
    checkpoint.load_trainer(state, folder / "trainer", None)
    return words, float(state["weight"].mean())


def test_what_was_saved_comes_back(saved):
    words, weight = read(saved)
    assert {name: words[name] for name in STATE} == STATE
    assert weight == 1.0
    assert checkpoint.newest(saved.parent) == (2, saved)


def test_the_copy_is_that_of_the_moment_of_the_call(tmp_path):
    state = trainer_state(1.0)
    saving = checkpoint.save_trainer(state, tmp_path / "trainer", None)
    state["weight"].zero_()
    saving.result()
    checkpoint.load_trainer(state, tmp_path / "trainer", None)
    assert float(state["weight"].mean()) == 1.0


def test_only_the_newest_are_kept(saved, tmp_path):
    for version in (1, 2, 3, 4):
        copy = tmp_path / f"step_{version}"
        shutil.copytree(saved, copy)
    (tmp_path / "step_2" / "COMPLETE").unlink()
    checkpoint.remove_old(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_4"]


def in_child(act, die_at: int) -> bool:
    """Run `act` in a fork that dies like kill -9 at its n-th touch of the file system; True if it came to its end."""
    child = os.fork()
    if child == 0:
        count = 0

        def audit(event: str, args: tuple) -> None:
            nonlocal count
            if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
                count += 1
                if count == die_at:
                    os._exit(9)

        sys.addaudithook(audit)
        act()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, 9)
    return code == 0


def killed_while_saving(saved: Path, folder: Path, version: int, die_at: int) -> bool:
    """The trainers' half is there, and rank 0 dies at some point of adding its own and completing."""
    aside = checkpoint.aside(folder, version)
    shutil.copytree(saved / "trainer", aside / "trainer")

    def act() -> None:
        checkpoint.save_orchestrator({**STATE, "new": True}, rollouts(), aside)
        checkpoint.complete(folder, version, {})
        checkpoint.remove_old(folder, 1)

    return in_child(act, die_at)


def check_kill_points(saved: Path, folder: Path, version: int, points: range) -> list[bool]:
    """At every point one whole checkpoint is there; returns at which it was the new one."""
    new = []
    for die_at in points:
        checkpoints = folder / str(die_at)
        shutil.copytree(saved, checkpoints / "step_2")
        ended = killed_while_saving(saved, checkpoints, version, die_at)
        checkpoint.tidy(checkpoints)
        found, path = checkpoint.newest(checkpoints)
        words, _ = read_words(path)
        new.append("new" in words)
        assert found == (version if new[-1] else 2)
        assert not list(checkpoints.glob("*.tmp"))
        assert new[-1] or not ended
    return new


def read_words(path: Path) -> tuple[dict[str, object], list[Rollout]]:
    checkpoint.verify(path)
    return checkpoint.load_orchestrator(path)


@pytest.mark.parametrize("version", [2, 3])
def test_a_kill_while_saving_leaves_a_whole_checkpoint(saved, tmp_path, version):
    new = check_kill_points(saved, tmp_path, version, range(1, 40, 8))
    assert not new[0]
    assert new[-1]


@pytest.mark.full
@pytest.mark.parametrize("version", [2, 3])
def test_a_kill_at_every_point_of_saving_leaves_a_whole_checkpoint(saved, tmp_path, version):
    new = check_kill_points(saved, tmp_path, version, range(1, 51))
    assert new == sorted(new)


def mutate(folder: Path, rng: random.Random) -> str:
    """Damage one file in one of many ways; what was done."""
    path = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
    data = bytearray(path.read_bytes())
    how = rng.choice(["remove", "truncate", "flip", "grow", "empty", "text", "other"])
    match how:
        case "remove":
            path.unlink()
            return f"remove {path.name}"
        case "truncate":
            data = data[: rng.randrange(len(data))]
        case "flip":
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case "grow":
            data += bytes(rng.randrange(1, 100))
        case "empty":
            data = bytearray()
        case "text":
            data = bytearray(rng.choice([b"{}", b"[]", b"null", b"\xff\xfe", b'{"schema": 3}', b"[" * 5000]))
        case "other":
            data = bytearray(rng.randbytes(len(data)))
    path.write_bytes(data)
    return f"{how} {path.name}"


def test_whatever_is_damaged_is_refused_in_a_line_that_names_the_place(saved, tmp_path):
    for seed in range(100):
        folder = tmp_path / str(seed) / "step_2"
        shutil.copytree(saved, folder)
        done = mutate(folder, random.Random(seed))
        if checkpoint.newest(folder.parent) is None:
            assert done == "remove COMPLETE"
            continue
        try:
            checkpoint.verify(folder)
        except ValueError as error:
            assert str(folder) in str(error), done
            assert "\n" not in str(error), done
        else:  # white space in the marker, a number's sign of zero: as good as before
            assert read(folder)[1] == 1.0, done


def test_other_schemas_and_renamed_folders_are_refused(saved, tmp_path):
    other = tmp_path / "step_2"
    shutil.copytree(saved, other)
    marker = json.loads((other / "COMPLETE").read_text())
    (other / "COMPLETE").write_text(json.dumps({**marker, "schema": 1}))
    with pytest.raises(ValueError, match="step_2: checkpoint schema 1, this version reads 3"):
        checkpoint.verify(other)
    shutil.copytree(saved, tmp_path / "step_9")
    with pytest.raises(ValueError, match="marker says version 2"):
        checkpoint.verify(tmp_path / "step_9")


def test_what_the_trainers_summed_up_is_not_read_again_but_is_what_a_resume_looks_for(saved, tmp_path):
    marker = json.loads((saved / "COMPLETE").read_text())
    known = checkpoint.sums(saved / "trainer", 0)
    assert known == {name: marker["files"][f"trainer/{name}"] for name in ("__0_0.distcp",)}

    def complete(size: int, crc: int) -> Path:
        shutil.copytree(saved, checkpoint.aside(tmp_path, 2))
        (checkpoint.aside(tmp_path, 2) / "COMPLETE").unlink()
        return checkpoint.complete(tmp_path, 2, {"__0_0.distcp": [size, crc]})

    ((size, crc),) = known.values()
    assert json.loads((complete(size, crc) / "COMPLETE").read_text()) == marker
    with pytest.raises(ValueError, match=r"__0_0\.distcp: its CRC-32 is not that of what was written"):
        checkpoint.verify(complete(size, crc + 1))
    with pytest.raises(RuntimeError, match=rf"__0_0\.distcp: {size} bytes, its trainer wrote {size + 1}"):
        complete(size + 1, crc)


def test_without_the_trainers_half_nothing_is_made_complete(tmp_path):
    checkpoint.save_orchestrator(STATE, rollouts(), checkpoint.aside(tmp_path, 2))
    with pytest.raises(FileNotFoundError, match="the trainers' half is missing"):
        checkpoint.complete(tmp_path, 2, {})
    assert checkpoint.newest(tmp_path) is None


def test_a_save_that_failed_is_told_as_a_failure_and_never_as_saved(tmp_path):
    failures, sent, saving = [], [], Future()
    live = SimpleNamespace(failed=failures.append)
    run_dir, error = SimpleNamespace(checkpoints=tmp_path), OSError("the cable is out")
    rank = SimpleNamespace(_live=live, _send=sent.append, _written=threading.Event(), _run_dir=run_dir)
    saving.set_exception(error)
    TrainerRank._tell_saved(rank, CheckpointWritten, 2, tmp_path, saving)
    assert (failures, sent, rank._written.is_set()) == ([error], [], False)


class Evil:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self._mark}",)


def test_a_checkpoint_cannot_run_code(saved, tmp_path):
    mark = tmp_path / "evil"
    pickle.loads(pickle.dumps(Evil(mark)))
    mark.unlink()  # it would run
    shutil.copytree(saved, tmp_path / "step_2")
    (tmp_path / "step_2" / "trainer" / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(CheckpointException, match="may not name posix"):
        checkpoint.load_trainer(trainer_state(), tmp_path / "step_2" / "trainer", None)
    evil = {**trainer_state(), "lr": Evil(mark)}
    dcp.save(evil, checkpoint_id=tmp_path / "trainer")
    with pytest.raises(CheckpointException, match="Weights only load failed"):
        checkpoint.load_trainer(trainer_state(), tmp_path / "trainer", None)
    assert not mark.exists()


def test_a_checkpoint_names_nothing_but_tables_and_points_nowhere_else(saved, tmp_path):
    shutil.copytree(saved / "trainer", tmp_path / "trainer")
    table = tmp_path / "trainer" / ".metadata"
    metadata = pickle.loads(table.read_bytes())
    table.write_bytes(pickle.dumps(dcp.FileSystemWriter))
    with pytest.raises(CheckpointException, match=r"may not name torch\..*\.FileSystemWriter"):
        checkpoint.load_trainer(trainer_state(), tmp_path / "trainer", None)
    table.write_bytes(b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x09os.system\x93.")
    with pytest.raises(CheckpointException, match=r"may not name torch\..*\.os\.system"):
        checkpoint.load_trainer(trainer_state(), tmp_path / "trainer", None)
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, relative_path=f"../trainer/{info.relative_path}")
    table.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match=r"may not point at \.\./trainer/"):
        checkpoint.load_trainer(trainer_state(), tmp_path / "trainer", None)
