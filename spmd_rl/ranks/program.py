"""The program: join the world, become a role, end in one of three ways.

    done     exit code 0
    stopped  exit code 143 (SIGTERM), 130 (SIGINT) or 129 (SIGHUP), on every rank, with a complete checkpoint
    failed   exit code 1, the first error of the job named once with its rank; 2 for what the user wrote

Every rank runs this file in the same order; what differs is behind one `match`.
"""

from __future__ import annotations

import asyncio
import os
import pkgutil
import sys
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from spmd_rl import config as config_module
from spmd_rl.config import Config
from spmd_rl.diagnostics.terminal import below
from spmd_rl.diagnostics.user_code import Refused, refused
from spmd_rl.distributed.agreement import NoAnswer, Said, agree
from spmd_rl.distributed.liveness import Failure, Liveness
from spmd_rl.distributed.stop_signals import StopSignals
from spmd_rl.distributed.world import (
    Meeting,
    World,
    agreed_code,
    check_shared_folder,
    end_process,
    end_sibling,
    end_torchrun,
    join,
    leave,
    leave_refused,
    meet,
    note,
    port_warnings,
    tell_stack_when_asked,
)
from spmd_rl.envs.environment import Environment
from spmd_rl.files import disk_space
from spmd_rl.model.tokenizer import Tokenizer, try_tokenizer
from spmd_rl.processes.guard import die_with_parent
from spmd_rl.ranks.build_engine import check_engine, check_lengths, device_bytes, memory_warnings
from spmd_rl.ranks.build_tasks import Tasks, load_environments, make_tasks
from spmd_rl.ranks.build_trainer import check_model
from spmd_rl.ranks.engine_worker_rank import run_engine_worker
from spmd_rl.ranks.inference_rank import run_inference
from spmd_rl.ranks.orchestrator_rank import OrchestratorRank
from spmd_rl.ranks.rank_facts import compare_files, compare_programs
from spmd_rl.ranks.resume import go_on, starting_point
from spmd_rl.ranks.trainer_rank import run_trainer
from spmd_rl.storage import continuation, history
from spmd_rl.storage.run_dir import RunDir, Summary

T = TypeVar("T")
PREPARE_S = 1800.0  # that the ranks wait for the model to be made, and for each other to read it
GRACE_S = 5.0  # after shutdown_s a rank that hangs ends
FORCED_S = 2.0  # that a forced stop has for its summary and for telling the job's store


@dataclass(frozen=True, kw_only=True)
class Start:
    """What the leading rank decided and made before anything is built; all ranks have what it decided."""

    run_dir: Path
    version: int  # that the trainers start with
    restored: Path | None  # checkpoint to go on from
    tasks: Tasks | None = None  # the leading rank's
    environments: Mapping[str, Environment] = field(default_factory=dict)  # that this rank plays, where it plays any
    facts: Mapping[str, Any] | None = None  # the leading rank's: what later starts depend on
    differences: tuple[str, ...] = ()  # the leading rank's: what is other than at the start before, a line each


def train(config: Config | ValueError, name: str) -> NoReturn:
    """Ends the process of this rank with the code of the run; never returns.  `config`: or why this rank has none."""
    die_with_parent(os.getppid())  # no rank outlives a torchrun that was killed
    meeting = meet()
    try:
        compare_programs(meeting, config)
        assert isinstance(config, Config)  # or all ranks have been refused
        world = join(meeting, config.split)
        start = _agree(meeting, world, config, name)
        check_shared_folder(world, start.run_dir)
    except ValueError as error:
        leave_refused(meeting, error, 2)
    except TimeoutError as error:
        leave_refused(meeting, error, 1)
    except NoAnswer as error:
        print(f"error on rank {meeting.rank} ({meeting.host}): {error}", file=sys.stderr, flush=True)
        end_process(1)
    note(world.job, "started")
    file = Summary(RunDir(start.run_dir).summary)
    signals = StopSignals(
        shutdown_s=config.run.shutdown_s + GRACE_S,
        end=lambda code: _stop_by_force(world, file, live, signals.code, code),
    )
    live = Liveness(
        store=world.store,
        rank=world.rank,
        roles=[world.topology.role(rank) for rank in range(world.world_size)],
        on_failure=lambda failure: _fail(
            failure, world, file, live, signals.code if signals.asked_s >= config.run.shutdown_s else 0
        ),
        stall_timeout_s=config.run.stall_timeout_s,
        stacks_folder=start.run_dir,
    )
    tell_stack_when_asked()
    live.start()
    try:
        if code := _play(world, config, start, file, live, signals):
            note(world.job, "ended", code)
        live.progress("waiting for all to leave")
        leave(world, timeout_s=config.run.shutdown_s)
    except BaseException as error:
        _give_up(error, live)
    live.close()
    end_process(code)


