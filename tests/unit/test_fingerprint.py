"""The same content has one fingerprint, however it lies on disk; other content has another."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spmd_rl.demo import tiny_model
from spmd_rl.files import fingerprint

TENSORS = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def folder(path: Path, tensors: dict[str, torch.Tensor], *, shards: int = 0) -> Path:
    path.mkdir()
    if not shards:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    where = {name: f"part-{i % shards}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({}, True),
        ({"a": TENSORS["a"].clone().index_put_((torch.tensor(0), torch.tensor(0)), torch.tensor(-0.0))}, False),
        ({"a": TENSORS["a"].reshape(3, 2)}, False),
        ({"a": TENSORS["a"].view(torch.int32)}, False),
        ({"b": TENSORS["b"].float()}, False),
        ({"a": TENSORS["a"].flip(0)}, False),
        ({"c": torch.zeros(0)}, False),
    ],
)
@pytest.mark.parametrize("shards", [0, 1, 2])
def test_weights_are_known_by_their_tensors_whatever_the_files(tmp_path, shards, change, equal):
    whole = fingerprint.weights_digest(folder(tmp_path / "whole", TENSORS))
    other = folder(tmp_path / "other", TENSORS | change, shards=shards)
    (other / "optimizer.safetensors").write_bytes(b"not of the model")
    assert (fingerprint.weights_digest(other) == whole) == equal


def test_the_tensors_that_differ_are_those_that_were_changed(tmp_path):
    here = fingerprint.tensor_digests(folder(tmp_path / "here", TENSORS))
    there = fingerprint.tensor_digests(folder(tmp_path / "there", TENSORS | {"b": torch.zeros(4)}))
    assert {name for name in here if here[name] != there[name]} == {"b"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_tensor(tmp_path, value, dtype):
    largest = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0], dtype=dtype)
    fingerprint.weights_digest(folder(tmp_path / "whole", {"a": largest, "none": torch.zeros(0, dtype=dtype)}))
    long = torch.zeros(300_000, dtype=dtype)
    long[299_999] = value
    with pytest.raises(ValueError, match=r"model\.safetensors: a has values that are infinite or not a number"):
        fingerprint.weights_digest(folder(tmp_path / "broken", {"a": long}))


def test_a_file_that_was_written_anew_is_read_anew(tmp_path):
    before = fingerprint.weights_digest(folder(tmp_path / "here", TENSORS))
    (tmp_path / "here" / "model.safetensors").unlink()
    save_file(TENSORS | {"b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "here" / "model.safetensors")
    assert fingerprint.weights_digest(tmp_path / "here") != before


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("fingerprint") / "tiny"
    tiny_model.make(path)
    return path


def edit(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text() if path.is_file() else "{}") | values, indent=3))


@pytest.mark.parametrize(
    ("file", "values", "tokenizer", "template"),
    [
        ("tokenizer.json", {}, True, True),
        ("tokenizer.json", {"truncation": {"max_length": 16}}, True, True),
        ("tokenizer.json", {"normalizer": {"type": "NFC"}}, False, True),
        ("tokenizer_config.json", {"chat_template": "other"}, True, False),
        ("tokenizer_config.json", {"model_max_length": 7}, True, True),
        ("tokenizer_config.json", {"unk_token": "?"}, False, True),
    ],
)
def test_tokenizer_and_template_are_known_by_what_they_do(tiny, tmp_path, file, values, tokenizer, template):
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    before = fingerprint.tokenizer_digest(other), fingerprint.template_digest(other)
    template_file = other / "chat_template.jinja"
    if "chat_template" in values and template_file.is_file():
        template_file.write_text(values["chat_template"])
    else:
        edit(other / file, **values)
    assert (fingerprint.tokenizer_digest(other) == before[0]) == tokenizer
    assert (fingerprint.template_digest(other) == before[1]) == template


def test_a_template_is_the_same_in_a_file_of_its_own(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ messages }}")
    edit(tmp_path / "b" / "tokenizer_config.json", chat_template="{{ messages }}")
    assert fingerprint.template_digest(tmp_path / "a") == fingerprint.template_digest(tmp_path / "b")
