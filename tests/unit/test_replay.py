import dataclasses
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from spmd_rl import config as config_module
from spmd_rl.cli import main
from spmd_rl.commands.replay import logged, newest_until, replay, train_again
from spmd_rl.demo import tiny_model
from spmd_rl.files import fingerprint
from spmd_rl.packing import packing
from spmd_rl.ranks.build_trainer import make_trainer
from spmd_rl.storage import batch_log, history
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.types import Batch
from tests.unit.test_trainer import CPU, rollout

STEPS, RANKS = 3, 2


def add_start(run_dir: RunDir, config: config_module.Config, version: int = 0) -> None:
    weights = fingerprint.weights_digest(Path(config.model.path))
    history.add(run_dir, config, version=version, time="2026-01-01T00:00:00Z", weights=weights, resumed=version > 0)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of two trainer ranks, two minibatches and two epochs, as it lies on disk."""
    root = tmp_path_factory.mktemp("run")
    tiny_model.make(root / "tiny")
    config = config_module.from_tree(
        {
            "model": {"path": str(root / "tiny")},
            "env": {"a": {"path": "m:C"}},
            "topology": {"trainer": RANKS},
            "trainer": {"num_minibatches": 2, "num_epochs": 2, "learning_rate": 1e-3, "kl_coefficient": 0.1},
        }
    )
    run_dir = RunDir(root / "run")
    run_dir.create()
    add_start(run_dir, config)
    trainer = make_trainer(config, device=CPU)
    for n in range(STEPS):
        rollouts = [rollout(10 * n + i, 2 + i, 5 + 3 * i, version=n) for i in range(8)]
        rollouts[3].finish_reason = "error"
        batch = Batch(index=n, rollouts=rollouts, advantages=np.linspace(-1, 1, 8, dtype=np.float32))
        packed = batch_log.write(run_dir.batches, batch, lambda r: not r.failed, num_minibatches=2)
        metrics = train_again(trainer, packing.shares(packed, RANKS, width=128), n)
        assert metrics["tokens"] == sum(r.num_trainable for r in rollouts if not r.failed)
        line = {"kind": "step", "version": n + 1, **{f"trainer/{k}": v for k, v in metrics.items()}}
        with open(run_dir.metrics, "a") as file:
            file.write(json.dumps(line) + "\n")
    return run_dir


def test_any_logged_batch_comes_to_the_logged_loss(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run_dir.path), "--step", str(STEPS - 1)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()[-STEPS - 1 :]
    assert first.startswith("version 0 from")
    for n, line in enumerate(lines):
        assert line.startswith(f"batch {n}  loss ")
        assert line.count("difference +0.0e+00") == 2  # loss and gradient norm
    assert logged(run_dir, 2)["version"] == 2 and logged(run_dir, 9) == {}


def test_a_changed_batch_shows(run_dir: RunDir, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = RunDir(tmp_path / "run")
    other.create()
    add_start(other, config_module.load(run_dir.config))
    other.metrics.write_text(run_dir.metrics.read_text())
    packed = batch_log.read(run_dir.batches, 0)
    packing.save(dataclasses.replace(packed, advantage=2 * packed.advantage), other.batches / "step_0.safetensors")
    replay(other.path, 0)
    assert "difference +0.0e+00" not in capsys.readouterr().out


def test_members_that_are_not_usable_stay_so_in_the_log(run_dir: RunDir) -> None:
    assert batch_log.read(run_dir.batches, 1).usable.tolist() == [True] * 3 + [False] + [True] * 4
    entries = json.loads((run_dir.batches / "step_1.json").read_text())["rollouts"]
    assert [entry["usable"] for entry in entries].count(False) == 1


def test_what_is_not_there_is_said(run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"step_7.safetensors: no such batch; logged are 0 … 2"):
        replay(run_dir.path, 7)
    with pytest.raises(ValueError, match="is no run directory"):
        replay(tmp_path, 0)


def test_weights_come_from_the_newest_checkpoint_before_the_step(tmp_path: Path) -> None:
    for version in (2, 4):
        (tmp_path / f"step_{version}").mkdir()
        (tmp_path / f"step_{version}" / "COMPLETE").touch()
    (tmp_path / "step_3").mkdir()
    assert [newest_until(tmp_path, v)[0] for v in (1, 2, 3, 4, 9)] == [0, 2, 2, 4, 4]
    assert newest_until(tmp_path, 1) == (0, None)


@pytest.fixture(scope="module")
def changed(run_dir: RunDir, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same batches, the last one trained by a start with another loss and other minibatches."""
    other = RunDir(tmp_path_factory.mktemp("changed") / "run")
    other.create()
    first = config_module.load(run_dir.config)
    tree = tomllib.loads(config_module.dump(first))
    tree["trainer"] |= {"loss": "reinforce", "learning_rate": 1e-2, "num_minibatches": 1, "kl_coefficient": 0.0}
    tree["topology"]["trainer"] = 1
    second = config_module.from_tree(tree)
    trainer = make_trainer(first, device=CPU)
    for index, config in enumerate([first, first, second]):
        if index == 0 or config is second:
            add_start(other, config, index)
            before, trainer = trainer, make_trainer(config, device=CPU)
            trainer.load_state_dict(before.state_dict())
        for suffix in ("safetensors", "json"):
            name = f"step_{index}.{suffix}"
            (other.batches / name).write_bytes((run_dir.batches / name).read_bytes())
        packed = batch_log.read(other.batches, index)
        if config is second:
            packed.minibatch[:] = 0
            packing.save(packed, other.batches / f"step_{index}.safetensors")
        metrics = train_again(trainer, packing.shares(packed, config.split.num_shares, width=128), index)
        line = {"kind": "step", "version": index + 1, **{f"trainer/{k}": v for k, v in metrics.items()}}
        with open(other.metrics, "a") as file:
            file.write(json.dumps(line) + "\n")
    return other


def test_a_batch_is_replayed_with_the_config_of_the_start_that_trained_it(
    changed: RunDir, run_dir: RunDir, capsys
) -> None:
    assert main(["replay", str(changed.path), "--step", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()[-5:]
    assert lines[0].endswith("with configs/start_0.toml") and lines[3].endswith("with configs/start_1.toml")
    assert all(line.count("difference +0.0e+00") == 2 for line in (lines[1], lines[2], lines[4]))
    assert abs(logged(changed, 3)["trainer/loss"] - logged(run_dir, 3)["trainer/loss"]) > 1e-4  # it was another loss


def test_other_weights_than_the_run_began_with_are_not_replayed_from(changed: RunDir, tmp_path: Path) -> None:
    model = Path(config_module.load(changed.config).model.path)
    weights = (model / "model.safetensors").read_bytes()
    try:
        (model / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
        with pytest.raises(ValueError, match="does not hold the weights that the run began with: put those back"):
            replay(changed.path, 2)
    finally:
        (model / "model.safetensors").write_bytes(weights)
