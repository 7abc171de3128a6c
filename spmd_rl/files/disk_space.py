"""How much disk a run will need, as far as that can be known before it starts, and what a full one is called.

Reads only the headers of the model's safetensors files.  Knows nothing of ranks; what batches and metrics take grows
with the run and is not counted.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmd_rl.files.model_files import read_header

BYTES_IN_CHECKPOINT = 12  # per parameter: float32 weights and AdamW's two moments
BYTES_IN_EXPORT = 4
NO_ROOM_BYTES = 2**20  # less free space than this is a full disk


def num_parameters(model: Path) -> int:
    """Of all safetensors files of a folder; 0 where there are none."""
    return sum(map(math.prod, _shapes(model).values()))


def num_additions(model: Path, *, rank: int, targets: Sequence[str]) -> int:
    """What LoRA adds to it: `rank` rows as long as each chosen weight is wide, and as many columns as it is high."""
    chosen = {f"{target}.weight" for target in targets}
    return sum(rank * sum(s) for name, s in _shapes(model).items() if ".".join(name.split(".")[-2:]) in chosen)


def needed_bytes(
    model: Path,
    *,
    keep_last: int,
    rank: int = 0,  # of LoRA; 0: all is trained
    targets: Sequence[str] = (),
    own_critic: bool = False,  # another model as large is trained
    num_weights: int = 0,  # folders of weights for engines
    weight_bytes: int = 4,  # of a parameter in there
) -> int:
    """For the checkpoints that are kept, the one being written, what is exported, and weights by disk."""
    num = num_parameters(model)
    additions = num_additions(model, rank=rank, targets=targets) if rank else 0
    trained = (additions or num) + own_critic * num
    checkpoints = trained * BYTES_IN_CHECKPOINT * (keep_last + 1)
    return checkpoints + (num + additions) * BYTES_IN_EXPORT + num_weights * num * weight_bytes


def check_room(model: Path, folder: Path, *, keep_last: int, **others: Any) -> None:  # of `needed_bytes`
    """ValueError when the file system of `folder` cannot hold what the run will write; what is there counts as room."""
    written = sum(path.stat().st_size for path in folder.glob("checkpoints/**/*") if path.is_file())
    needed = needed_bytes(model, keep_last=keep_last, **others)
    free = shutil.disk_usage(folder).free + written
    if needed > free:
        raise ValueError(
            f"{folder}: {_figure(free / 1e9)} GB are free, what the run writes takes {_figure(needed / 1e9)} GB "
            f"({_figure(num_parameters(model) / 1e6)}M parameters, checkpoint.keep_last = {keep_last} and one being "
            "written)"
        )


def _figure(value: float) -> str:
    """Two digits at least: tiny models take megabytes."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def blamed(error: BaseException, folder: Path) -> BaseException:
    """The error of a write below `folder`, or that the disk is full: torch names that by what it then trips over."""
    if shutil.disk_usage(folder).free >= NO_ROOM_BYTES:
        return error
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
    full.__cause__ = error
    return full


def _shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """By name, of all safetensors files of a folder."""
    return {name: entry.shape for file in model.glob("*.safetensors") for name, entry in read_header(file)}
