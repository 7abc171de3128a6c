"""What a run will need on disk is known before it starts."""

from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from spmd_rl.files import disk_space


def test_a_model_is_counted_without_being_read(tmp_path):
    save_file({"a": np.zeros((10, 3), np.float16), "b": np.zeros(5, np.float32)}, tmp_path / "1.safetensors")
    save_file({"c": np.zeros((), np.float32)}, tmp_path / "2.safetensors", {"format": "pt"})
    assert disk_space.num_parameters(tmp_path) == 36
    assert disk_space.needed_bytes(tmp_path, keep_last=2) == 36 * (3 * 12 + 4)


def test_a_critic_of_its_own_and_weights_by_disk_are_counted(tmp_path):
    save_file({"a": np.zeros((10, 3), np.float32)}, tmp_path / "1.safetensors")
    counted = {"own_critic": True, "num_weights": 4, "weight_bytes": 2}
    assert disk_space.needed_bytes(tmp_path, keep_last=1, **counted) == 60 * 12 * 2 + 30 * 4 + 4 * 30 * 2


def test_lora_keeps_what_it_adds_and_writes_the_model_once(tmp_path):
    shapes = {"0.q.weight": (10, 4), "0.k.weight": (6, 4), "0.q.bias": (10,), "q_norm.weight": (4,)}
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "1.safetensors")
    lora = {"rank": 3, "targets": ["q"]}
    assert disk_space.num_additions(tmp_path, **lora) == 3 * (10 + 4)
    assert disk_space.needed_bytes(tmp_path, keep_last=1, **lora) == 42 * 12 * 2 + (78 + 42) * 4


def test_too_little_room_for_a_tiny_model_is_not_told_as_0_of_0(tmp_path, monkeypatch):
    save_file({"a": np.zeros(350_000, np.float32)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda folder: SimpleNamespace(free=8_400_000))
    with pytest.raises(ValueError, match=r": 0.0084 GB are free, .* takes 0.014 GB \(0.35M parameters"):
        disk_space.check_room(tmp_path, tmp_path, keep_last=2)


def test_too_little_room_is_refused_with_the_numbers(tmp_path):
    save_file({"a": np.zeros(1_000_000, np.float32)}, tmp_path / "model.safetensors")
    disk_space.check_room(tmp_path, tmp_path, keep_last=1)
    with pytest.raises(ValueError, match=r"GB are free, what the run writes takes 1200.* GB \(1M parameters"):
        disk_space.check_room(tmp_path, tmp_path, keep_last=100_000)
