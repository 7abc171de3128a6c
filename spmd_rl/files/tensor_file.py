"""Writes safetensors files, with the mode that the umask gives to every other file, and reads tensors of them."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import safe_open

if TYPE_CHECKING:
    from torch import Tensor


def write(tensors: Mapping[str, object], path: Path, metadata: Mapping[str, str]) -> None:
    """Tensors of torch or arrays of numpy.  safetensors itself makes files that only their owner may read."""
    if all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
        from safetensors.numpy import save_file
    else:
        from safetensors.torch import save_file
    path.unlink(missing_ok=True)
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # asking for the umask itself would change it for all threads
    save_file(dict(tensors), path, dict(metadata))
    path.chmod(mode)


def read(path: Path, name: str) -> Tensor:
    """The tensor of that name, as it is stored, for torch."""
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)