def _play(world: World, config: Config, start: Start, file: Summary, live: Liveness, signals: StopSignals) -> int:
    """This rank's part of the run; the exit code, which is rank 0's on all ranks."""
    run_dir = RunDir(start.run_dir)
    match world.role:
        case "inference" if world.leads:
            life = _orchestrate(world, config, start, file, live, signals)
            world.store.set("exit code", str(_turn(life, live)))
        case "inference":
            _turn(run_inference(world, config, run_dir, live, signals, start.environments), live)
        case "member":
            run_engine_worker(world, config, run_dir, live, signals)
        case "trainer":
            run_trainer(world, config, run_dir, live, signals, start.version, start.restored)
    live.progress("waiting for the end of rank 0")
    return agreed_code(world.store)


async def _orchestrate(
    world: World, config: Config, start: Start, file: Summary, live: Liveness, signals: StopSignals
) -> int:
    assert start.tasks is not None and start.facts is not None
    rank = OrchestratorRank(
        world=world,
        config=config,
        run_dir=RunDir(start.run_dir),
        live=live,
        signals=signals,
        version=start.version,
        tasks=start.tasks,
        facts=start.facts,
        environments=start.environments,
        file=file,
        resumed=start.restored is not None,
    )
    if start.restored:
        rank.restore(start.version, start.restored)
    return await rank.run()


def _agree(meeting: Meeting, world: World, config: Config, name: str) -> Start:
    """The leading rank prepares, all compare what they read, and it begins the run.  ValueError on all ranks alike."""
    start: Start | None = None

    def prepare() -> None:
        nonlocal start
        start = _prepare(world, config, name) if world.leads else None

    def begin() -> dict[str, Any] | None:
        if start is None:
            return None
        _begin(world, config, start, lines)
        return {"run_dir": str(start.run_dir), "version": start.version, "restored": str(start.restored or "")}

    agree(meeting, "preparation", prepare, lambda said: None, timeout_s=PREPARE_S)
    kind, has_device = "trainer" if world.role == "trainer" else "engine", world.topology.takes_device(world.rank)
    devices = {kind: world.device.type} if has_device else {}
    lines = list(compare_files(meeting, config, role=world.role, devices=devices, timeout_s=PREPARE_S))
    environments, said_of_them = _environments(meeting, world, config)
    lines += said_of_them
    words = agree(meeting, "start", begin, lambda said: said[0].value, timeout_s=PREPARE_S)
    restored = Path(words["restored"]) if words["restored"] else None
    start = start or Start(run_dir=Path(words["run_dir"]), version=words["version"], restored=restored)
    return replace(start, environments=environments)


def _environments(meeting: Meeting, world: World, config: Config) -> tuple[dict[str, Environment], list[str]]:
    """Those that this rank will play, where it plays any, and what those of all ranks have to say (`says`).

    ValueError on all ranks alike, with the rank and its host.

    Rank 0 has built them before, for their tasks; another node may lack a module or its data.
    """
    made: dict[str, Environment] = {}

    def build() -> list[str]:
        if world.rank in world.topology.engine_leaders:
            made.update(load_environments(config, Tokenizer(config.model.path, config.model.template)))
        return [f"env.{name}: {line}" for name, env in made.items() for line in getattr(env, "says", ())]

    def together(said: Sequence[Said]) -> list[str]:
        return sorted({line for one in said for line in one.value})

    return made, agree(meeting, "environments", build, together, timeout_s=PREPARE_S)


def _prepare(world: World, config: Config, name: str) -> Start:
    """Make the model, read the tasks, and find the checkpoint to go on from; nothing else is changed."""
    check_engine(config)
    model = Path(config.model.path)
    config_module.check_model_folder(config)
    if not model.is_dir():
        with refused(f"model.make = {config.model.make!r}"):
            pkgutil.resolve_name(config.model.make)(model)
            if not model.is_dir():
                raise Refused(f"model.make = {config.model.make!r} made no folder {model}")
    check_model(config)
    check_lengths(config, world.engine_device)
    tasks = make_tasks(config, try_tokenizer(model, config.model.template))
    run_dir = RunDir(Path(config.run.dir or _named_once(world, name)).absolute())
    try:
        run_dir.claim()
    except ValueError:  # after a failure it may be a lost node's lock, of which the file system does not know yet
        if not world.restarted:
            raise
    version, restored = starting_point(run_dir, config, restarted=world.restarted)
    facts = continuation.facts(config, tasks.eval)
    others: list[str] = []
    if restored:
        facts, others = go_on(restored, config, tasks.train, facts)
    return Start(
        run_dir=run_dir.path, version=version, restored=restored, tasks=tasks, facts=facts, differences=tuple(others)
    )


