"""What a run starts from: a fresh directory, or the newest complete checkpoint of its own.

Never a fresh start where a checkpoint was meant: one that is damaged, foreign or does not fit the config is refused
with its path and the reason (ValueError).  Knows nothing of how state is put back.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from spmd_rl import checkpoint
from spmd_rl.config import Config
from spmd_rl.ledger import Ledger
from spmd_rl.orchestrator.difficulty import Difficulty
from spmd_rl.orchestrator.state import from_json
from spmd_rl.run_dir import RunDir

ANY_VALUE = {"transformers_version", "dtype", "torch_dtype", "_name_or_path"}  # of a model's config


def starting_point(run_dir: RunDir, config: Config, *, restarted: bool) -> tuple[int, Path | None]:
    """Version to start with, and the checkpoint that holds it; what an interrupted save left is put right first.

    `restarted`: the launcher brought the world back by itself, so a used directory is no mistake.
    """
    checkpoint.tidy(run_dir.checkpoints)
    newest = checkpoint.newest(run_dir.checkpoints)
    if config.run.resume == "never" and run_dir.used and not restarted:
        raise ValueError(f"run.dir = {run_dir.path} holds a run already: choose another, or resume = auto")
    if config.run.resume == "must" and newest is None and not restarted:
        raise ValueError(f"nothing to resume: no complete checkpoint in {run_dir.checkpoints}")
    if newest is None and run_dir.used and not restarted:
        raise ValueError(f"run.dir = {run_dir.path} holds a run without a complete checkpoint: choose another")
    if newest is None:
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
        envs = {work.task.env for work in state.unfinished}
        formed = {len(batch.rollouts) for batch in state.batches}
        indices = [batch.index for batch in state.batches]
        weights = words.get("weights", {"layout": "", "checksums": []})
        whole = isinstance(weights["layout"], str) and isinstance(weights["checksums"], list)
        held = [ticket for holder in (*state.groups, *state.unfinished) for ticket in holder.tickets]
        held += [rollout.ticket for batch in state.batches for rollout in batch.rollouts]
        running = sum(work.size for work in state.unfinished)
        fits = len(held) == len(set(held)) and max(held, default=-1) < state.next_ticket
        fits &= math.isfinite(words.get("admission_limit", 0.0))
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
    here = model_config(config)
    for key in sorted(there.keys() | here.keys() - ANY_VALUE):
        if there.get(key) != here.get(key):
            raise ValueError(f"{folder} holds a model with {key} = {there.get(key)!r}, here it is {here.get(key)!r}")
    rollout = config.rollout
    for name, found, wanted in (("group", sizes, rollout.group_size), ("batch", formed, rollout.batch_size)):
        if other := found - {wanted}:
            raise ValueError(f"{folder} holds a {name} of {min(other)} rollouts, rollout.{name}_size = {wanted}")
    if unknown := envs - config.env.keys():
        raise ValueError(f"{folder} holds unfinished tasks of env {min(unknown)!r}, which the config lacks")


def model_config(config: Config) -> dict[str, object]:
    """The model's own config.json, and what LoRA adds to it: a checkpoint keeps it to be compared."""
    there = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
    rank, alpha, targets = config.lora.rank, config.lora.alpha, config.lora.targets
    return there | ({"lora": {"rank": rank, "alpha": alpha, "targets": sorted(targets)}} if rank else {})
