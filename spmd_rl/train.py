"""The program: join the world, become a role, end in one of three ways.

    done     exit code 0
    stopped  exit code 143 (SIGTERM) or 130 (SIGINT), with a checkpoint
    failed   exit code 1, the first error of the job named once with its rank; 2 for what the user wrote

Every rank runs this file in the same order; what differs is behind one `match`.
"""

from __future__ import annotations

import asyncio
import json
import pkgutil
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

from spmd_rl import checkpoint
from spmd_rl import config as config_module
from spmd_rl.config import Config
from spmd_rl.inference import run_inference
from spmd_rl.liveness import Failure, Liveness, SignalWatch
from spmd_rl.orchestration import run_orchestrator
from spmd_rl.run_dir import RunDir, write_whole
from spmd_rl.training import run_trainer
from spmd_rl.world import World, check_shared_folder, end_process, join, leave

T = TypeVar("T")
PREPARE_S = 1800.0  # that the ranks wait for the model to be made


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the leading rank decided before anything is built, the same for all."""

    run_dir: Path
    version: int  # that the trainers start with
    restored: Path | None  # checkpoint to go on from


def train(config: Config, name: str) -> None:
    """Ends the process of this rank with the code of the run; never returns."""
    world = join(
        num_inference=config.topology.inference,
        num_trainers=config.topology.trainer,
        dp_replicate=config.topology.dp_replicate,
        engine_on_rank0=config.inference.engine_on_rank0,
    )
    try:
        start = _agree(world, config, name)
        check_shared_folder(world, start.run_dir)
    except ValueError as error:
        if world.leads:
            print(f"error: {error}", file=sys.stderr)
        end_process(2)
    live = Liveness(
        store=world.store,
        rank=world.rank,
        roles=[world.topology.role(rank) for rank in range(world.world_size)],
        on_failure=lambda failure: _fail(failure, world, RunDir(start.run_dir)),
        stall_timeout_s=config.run.stall_timeout_s,
        stacks_folder=start.run_dir,
    )
    try:
        code = _play(world, config, start, live)
        live.progress("leaving")
        leave(world, timeout_s=config.run.shutdown_s)
    except BaseException as error:
        _give_up(error, live)
    live.close()
    end_process(code)


def _play(world: World, config: Config, start: Start, live: Liveness) -> int:
    """This rank's part of the run; its exit code."""
    run_dir = RunDir(start.run_dir)
    match world.role:
        case "inference" if world.leads:
            life = run_orchestrator(world, config, run_dir, live, start.version, start.restored)
            return asyncio.run(_watched(life, live))
        case "inference":
            with _left_within(config.run.shutdown_s):
                asyncio.run(_watched(run_inference(world, config, live), live))
        case "trainer":
            with _left_within(config.run.shutdown_s):
                run_trainer(world, config, run_dir, live, start.version, start.restored)
    return 0


def _agree(world: World, config: Config, name: str) -> Start:
    """The leading rank prepares and tells; the others wait for it.  ValueError on all ranks alike."""
    if world.leads:
        try:
            start = _prepare(world, config, name)
            words = {"run_dir": str(start.run_dir), "version": start.version, "restored": str(start.restored or "")}
        except (ValueError, OSError) as error:
            words = {"error": str(error)}
        world.store.set("start", json.dumps(words))
    world.store.wait(["start"], timedelta(seconds=PREPARE_S))
    words = json.loads(world.store.get("start"))
    if "error" in words:
        raise ValueError(words["error"])
    restored = Path(words["restored"]) if words["restored"] else None
    return Start(run_dir=Path(words["run_dir"]), version=words["version"], restored=restored)


def _prepare(world: World, config: Config, name: str) -> Start:
    """Make the model and the run directory, and find the checkpoint to go on from."""
    model = Path(config.model.path)
    if not model.is_dir():
        if not config.model.make:
            raise ValueError(f"model.path = {str(model)!r}: no such folder, and model.make names nothing that makes it")
        try:
            make = pkgutil.resolve_name(config.model.make)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"model.make = {config.model.make!r}: {error}") from error
        make(model)
    run_dir = RunDir(Path(config.run.dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute())
    newest = checkpoint.newest(run_dir.checkpoints)
    restarted = world.generation > 1
    if config.run.resume == "never" and run_dir.used and not restarted:
        raise ValueError(f"run.dir = {run_dir.path} holds a run already: choose another, or resume = auto")
    if config.run.resume == "must" and newest is None:
        raise ValueError(f"nothing to resume: no complete checkpoint in {run_dir.checkpoints}")
    if newest is None and run_dir.used and not restarted:
        raise ValueError(f"run.dir = {run_dir.path} holds a run without a complete checkpoint: choose another")
    version, restored = newest or (0, None)
    if version >= config.run.steps:
        raise ValueError(
            f"{restored} is at version {version}, run.steps = {config.run.steps}: nothing is left to train"
        )
    run_dir.create()
    run_dir.abandon_after(version)
    write_whole(run_dir.config, config_module.dump(config))
    print(config_module.dump(config))
    print(f"run directory {run_dir.path}")
    print(world.describe())
    print(f"age bound: {config.age_bound}")
    if restored:
        print(f"resuming from {restored}")
    for line in config_module.warnings(config):
        print(f"warning: {line}")
    sys.stdout.flush()
    return Start(run_dir=run_dir.path, version=version, restored=restored)


async def _watched(life: Coroutine[None, None, T], live: Liveness) -> T:
    """Report a failure while the loop still turns: once it is closed, threads that talk to it would fail too."""
    try:
        return await life
    except BaseException as error:
        _give_up(error, live)


def _give_up(error: BaseException, live: Liveness) -> NoReturn:
    live.failed(error)
    threading.Event().wait()  # for the liveness thread, which ends the process


def _fail(failure: Failure, world: World, run_dir: RunDir) -> None:
    """On every rank, in its liveness thread: whoever found the failure names it, and everybody goes."""
    if failure.found_by == world.rank:
        print(f"run failed: {failure}", file=sys.stderr)
        summary = {"status": "failed", "error": str(failure)}
        if run_dir.summary.exists():
            summary = json.loads(run_dir.summary.read_text()) | summary
        write_whole(run_dir.summary, json.dumps(summary, indent=1))
    end_process(1)


@contextmanager
def _left_within(shutdown_s: float) -> Iterator[None]:
    """A rank that is told to stop waits for rank 0's word, but not for ever."""

    def received(number: int) -> None:
        timer = threading.Timer(shutdown_s + 5.0, end_process, (128 + number,))
        timer.daemon = True
        timer.start()

    watch = SignalWatch(received=received)
    yield
    watch.close()
