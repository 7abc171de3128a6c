"""A checkpoint is one directory, complete or absent: checkpoints/step_<V>/ with

    trainer/              model and optimizer, written by the trainer ranks with torch.distributed.checkpoint
    rollouts.safetensors  finished rollouts that are not trained yet
    orchestrator.json     version, tickets, unfinished groups, data cursor, ledger
    COMPLETE              the marker, with size and CRC-32 of every file: written last, removed first

It is written as step_<V>.tmp and renamed when everything has been synced.  Whoever dies at any point leaves the
checkpoints before as they were; `tidy` puts right what was left half done.  Nothing in a checkpoint can run code.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from spmd_rl.files.atomic_folder import remove
from spmd_rl.packing import packing
from spmd_rl.storage.run_dir import sync, write_whole
from spmd_rl.types import Rollout

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

SCHEMA = 3
MARKER = "COMPLETE"
NUM_READERS = 8  # files checked at a time
_TABLE = (
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
)
_WORDS = {(Metadata.__module__, name) for name in (*_TABLE, "BytesStorageMetadata", "_MEM_FORMAT_ENCODING")}
_WORDS |= {(module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")}
_WORDS |= {("torch", "Size"), ("torch.serialization", "_get_layout"), (_StorageInfo.__module__, "_StorageInfo")}
PIECE_BYTES = 1 << 26  # written between two syncs
BLOCK_BYTES = 1 << 24  # read at a time, into memory that malloc never sees: it would keep some of it for each thread


# ---- the trainers' half


def save_trainer(state: Mapping[str, object], folder: Path, group: dist.ProcessGroup | None) -> Future[None]:
    """All trainer ranks together: returns once `state` has been copied; the future is done when `folder` is synced.

    Until then the group belongs to this save.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saving = async_save(dict(state), storage_writer=_Writer(folder), process_group=group)
    assert isinstance(saving, Future)  # copied at once, not staged
    return saving


def load_trainer(state: Mapping[str, object], folder: Path, group: dist.ProcessGroup | None) -> None:
    """All trainer ranks together, or one process without a group: fill `state` in place, on any number of ranks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process")
        load(dict(state), storage_reader=_Reader(folder), planner=_Planner(), process_group=group)


def sums(folder: Path, index: int, *, read: Callable[[], None] = lambda: None) -> dict[str, list[int]]:
    """Size and CRC-32 by name of what the trainer rank at `index` in its group has written: read where it was written.

    Example: {"__0_0.distcp": [4429746, 3018364512]}
    """
    return {path.name: [path.stat().st_size, crc] for path, crc in _sums(sorted(folder.glob(f"__{index}_*")), read)}


class _Writer(FileSystemWriter):
    """What is written reaches the disk piece by piece, so that its pace can be seen: not all of it at the last sync."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = _Files()


