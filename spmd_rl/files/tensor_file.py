"""Writes safetensors files, with the mode that the umask gives to every other file, and reads tensors of them."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import numpy as numpy_format
from safetensors import safe_open

if TYPE_CHECKING:
    from torch import Tensor


def write(tensors: Mapping[str, Tensor] | Mapping[str, np.ndarray], path: Path, metadata: Mapping[str, str]) -> None:
    """Tensors of torch or arrays of numpy.  safetensors itself makes files that only their owner may read."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)  # asking for the umask itself would change it for all threads
    arrays, of_torch = {}, {}
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            arrays[name] = tensor
        else:
            of_torch[name] = tensor
    if of_torch:
        from safetensors.torch import save_file

        save_file(of_torch, path, dict(metadata))
    else:
        numpy_format.save_file(arrays, path, dict(metadata))
    path.chmod(mode)


def read(path: Path, name: str) -> Tensor:
    """The tensor of that name, as it is stored, for torch."""
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(name)
        return tensor
