"""What a run will need on disk is known before it starts."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from spmd_rl import disk


def test_a_model_is_counted_without_being_read(tmp_path):
    save_file({"a": np.zeros((10, 3), np.float16), "b": np.zeros(5, np.float32)}, tmp_path / "1.safetensors")
    save_file({"c": np.zeros((), np.float32)}, tmp_path / "2.safetensors", {"format": "pt"})
    assert disk.num_parameters(tmp_path) == 36
    assert disk.needed_bytes(tmp_path, keep_last=2) == 36 * (3 * 12 + 4)


def test_too_little_room_is_refused_with_the_numbers(tmp_path):
    save_file({"a": np.zeros(1_000_000, np.float32)}, tmp_path / "model.safetensors")
    disk.check_room(tmp_path, tmp_path, keep_last=1)
    with pytest.raises(ValueError, match=r"GB are free, checkpoints and model take 1200.* GB \(1M parameters"):
        disk.check_room(tmp_path, tmp_path, keep_last=100_000)
