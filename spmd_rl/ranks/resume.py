"""What a run starts from: a fresh directory, or the newest complete checkpoint of its own.

Never a fresh start where a checkpoint was meant: one that is damaged, foreign or does not fit the config is refused
with its path and the reason (ValueError).  A run that left no checkpoint is begun anew beside what it left.  Knows
nothing of how state is put back.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from spmd_rl.config import Config
from spmd_rl.orchestrator.difficulty import Difficulty
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.orchestrator.state import from_json
from spmd_rl.orchestrator.task_stream import TaskStream
from spmd_rl.storage import checkpoint, continuation, history
from spmd_rl.storage.run_dir import RunDir

ANY_VALUE = {"transformers_version", "dtype", "torch_dtype", "_name_or_path"}  # of a model's config


def starting_point(run_dir: RunDir, config: Config, *, restarted: bool) -> tuple[int, Path | None]:
    """Version to start with, and the checkpoint that holds it; what an interrupted save left is put right first.

    `restarted`: the launcher brought the world back by itself, so a used directory is no mistake.
    """
    if config.run.resume == "never" and run_dir.used and not restarted:
        raise ValueError(f"run.dir = {run_dir.path} holds a run already: choose another, or resume = auto")
    if run_dir.used or run_dir.history.exists():
        history.starts(run_dir)
    checkpoint.tidy(run_dir.checkpoints)
    newest = checkpoint.newest(run_dir.checkpoints)
    if config.run.resume == "must" and newest is None and not restarted:
        raise ValueError(f"nothing to resume: no complete checkpoint in {run_dir.checkpoints}")
    if newest is None and (left := sorted(run_dir.checkpoints.glob("step_*"))):
        raise ValueError(f"{left[-1]} has no {checkpoint.MARKER}, so it is not whole: remove it to begin anew")
    if newest is None:
        continuation.data_anew(config, 0, 0)
        return 0, None
    version, folder = newest
    try:
        checkpoint.verify(folder)
        check_fits(folder, config)
    except ValueError as error:
        raise ValueError(
            f"cannot resume: {error} (remove {folder.name} to go on from the checkpoint before)"
        ) from error
    if version >= config.run.steps and _ended(run_dir, config, version, folder):
        raise ValueError(f"{folder} is at version {version}, run.steps = {config.run.steps}: nothing is left to train")
    return version, folder


def go_on(
    folder: Path, config: Config, tasks: TaskStream, here: Mapping[str, object]
) -> tuple[dict[str, object], list[str]]:
    """Put the tasks behind those that were drawn; what is recorded from here on, and what is other and no harm.

    ValueError where something that the checkpoint depends on is other now, with its name and the next step.
    """
    words, _ = checkpoint.load_orchestrator(folder)
    version = words["path"]["version"]
    anew = continuation.data_anew(config, version, words["data_from"])
    try:
        restart = continuation.restart_hint(version, words["data_from"])
        lines = continuation.compare(words["facts"], here, config, restart=restart, anew=anew)
        if anew:
            drawn = words["tasks"]["cursor"]
            lines.append(f"data.restart_at = {version}: the data start at 0, {drawn} tasks were drawn before")
        else:
            with continuation.data_named(restart):
                tasks.restore(words["tasks"])
    except ValueError as error:
        raise ValueError(f"cannot resume from {folder}: {error}") from error
    return {**here, continuation.WEIGHTS: words["facts"][continuation.WEIGHTS]}, lines


def _ended(run_dir: RunDir, config: Config, version: int, folder: Path) -> bool:
    """Whether this version, the last, was evaluated and exported too."""
    evaluated = config.eval.every < 0 or run_dir.evaluation(version).exists()
    return evaluated and run_dir.model.exists() and bool(checkpoint.load_orchestrator(folder)[0].get("exported"))


def check_fits(folder: Path, config: Config) -> None:
    """ValueError where this config could not go on from there."""
    words, rollouts = checkpoint.load_orchestrator(folder)
    try:
        there = {key: value for key, value in words["model"].items() if key not in ANY_VALUE}
        state = from_json(words["path"], rollouts)
        counts = [state.version, state.next_ticket, state.next_group, words["tasks"]["cursor"]]
        sizes = {len(group.rollouts) for group in state.groups} | {work.size for work in state.unfinished}
        for batch in state.batches:
            sizes |= set(Counter(rollout.group_id for rollout in batch.rollouts).values())
        indices = [batch.index for batch in state.batches]
        weights = words.get("weights", {"layout": "", "checksums": []})
        whole = isinstance(weights["layout"], str) and isinstance(weights["checksums"], list)
        held = [ticket for group in state.groups for ticket in group.tickets]
        held += [ticket for work in state.unfinished for ticket in work.tickets]
        held += [rollout.ticket for batch in state.batches for rollout in batch.rollouts]
        running = sum(work.size for work in state.unfinished)
        fits = len(held) == len(set(held)) and max(held, default=-1) < state.next_ticket
        fits &= math.isfinite(words.get("admission_limit", 0.0))
        drawn = [source["drawn"] for source in words["tasks"]["sources"].values()]
        fits &= sum(drawn) == words["tasks"]["cursor"] and min(drawn, default=0) >= 0
        data_from = words["data_from"]
        counts += [data_from, *drawn]
        facts = words["facts"]
        whole &= isinstance(facts, dict) and {continuation.WEIGHTS, continuation.EVALUATED} < facts.keys()
        ledger = Ledger()
        ledger.restore(state.ledger)
        ledger.assert_closed(in_flight=running, waiting=len(held) - running)
        ledger.close_tokens()
        known = Difficulty(least=0.0, most=1.0, revisit=1.0, solved_at=1.0, seed=0)
        known.restore(words.get("difficulty", ()))
        known.summary()
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{folder}: the orchestrator's state does not fit together: {error!r}") from error
    if any(type(count) is not int or count < 0 for count in counts) or folder.name != f"step_{state.version}":
        raise ValueError(f"{folder}: version, tickets, groups and cursor are {counts}")
    if not fits:
        raise ValueError(f"{folder}: tickets {sorted(held)} and a next one of {state.next_ticket} do not fit together")
    if not whole:
        raise ValueError(f"{folder}: its weights were {weights}")
    if sorted(indices) != list(range(state.version, state.version + len(indices))):
        raise ValueError(f"{folder}: holds batches {indices} at version {state.version}")
    continuation.data_anew(config, state.version, data_from)
    here = model_config(config)
    for key in sorted(there.keys() | here.keys() - ANY_VALUE):
        if there.get(key) != here.get(key):
            raise ValueError(f"{folder} holds a model with {key} = {there.get(key)!r}, here it is {here.get(key)!r}")
    rollout = config.rollout
    if other := sizes - {rollout.group_size}:
        raise ValueError(f"{folder} holds a group of {min(other)} rollouts, rollout.group_size = {rollout.group_size}")


def model_config(config: Config) -> dict[str, object]:
    """The model's own config.json, and what LoRA adds to it: a checkpoint keeps it to be compared."""
    there: dict[str, object] = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
    rank, alpha, targets = config.lora.rank, config.lora.alpha, config.lora.targets
    return there | ({"lora": {"rank": rank, "alpha": alpha, "targets": sorted(targets)}} if rank else {})
