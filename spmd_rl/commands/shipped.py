"""`spmd_rl config` and `spmd_rl launch`: what comes with the package beside its code.

In a checkout the two folders lie beside the package, in an installed wheel inside it.
"""

from __future__ import annotations

import difflib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def folder(name: str) -> Path:
    """Where `configs` or `launch` lies."""
    inside = PACKAGE / name
    return inside if inside.is_dir() else PACKAGE.parent / name


def list_configs() -> list[str]:
    """A line for each config: its name, and what its first line says of it."""
    files = sorted(folder("configs").glob("*.toml"))
    firsts = [file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ") for file in files]
    width = max(len(file.stem) for file in files)
    return [f"{file.stem:<{width}}  {first}" for file, first in zip(files, firsts, strict=True)]


def read_config(name: str) -> str:
    """The text of a config; ValueError names those that there are."""
    files = {file.stem: file for file in folder("configs").glob("*.toml")}
    if name not in files:
        close = difflib.get_close_matches(name, files, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(files))}"
        raise ValueError(f"no config {name!r} is shipped: {hint}")
    return files[name].read_text(encoding="utf-8")
