"""A checkpoint is one directory, complete or absent: checkpoints/step_<V>/ with

    trainer/              model and optimizer, written by the trainer ranks with torch.distributed.checkpoint
    rollouts.safetensors  finished rollouts that are not trained yet
    orchestrator.json     version, tickets, unfinished groups, data cursor, ledger
    COMPLETE              the marker, last

It is written as step_<V>.tmp and renamed when everything has been synced.  Nothing in it is unpickled.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from spmd_rl import packing
from spmd_rl.run_dir import write_whole
from spmd_rl.types import Rollout

SCHEMA = 1


def save_trainer(state: Mapping[str, object], folder: Path, group: dist.ProcessGroup | None) -> None:
    """All trainer ranks together: write their shards below `folder` and sync them."""
    folder.mkdir(parents=True, exist_ok=True)
    dcp.save(dict(state), checkpoint_id=folder, process_group=group)
    for path in folder.iterdir():
        _sync(path)


def load_trainer(state: Mapping[str, object], folder: Path, group: dist.ProcessGroup | None) -> None:
    """All trainer ranks together: fill `state` in place, on any number of ranks."""
    dcp.load(dict(state), checkpoint_id=folder, process_group=group)


def save_orchestrator(state: Mapping[str, object], rollouts: Sequence[Rollout], folder: Path) -> None:
    """Write the orchestrator's half below the same `folder` as the trainers' half."""
    folder.mkdir(parents=True, exist_ok=True)
    packing.save(packing.pack(rollouts), folder / "rollouts.safetensors")
    _sync(folder / "rollouts.safetensors")
    write_whole(folder / "orchestrator.json", json.dumps({"schema": SCHEMA, **state}, indent=1))


def load_orchestrator(folder: Path) -> tuple[dict[str, object], list[Rollout]]:
    """ValueError when the checkpoint is not one of ours."""
    try:
        state = json.loads((folder / "orchestrator.json").read_text())
        rollouts = packing.unpack(packing.load(folder / "rollouts.safetensors"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: not a readable checkpoint: {error}") from error
    if state.get("schema") != SCHEMA:
        raise ValueError(f"{folder}: checkpoint schema {state.get('schema')!r}, this version reads {SCHEMA}")
    return state, rollouts


def aside(checkpoints: Path, version: int) -> Path:
    """Where the checkpoint of `version` is written before it is complete."""
    return checkpoints / f"step_{version}.tmp"


def complete(checkpoints: Path, version: int) -> Path:
    """Mark and rename: from here on the checkpoint exists."""
    folder, final = aside(checkpoints, version), checkpoints / f"step_{version}"
    write_whole(folder / "COMPLETE", f"{version}\n")
    if final.exists():
        shutil.rmtree(final)
    folder.rename(final)
    _sync(checkpoints)
    return final


def newest(checkpoints: Path) -> tuple[int, Path] | None:
    """Version and folder of the newest complete checkpoint."""
    found = [
        (int(folder.name.removeprefix("step_")), folder)
        for folder in checkpoints.glob("step_*")
        if folder.name.removeprefix("step_").isdecimal() and (folder / "COMPLETE").exists()
    ]
    return max(found, default=None)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
