"""Whether what is being written grows: a slow disk moves, one that is gone does not.

A thread of its own looks at the files, for on a file system that hangs a look hangs too: nothing is then seen to move,
which is the truth.  Knows nothing of who writes, or of what it means that nothing moves.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

LOOK_S = 0.5  # between two looks

Sizes = dict[str, tuple[int, int, int]]  # bytes, blocks on the disk and time of the last change, by file


class DiskWatch:
    """`begin` and `end` a write under any name; `moved` is when its files were last seen to change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: dict[str, Path] = {}
        self._moved: dict[str, float] = {}
        self._changed = threading.Condition(self._lock)
        threading.Thread(target=self._run, name="disk watch", daemon=True).start()

    def begin(self, name: str, path: Path) -> None:
        """A file or folder at `path`, or one beside it that will take its place, is being written."""
        with self._lock:
            self._paths[name] = path
            self._moved.pop(name, None)
            self._changed.notify()

    def end(self, name: str) -> None:
        with self._lock:
            self._paths.pop(name, None)
            self._moved.pop(name, None)

    def tick(self, name: str) -> None:
        """It moves, though no file grows: what was written is read back."""
        with self._lock:
            if name in self._paths:
                self._moved[name] = time.monotonic()

    def moved(self, name: str) -> float:
        """By the monotonic clock; minus infinity before anything was seen to."""
        with self._lock:
            return self._moved.get(name, float("-inf"))

    def _run(self) -> None:
        seen: dict[tuple[str, Path], Sizes] = {}
        while True:
            with self._lock:
                while not self._paths:
                    self._changed.wait()
                paths = list(self._paths.items())
            now = {entry: _sizes(entry[1]) for entry in paths}
            for entry, sizes in now.items():
                if entry in seen and seen[entry] != sizes:
                    self.tick(entry[0])
            seen = now
            with self._lock:
                self._changed.wait(LOOK_S)


def _sizes(path: Path) -> Sizes:
    return dict(_files([path, *path.parent.glob(f".{path.name}.*")]))


def _files(paths: list[Path]) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for path in paths:
        for folder, _, names in os.walk(path):
            yield from filter(None, (_of(os.path.join(folder, name)) for name in names))
        if (own := _of(str(path))) is not None:
            yield own


def _of(path: str) -> tuple[str, tuple[int, int, int]] | None:
    """None where it cannot be seen: renamed meanwhile, most likely, or on a server that has lost it for now."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return path, (found.st_size, found.st_blocks, found.st_mtime_ns)