def _begin(world: World, config: Config, start: Start, compared: Sequence[str]) -> None:
    """Make the run directory, move aside what lies beyond the checkpoint, and say what begins."""
    run_dir = RunDir(start.run_dir)
    run_dir.create()
    disk_space.check_room(Path(config.model.path), run_dir.path, **config.on_disk)
    aside = run_dir.abandon_after(start.version if start.restored else -1)
    assert start.facts is not None
    begun = history.add(
        run_dir,
        config,
        version=start.version,
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        weights=start.facts[continuation.WEIGHTS],
        resumed=start.restored is not None,
    )
    print(config_module.dump(config))
    print(f"run directory {run_dir.path}")
    print(world.describe())
    for line in (*compared, *config_module.limits(config)):
        print(line)
    if start.restored:
        print(f"resuming from {start.restored}; changed: {'; '.join(begun.changed) or 'no setting'}")
        for line in start.differences:
            print(line)
    elif aside:
        print(f"the run before left no complete checkpoint: it lies in {aside} now, and this one begins at version 0")
    warnings = config_module.warnings(config) + memory_warnings(config, world.device, device_bytes(world.device))
    for line in warnings + port_warnings():
        print(f"warning: {line}")
    sys.stdout.flush()


def _named_once(world: World, name: str) -> str:
    """The run directory of this job where none was given: later starts get the name that the first one made."""
    return world.job.compare_set("run_dir", "", f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}").decode()


def _turn(life: Coroutine[None, None, T], live: Liveness) -> T:
    """Live it in an event loop that is then left as it is: closing it would wait for what a user's code still does."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(_watched(life, live))


async def _watched(life: Coroutine[None, None, T], live: Liveness) -> T:
    """Report a failure while the loop still turns: once it is closed, threads that talk to it would fail too.

    What a callback of the loop raises is a failure too, as is what nobody awaits.
    """

    def raised(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:  # asyncio's
        live.failed(context.get("exception") or RuntimeError(str(context["message"])))

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(raised)
    try:
        ended = await life
    except BaseException as error:
        _give_up(error, live)
    loop.set_exception_handler(lambda loop, context: None)  # what still waits in the loop is dropped with it
    return ended


def _give_up(error: BaseException, live: Liveness) -> NoReturn:
    live.failed(error)
    threading.Event().wait()  # for the liveness thread, which ends the process
    raise AssertionError("the process has ended") from error


def _stop_by_force(world: World, file: Summary, live: Liveness, asked: int, code: int) -> NoReturn:
    """A stop that was asked for is for good, also where it had to be forced; neither store nor disk can hold it."""
    status, how = ("failed", "was not in time") if code == 1 else ("stopped", "was cut by a second signal")
    error = f"the stop {how}: what came after saved_version is lost"
    jobs = [partial(note, world.job, "ended", asked)]
    if world.leads:
        jobs.append(partial(_write_summary, world, file, live, status, error))
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    end = time.monotonic() + FORCED_S
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    end_process(code)


def _fail(failure: Failure, world: World, file: Summary, live: Liveness, missed: int) -> None:
    """On every rank, in its liveness thread: whoever found the failure names it, and everybody goes.

    `missed` is the code of a stop that had its time, 0 where there was none: what fails then is not started again.
    """
    found = failure.found_by == world.rank
    if found:
        print(f"run failed: {below(str(failure))}", file=sys.stderr, flush=True)
    if world.leads or (found and failure.rank == 0):  # rank 0 knows most, if it is still there
        _write_summary(world, file, live, "failed", str(failure))
    if failure.silent and failure.rank != world.rank:
        end_sibling(failure.rank)
    if failure.cut_off:  # the torchrun of this node waits for the same host, deaf to signals, until TCP gives up
        sys.stderr.flush()
        end_torchrun()
    elif missed:
        noting = threading.Thread(target=note, args=(world.job, "ended", missed), daemon=True)
        noting.start()
        noting.join(FORCED_S)
    end_process(1)


def _write_summary(world: World, file: Summary, live: Liveness, status: str, error: str) -> None:
    """Of a run that ends here and now; where rank 0 is gone, with what it wrote last."""
    known = live.known() if world.leads else {}
    try:
        file.write({**(known or file.read()), "status": status, "error": error}, last=True)
    except OSError as problem:
        print(f"no {file.path}: {problem}", file=sys.stderr)
