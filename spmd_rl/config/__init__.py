"""The settings of a run: what there is, what it may be, and how it is read."""

from spmd_rl.config.file import default, describe, dump, field_docs, from_tree, load, sections
from spmd_rl.config.rules import CHOICES, check_model_folder, limits, warnings
from spmd_rl.config.settings import USUAL, Config

__all__ = [
    "CHOICES",
    "USUAL",
    "Config",
    "check_model_folder",
    "default",
    "describe",
    "dump",
    "field_docs",
    "from_tree",
    "limits",
    "load",
    "sections",
    "warnings",
]