class _Files(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _Synced(io.FileIO(path, mode)) as stream:
            yield stream


class _Synced(io.BufferedWriter):
    _unsynced = 0

    def write(self, data: ReadableBuffer) -> int:
        with memoryview(data).cast("B") as whole:
            for start in range(0, len(whole), PIECE_BYTES):
                self._unsynced += super().write(whole[start : start + PIECE_BYTES])
                if self._unsynced >= PIECE_BYTES:
                    self.flush()
                    os.fdatasync(self.fileno())
                    self._unsynced = 0
            return len(whole)


class _Reader(FileSystemReader):
    """Reads the pickled table of contents that torch writes, but lets it name nothing except what describes tensors."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path:
                raise pickle.UnpicklingError(f"a checkpoint may not point at {info.relative_path}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and (module, name) not in _WORDS:
            raise pickle.UnpicklingError(f"a checkpoint may not name {module}.{name}")
        return super().find_class(module, name)


class _Planner(DefaultLoadPlanner):
    """Plain values (learning rates) are read as weights are: no code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        again = io.BytesIO()
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


# ---- rank 0's half


def save_orchestrator(state: Mapping[str, object], rollouts: Sequence[Rollout], folder: Path) -> None:
    """Write the orchestrator's half below the same `folder` as the trainers' half."""
    folder.mkdir(parents=True, exist_ok=True)
    packing.save(packing.pack(rollouts), folder / "rollouts.safetensors")
    sync(folder / "rollouts.safetensors")
    write_whole(folder / "orchestrator.json", json.dumps({"schema": SCHEMA, **state}, indent=1))


def load_orchestrator(folder: Path) -> tuple[dict[str, Any], list[Rollout]]:
    """ValueError when the checkpoint is not one of ours."""
    try:
        state = json.loads((folder / "orchestrator.json").read_text())
        rollouts = packing.unpack(packing.load(folder / "rollouts.safetensors"))
        schema = state["schema"]
    except Exception as error:  # whatever it is, the file is to blame
        raise ValueError(f"{folder}: not a readable checkpoint: {type(error).__name__}: {error}") from error
    if schema != SCHEMA:
        raise ValueError(f"{folder}: checkpoint schema {schema!r}, this version reads {SCHEMA}")
    return state, rollouts


# ---- complete or absent


def aside(checkpoints: Path, version: int) -> Path:
    """Where the checkpoint of `version` is written before it is complete."""
    return checkpoints / f"step_{version}.tmp"


def complete(checkpoints: Path, version: int, known: Mapping[str, list[int]]) -> Path:
    """Mark and rename: from here on the checkpoint exists.  `known` are the trainers' `sums`; the rest is read here."""
    folder = aside(checkpoints, version)
    if not (folder / "trainer/.metadata").exists():
        raise FileNotFoundError(f"{folder}: the trainers' half is missing")
    files = {f"trainer/{name}": entry for name, entry in known.items()}
    for name, (size, _) in files.items():
        if (there := (folder / name).stat().st_size) != size:
            raise RuntimeError(f"{folder / name}: {there} bytes, its trainer wrote {size}")
    rest = [path for path in _files(folder) if str(path.relative_to(folder)) not in files]
    files |= {str(path.relative_to(folder)): [path.stat().st_size, crc] for path, crc in _sums(rest)}
    sync(folder / "trainer")
    sync(folder)
    write_whole(folder / MARKER, json.dumps({"schema": SCHEMA, "version": version, "files": files}, indent=1))
    return _put_in_place(folder)


def newest(checkpoints: Path) -> tuple[int, Path] | None:
    """Version and folder of the newest complete checkpoint."""
    return max(all_complete(checkpoints), default=None)


def all_complete(checkpoints: Path) -> list[tuple[int, Path]]:
    """Version and folder of every complete checkpoint, the newest last."""
    return [(v, folder) for v, folder in _folders(checkpoints) if (folder / MARKER).exists()]


def version_of(folder: Path) -> int:
    """Example: checkpoints/step_12 -> 12."""
    return int(folder.name.removeprefix("step_"))


def tidy(checkpoints: Path) -> None:
    """Put in place what was complete and not yet renamed, and remove what was never completed."""
    for folder in sorted(checkpoints.glob("step_*.tmp")):
        if (folder / MARKER).exists():
            _put_in_place(folder)
        else:
            remove(folder)


def remove_old(checkpoints: Path, keep_last: int) -> None:
    """All but the newest complete ones, and what is left of those removed before."""
    kept = all_complete(checkpoints)[-keep_last:]
    for version, folder in _folders(checkpoints):
        if kept and version < kept[0][0]:
            _remove(folder)


def verify(folder: Path) -> None:
    """ValueError naming the first file that is not as it was written."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        schema, version = marker["schema"], marker["version"]
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in marker["files"].items()}
    except Exception as error:
        raise ValueError(f"{folder / MARKER}: not the marker of a checkpoint: {error}") from error
    if schema != SCHEMA:
        raise ValueError(f"{folder}: checkpoint schema {schema!r}, this version reads {SCHEMA}")
    if folder.name != f"step_{version}":
        raise ValueError(f"{folder}: its marker says version {version!r}: was it renamed?")
    present = {str(path.relative_to(folder)): path for path in _files(folder)}
    for name, (size, _) in files.items():
        if name not in present:
            raise ValueError(f"{folder / name}: is missing")
        if present[name].stat().st_size != size:
            raise ValueError(f"{folder / name}: {present[name].stat().st_size} bytes, {size} were written")
    for needed in ("orchestrator.json", "rollouts.safetensors", "trainer/.metadata"):
        if needed not in files:
            raise ValueError(f"{folder / needed}: is missing")
    for path, crc in _sums([present[name] for name in files]):
        if crc != files[str(path.relative_to(folder))][1]:
            raise ValueError(f"{path}: its CRC-32 is not that of what was written: damaged or edited")


def _folders(checkpoints: Path) -> list[tuple[int, Path]]:
    """By version, complete or not, without those still written aside."""
    named = [(folder.name.removeprefix("step_"), folder) for folder in checkpoints.glob("step_*") if folder.is_dir()]
    return sorted((int(number), folder) for number, folder in named if number.isdecimal())


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)


def _put_in_place(folder: Path) -> Path:
    final = folder.with_suffix("")
    if final.exists():
        _remove(final)
    folder.rename(final)
    sync(final.parent)
    return final


def _remove(folder: Path) -> None:
    if not folder.is_symlink():
        (folder / MARKER).unlink(missing_ok=True)
        sync(folder)
    remove(folder)


def _sums(paths: Sequence[Path], read: Callable[[], None] = lambda: None) -> Iterator[tuple[Path, int]]:
    """`read` is called for every block."""
    with ThreadPoolExecutor(NUM_READERS) as pool:
        yield from zip(paths, pool.map(partial(_crc, read=read), paths), strict=True)


def _crc(path: Path, *, read: Callable[[], None]) -> int:
    crc = 0
    with open(path, "rb", buffering=0) as file, mmap.mmap(-1, BLOCK_BYTES) as block:
        while num_bytes := file.readinto(block):
            with memoryview(block)[:num_bytes] as part:
                crc = zlib.crc32(part, crc)
            read()
    return crc
