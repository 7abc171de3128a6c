"""Asynchronous RL post-training of language models from one torchrun."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

__version__ = "0.1.0"

_MOVED = {
    "advantages": "objective.advantages",
    "code_reward": "rewards",
    "data": "envs.dataset",
    "evaluate": "commands.evaluate",
    "export": "commands.export",
    "judge": "rewards",
    "math_reward": "rewards",
    "replay": "commands.replay",
    "row_files": "files.row_files",
    "sandbox": "rewards",
    "simulate": "commands.simulate",
    "smollm2": "demo.smollm2",
    "tiny_model": "demo.tiny_model",
    "tokenizer": "model.tokenizer",
    "train": "ranks.program",
    "user_code": "diagnostics.user_code",
    "workers": "rewards",
}


class _Moved(MetaPathFinder):
    """Names the new place of a module that is not where it was; asked last, when nothing else has found it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        place = _MOVED.get(fullname.removeprefix(__name__ + "."))
        if place is not None and fullname.startswith(__name__ + "."):
            raise ModuleNotFoundError(f"{fullname} is now {__name__}.{place}", name=fullname)


sys.meta_path.append(_Moved())
