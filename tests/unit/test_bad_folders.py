"""Folders that a user got wrong, in `eval` and `export`: one line that names it, before anything is computed."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl import config, tiny_model
from spmd_rl.evaluate import evaluate
from spmd_rl.export import export
from spmd_rl.model import build

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.make(folder)
    return folder


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def without(folder: Path, file: str) -> None:
    (folder / file).unlink()


def shortened(folder: Path, file: str) -> None:
    (folder / file).write_bytes((folder / file).read_bytes()[:300])


def one_shard(folder: Path, file: str) -> None:
    """As where the other shards were not copied."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(dict(list(tensors.items())[:5]), folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    files = {name: f"model-0000{1 + (i > 4)}-of-00002.safetensors" for i, name in enumerate(tensors)}
    (folder / file).write_text(f'{{"metadata": {{}}, "weight_map": {files}}}'.replace("'", '"'))


@pytest.mark.parametrize(
    ("breaks", "file", "message"),
    [
        (without, "config.json", "model_type|config.json"),
        (shortened, "config.json", "is not a valid JSON file"),
        (without, "model.safetensors", "its weights cannot be read: .*no file named model.safetensors"),
        (shortened, "model.safetensors", "its weights cannot be read: "),
        (one_shard, "model.safetensors.index.json", "its weights cannot be read: "),
        (without, "tokenizer.json", "tokenizer.json is missing; "),
    ],
)
def test_half_a_model_is_refused(model, breaks, file, message):
    breaks(model, file)
    settings = [f"model.path={model}", "eval.num_tasks=1"]
    with pytest.raises(ValueError, match=message):
        evaluate(config.load(ROOT / "configs" / "tiny_cpu.toml", settings), None)


def test_more_tokens_than_the_model_has_positions_are_refused(whole):
    settings = [f"model.path={whole}", "inference.max_seq_len=257"]
    with pytest.raises(ValueError, match="max_seq_len = 257: the model has 256 positions"):
        evaluate(config.load(ROOT / "configs" / "tiny_cpu.toml", settings), None)


@pytest.mark.parametrize("change", [lambda weight: None, lambda weight: weight[:3].clone()])
def test_a_weight_that_is_missing_or_of_another_shape_is_not_made_up(model, change):
    tensors, name = load_file(model / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed}, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"weights missing or of another shape than config.json says: {name}"):
        build(model, device="cpu", dtype=torch.float32, weights=True)


@pytest.mark.parametrize(("out", "message"), [("", "is a folder; name a file"), ("file/x.json", "cannot be written: ")])
def test_an_evaluation_that_cannot_be_written_is_not_begun(whole, tmp_path, out, message):
    (tmp_path / "file").touch()
    loaded = config.load(ROOT / "configs" / "tiny_cpu.toml", [f"model.path={whole}"])
    with pytest.raises(ValueError, match=message):
        evaluate(loaded, tmp_path / out)


def test_what_cannot_be_exported_is_said(whole, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(ValueError, match=r"not a run directory, it has no config\.toml"):
        export(run, tmp_path / "out", None, "bfloat16")
    run.mkdir()
    loaded = config.load(ROOT / "configs" / "tiny_cpu.toml", [f"model.path={whole}"])
    (run / "config.toml").write_text(config.dump(loaded))
    for folder, message in (
        (tmp_path / "out", "no complete checkpoint in"),
        (run, "exists already"),
        (run / "config.toml" / "out", "cannot be written: "),
    ):
        with pytest.raises(ValueError, match=message):
            export(run, folder, None, "bfloat16")
