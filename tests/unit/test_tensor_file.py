"""Files and folders that a run leaves have the modes that the umask gives, whoever writes them."""

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.demo import tiny_model
from spmd_rl.files import tensor_file
from spmd_rl.files.atomic_folder import written_aside
from spmd_rl.packing import packing
from spmd_rl.storage import batch_log, checkpoint
from spmd_rl.storage.run_dir import write_whole
from spmd_rl.trainer.hf_folder import export
from spmd_rl.trainer.lora import write_adapter
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.types import Batch
from spmd_rl.weights.disk import DiskSender
from spmd_rl.weights.low_rank import Lora
from tests import fakes

TENSORS = {"b": torch.ones(3, dtype=torch.bfloat16), "a": torch.zeros(2, 2)}
ALONE = TrainerRanks(group=None, device=torch.device("cpu"), counts=True)


def exported(folder: Path) -> dict[str, torch.Tensor]:
    """From a model folder whose files only their owner may read, or nobody may write."""
    made = folder.with_name("source")
    tiny_model.make(made)
    (made / "merges.txt").write_text("{}")
    for name, mode in {"config.json": 0o600, "tokenizer.json": 0o400, "merges.txt": 0o444}.items():
        (made / name).chmod(mode)
    tensors = export(load_file(made / "model.safetensors"), ALONE, folder=folder, source=made, dtypes=None)
    shutil.rmtree(made)
    return tensors


def published(weights: Path) -> None:
    sender = DiskSender(weights=weights, export=exported, kept=2, reports=True, sent=lambda report: None)
    weights.mkdir()
    sender.publish(0)


def saved(checkpoints: Path) -> None:
    folder = checkpoint.aside(checkpoints, 1)
    checkpoint.save_trainer({"weight": torch.ones(4)}, folder / "trainer", None).result()
    checkpoint.save_orchestrator({}, [fakes.rollout(fakes.work())], folder)
    checkpoint.complete(checkpoints, 1, {})


def folder_with_json(folder: Path) -> None:
    with written_aside(folder) as aside:
        write_whole(aside / "a.json", "{}")


def logged(folder: Path) -> None:
    folder.mkdir()
    batch = Batch(index=0, rollouts=[fakes.rollout(fakes.work())], advantages=np.zeros(1, np.float32))
    batch_log.write(folder, batch, lambda rollout: True)


WRITERS: dict[str, Callable[[Path], object]] = {
    "torch": lambda path: tensor_file.write(TENSORS, path, {"format": "pt"}),
    "numpy": lambda path: tensor_file.write({"a": np.ones(3)}, path, {}),
    "nothing": lambda path: tensor_file.write({}, path, {}),
    "rollouts": lambda path: packing.save(packing.pack([]), path),
    "batch": logged,
    "export": exported,
    "weights": published,
    "adapter": lambda path: write_adapter(
        path, {"l.lora_a": torch.ones(2, 2)}, Lora(rank=2, alpha=1, targets=()), path
    ),
    "checkpoint": saved,
    "tiny tokenizer": lambda path: path.mkdir() or tiny_model.write_tokenizer(path),
    "folder": folder_with_json,
}


@pytest.fixture(params=[0o022, 0o027, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", WRITERS)
def test_every_file_and_folder_has_the_mode_of_the_umask(name: str, umask: int, tmp_path: Path) -> None:
    WRITERS[name](path := tmp_path / "written")
    for made in [path, *path.rglob("*")]:
        expected = (0o777 if made.is_dir() else 0o666) & ~umask
        assert stat.S_IMODE(made.stat().st_mode) == expected, made


def test_a_file_that_is_written_over_is_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("old")
    path.chmod(0o400)
    tensor_file.write({"a": np.arange(3)}, path, {})
    assert path.read_bytes()[-24:] == np.arange(3).tobytes() and os.access(path, os.W_OK)


def test_nothing_else_of_the_package_writes_safetensors() -> None:
    package = Path(tensor_file.__file__).parents[1]
    writers = [path.name for path in package.rglob("*.py") if re.search(r"\bsave_file\b|save_model", path.read_text())]
    assert writers == ["tensor_file.py"]
