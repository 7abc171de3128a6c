"""What was found of a model, kept in the user's cache folder: the same question is not asked twice.

A question is a config, the ways of the run, and everything that answers it: the versions of torch and transformers and
the source of this package.  A folder that cannot be written means that nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import PretrainedConfig

from spmd_rl.behavior.check import Verdict, Ways

KERNELS = ("flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d", "flash-attn", "kernels")
_PACKAGE = Path(__file__).parents[1]
_OF_THE_FOLDER = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")  # says nothing of the architecture


def folder() -> Path:
    """$XDG_CACHE_HOME/spmd_rl, or ~/.cache/spmd_rl."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmd_rl"


def remembered(config: PretrainedConfig, ways: Ways, ask: Callable[[], Verdict]) -> Verdict:
    """The verdict of an earlier call, or that of `ask`, which is kept where it says something of the model."""
    path = folder() / f"model_{digest(config, ways)}.json"
    with suppress(OSError, ValueError, TypeError):  # none, or one that was damaged
        return Verdict(**json.loads(path.read_text(encoding="utf-8")))
    found = ask()
    if not found.lasting:
        return found
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as part:
            json.dump(asdict(found), part)
        os.replace(part.name, path)
    return found


def digest(config: PretrainedConfig, ways: Ways) -> str:
    """32 hexadecimal digits."""
    values = {name: value for name, value in config.to_dict().items() if name not in _OF_THE_FOLDER}
    asked = [values, asdict(ways), _versions(), platform.machine(), torch.cuda.is_available()]
    text = json.dumps(asked, sort_keys=True, default=str) + source_digest()
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _versions() -> dict[str, str]:
    """Of what computes a model where it is installed."""
    found = {}
    for name in ("torch", "transformers", *KERNELS):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@cache
def source_digest() -> str:
    """Of every file of the package."""
    whole = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        whole.update(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()
