"""How much disk a run will need, as far as that can be known before it starts.

Reads only the headers of the model's safetensors files.  Knows nothing of ranks; what batches and metrics take grows
with the run and is not counted.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path

BYTES_IN_CHECKPOINT = 12  # per parameter: float32 weights and AdamW's two moments
BYTES_IN_EXPORT = 4


def num_parameters(model: Path) -> int:
    """Of all safetensors files of a folder; 0 where there are none."""
    return sum(_num_elements(path) for path in model.glob("*.safetensors"))


def needed_bytes(model: Path, *, keep_last: int) -> int:
    """For the checkpoints that are kept, the one being written, and the exported model."""
    return num_parameters(model) * (BYTES_IN_CHECKPOINT * (keep_last + 1) + BYTES_IN_EXPORT)


def check_room(model: Path, folder: Path, *, keep_last: int) -> None:
    """ValueError when the file system of `folder` cannot hold what the run will write; what is there counts as room."""
    written = sum(path.stat().st_size for path in folder.glob("checkpoints/**/*") if path.is_file())
    needed, free = needed_bytes(model, keep_last=keep_last), shutil.disk_usage(folder).free + written
    if needed > free:
        raise ValueError(
            f"{folder}: {free / 1e9:.1f} GB are free, checkpoints and model take {needed / 1e9:.1f} GB "
            f"({num_parameters(model) / 1e6:.0f}M parameters, checkpoint.keep_last = {keep_last} and one being written)"
        )


def _num_elements(path: Path) -> int:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
