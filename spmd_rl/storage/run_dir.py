"""The run directory: where everything that a run leaves behind lies.

    run.json  config.toml  configs/  metrics.jsonl  tensorboard/  batches/  evals/  checkpoints/  model/  adapter/
    summary.json  curve.png  failures.jsonl  abandoned/  weights/

Knows the names and what a resume moves aside; not what is in the files.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.files.atomic_folder import remove

OWNER = ".owner"  # the process that holds the directory


@dataclass(frozen=True)
class RunDir:
    """Paths below one run directory."""

    path: Path

    @property
    def history(self) -> Path:
        return self.path / "run.json"

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def batches(self) -> Path:
        return self.path / "batches"

    @property
    def evals(self) -> Path:
        return self.path / "evals"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def curve(self) -> Path:
        return self.path / "curve.png"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def failures(self) -> Path:
        return self.path / "failures.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    def evaluation(self, version: int) -> Path:
        return self.evals / f"eval_{version}.json"

    def create(self) -> None:
        """Make the directory and those of it that are written to from the start; weights are published anew."""
        remove(self.weights)
        for folder in (self.tensorboard, self.batches, self.evals, self.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)

    def claim(self) -> None:
        """Hold the directory until this process ends; ValueError while a process of another job does.

        Where the file system has no locks nothing is held, and nothing refused.  A directory in which files lie that no
        run has made is refused too, untouched.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if foreign := self._foreign():
            raise ValueError(
                f"run.dir = {self.path} has files that no run made ({foreign}), which a run would overwrite or remove: "
                "choose a new folder, or an empty one"
            )
        descriptor = os.open(self.path / OWNER, os.O_RDWR | os.O_CREAT, 0o644)  # never closed: that would let go
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return
            owner = os.read(descriptor, 1000).decode(errors="replace")
            os.close(descriptor)
            raise ValueError(f"run.dir = {self.path} is in use by {owner}: end that job, or choose another") from error
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def _foreign(self) -> str:
        """Something that lies in a directory without a run; folders without files do not count."""
        if self.history.exists() or self.used:
            return ""

        def holds_files(path: Path) -> bool:
            return path.is_symlink() or not path.is_dir() or any(map(holds_files, path.iterdir()))

        return next((p.name for p in sorted(self.path.iterdir()) if p.name != OWNER and holds_files(p)), "")

    @property
    def used(self) -> bool:
        """A run has started here before."""
        return self.metrics.exists() or any(not p.suffix for p in self.checkpoints.glob("step_*"))

    def abandon_after(self, version: int) -> Path | None:
        """Move what lies beyond `version` to abandoned/<n>/: it is about to be made again under the same numbers.

        -1: everything, version 0 being that of the first evaluation.  Where it lies now; None: there was nothing.
        """
        numbers = [int(p.name) for p in self.path.glob("abandoned/*") if p.name.isdecimal()]
        aside = self.path / "abandoned" / str(max(numbers, default=-1) + 1)
        late = [p for p in self.batches.iterdir() if _number(p) >= version]
        late += [p for p in self.evals.iterdir() if _number(p) > version]
        if version < 0:
            late += [p for p in (self.model, self.adapter, self.summary, self.curve, self.failures) if p.exists()]
        try:
            lines = self.metrics.read_text("utf-8").splitlines(keepends=True) if self.metrics.exists() else []
            whole = lines if not lines or lines[-1].endswith("\n") else lines[:-1]
            kept = [line for line in whole if json.loads(line)["version"] <= version]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{self.metrics}: not the metrics of a run: {error}") from error
        if not late and len(kept) == len(lines):
            return None
        aside.mkdir(parents=True)
        for path in late:
            path.rename(aside / path.name)
        (aside / "metrics.jsonl").write_text("".join(lines))
        write_whole(self.metrics, "".join(kept))
        return aside


class Summary:
    """summary.json: written as often as one likes, by any thread; after its `last` word nothing more is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._done = False

    def read(self) -> dict[str, object]:
        """What was written so far, here or by an earlier start; empty where that is nothing."""
        try:
            words: dict[str, object] = json.loads(self.path.read_text("utf-8"))
            return words
        except (OSError, ValueError):
            return {}

    def write(self, words: Mapping[str, object], *, last: bool = False) -> None:
        with self._lock:
            if not self._done:
                write_whole(self.path, json.dumps(words, indent=1))
                self._done = last


def _number(path: Path) -> int:
    """Example: batches/step_12.json -> 12; -1 where there is none."""
    match = re.search(r"_(\d+)", path.name)
    return int(match[1]) if match else -1


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
