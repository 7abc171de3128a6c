"""A folder that is complete or absent, and whether one can be written at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def written_aside(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields an empty folder beside `folder`, which takes its place when the block ends well and is removed if not.

    replace: what is at `folder` then goes, and not before.
    """
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{uuid4().hex}")
    aside.mkdir()
    try:
        yield aside
        if replace:
            remove(folder)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove(folder: Path) -> None:
    """A folder with all in it; of a link to one, the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def check_writable(path: Path) -> None:
    """Make the folders above `path`; ValueError where nothing can be written there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}") from error
