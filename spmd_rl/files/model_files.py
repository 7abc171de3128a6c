"""The weights of a model folder as its safetensors files say: names, types, shapes, and where each lies.

Reads headers only, and refuses by file and tensor what cannot be meant: files cut short, shards that are missing, a
tensor in two of them.  Knows nothing of models or ranks.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # where both are, the first is taken
FLOATS = ("F64", "F32", "F16", "BF16")
_MOST_HEADER_BYTES = 100 << 20
_BITS = {"BOOL": 8, "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8}
_BITS |= {f"{kind}{bits}": bits for kind in "IU" for bits in (8, 16, 32, 64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor in a file."""

    file: Path
    dtype: str  # as safetensors calls it: "BF16"
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


def weight_files(folder: Path) -> list[Path]:
    """Those that a model is loaded from; ValueError where there are none, or not all."""
    folder = Path(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        files = [folder / name for name in sorted(set(_shard_of(folder).values()))]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ValueError(f"{folder}: its weights cannot be read: {INDEX} names {missing[0]}, which is not there")
        return files
    have = sorted(file.name for file in folder.glob("*") if file.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    hint = f"; it has {', '.join(have[:3])}: save_pretrained(DIR) of transformers writes {SINGLE}" if have else ""
    raise ValueError(f"{folder}: its weights cannot be read: no file named {SINGLE} or {INDEX}{hint}")


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors that a model is loaded from, by name; ValueError where a file is not whole or contradicts another."""
    folder = Path(folder)
    tensors: dict[str, Stored] = {}
    for file in weight_files(folder):
        for name, entry in read_header(file):
            if name in tensors:
                raise ValueError(f"{folder}: tensor {name} is in two files, {tensors[name].file.name} and {file.name}")
            tensors[name] = entry
    if not (folder / SINGLE).is_file():
        for name, shard in _shard_of(folder).items():
            if name not in tensors or tensors[name].file.name != shard:
                raise ValueError(f"{folder / shard}: has no tensor {name}, which {INDEX} says is there")
    return tensors


def read_header(file: Path) -> Iterator[tuple[str, Stored]]:
    """The tensors of one safetensors file by name."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(size - 8, _MOST_HEADER_BYTES):
                raise ValueError(f"its header would have {length} bytes, it has {size} in all")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _entry(file, 8 + length, name, entry) for name, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        where = f"{file.parent}: its weights cannot be read: {file.name}"
        raise ValueError(f"{where} is no safetensors file, or not all of one: {error}") from error
    end = max((entry.end for entry in tensors.values()), default=8 + length)
    if end != size:
        raise ValueError(
            f"{file.parent}: its weights cannot be read: {file.name} has {size} bytes, its header says {end}: "
            "it was not copied whole, copy it again"
        )
    yield from tensors.items()


def _entry(file: Path, start: int, name: str, entry: Mapping[str, Any]) -> Stored:
    (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
    bits = _BITS.get(entry["dtype"])
    if begin < 0 or end < begin or (bits and math.prod(shape) * bits != (end - begin) * 8):
        raise ValueError(f"{name} is {entry['dtype']} {list(shape)} and takes {end - begin} bytes")
    return Stored(file=file, dtype=entry["dtype"], shape=shape, begin=start + begin, end=start + end)


def _shard_of(folder: Path) -> dict[str, str]:
    """The name of the file that each tensor is in, by the index."""
    try:
        shards = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {name: str(shard) for name, shard in shards.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / INDEX}: is no index of weights: {type(error).__name__}: {error}") from error
