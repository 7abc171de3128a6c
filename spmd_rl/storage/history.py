"""The history of a run directory: every start, with the config that it had, in run.json and configs/start_<n>.toml.

Also the format of the directory: one that another format was written in is refused, never read as if it were ours.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from spmd_rl import config as config_module
from spmd_rl.config import Config
from spmd_rl.files.fingerprint import weights_digest
from spmd_rl.storage.run_dir import RunDir, write_whole

FORMAT = 1
HOW_STARTED = ("run.dir", "run.resume")  # say where a run is, not what it does


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of a run."""

    version: int  # that it began at
    time: str  # as in ISO 8601, UTC
    config: str  # file, below the run directory
    weights: str  # digest of those that the run began with
    changed: tuple[str, ...] = ()  # settings, against those that trained the version


def starts(run_dir: RunDir) -> list[Start]:
    """All of them, in their order; ValueError where the directory is none of ours."""
    where = f"{run_dir.path} is no run directory that this version can read"
    if not run_dir.history.is_file():
        raise ValueError(
            f"{where}: it has no {run_dir.history.name}, so an earlier version wrote it, or none: choose another "
            "run.dir, or use the version that wrote it"
        )
    try:
        words = json.loads(run_dir.history.read_text("utf-8"))
        if words["format"] != FORMAT:
            raise ValueError(f"its format is {words['format']!r}, this version reads {FORMAT}")
        found = [Start(**{**entry, "changed": tuple(entry["changed"])}) for entry in words["starts"]]
        if any(type(start.version) is not int or type(start.config) is not str for start in found):
            raise ValueError("its starts have no version or config")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{where}: {run_dir.history}: {error}") from error
    return found


def add(run_dir: RunDir, config: Config, *, version: int, time: str, weights: str, resumed: bool) -> Start:
    """Record a start, from a checkpoint or anew; the newest config is in config.toml too."""
    before = starts(run_dir) if run_dir.history.exists() else []
    changed = changes(config_of(run_dir, start_of(before, version - 1)), config) if resumed else ()
    name = f"configs/start_{len(before)}.toml"
    start = Start(version=version, time=time, config=name, weights=weights, changed=changed)
    text = config_module.dump(config)
    (run_dir.path / "configs").mkdir(exist_ok=True)
    write_whole(run_dir.path / name, text)
    write_whole(run_dir.config, text)
    words = {"format": FORMAT, "starts": [asdict(start) for start in [*before, start]]}
    write_whole(run_dir.history, json.dumps(words, indent=1))
    return start


def start_of(all_starts: list[Start], index: int) -> Start:
    """The start that trained batch `index`: a later one at or before it has made it again."""
    fitting = [start for start in all_starts if start.version <= max(index, 0)]
    if not fitting:
        raise ValueError(f"no start of the run trained batch {index}")
    return fitting[-1]


def config_of(run_dir: RunDir, start: Start) -> Config:
    """The settings of a start."""
    path = run_dir.path / start.config
    try:
        return config_module.load(path)
    except ValueError as error:
        raise ValueError(f"{path}: not the config of a start: {error}") from error


def check_weights(config: Config, start: Start) -> None:
    """ValueError where model.path of a start does not hold the weights that the run began with."""
    if weights_digest(Path(config.model.path)) != start.weights:
        raise ValueError(
            f"model.path = {config.model.path!r} of {start.config} does not hold the weights that the run began with: "
            "put those back"
        )


def changes(before: Config, now: Config) -> tuple[str, ...]:
    """Every setting that differs.  Example: ("trainer.loss decoupled → ppo",)."""
    was, is_ = dict(_flat("", dataclasses.asdict(before))), dict(_flat("", dataclasses.asdict(now)))
    return tuple(
        f"{name} {_shown(was, name)} → {_shown(is_, name)}"
        for name in sorted(was.keys() | is_.keys())
        if name not in HOW_STARTED and (name not in was or name not in is_ or was[name] != is_[name])
    )


def _flat(prefix: str, tree: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def _shown(values: Mapping[str, object], name: str) -> str:
    value = values.get(name, "(unset)")
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)
