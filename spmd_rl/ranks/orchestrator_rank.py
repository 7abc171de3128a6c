"""Rank 0's life: the orchestrator and, where it has one, an engine, in one event loop.

Translates between the orchestrator's calls and messages to other ranks; what comes from this rank's own engine takes
the same way.  Knows the ranks; decides nothing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from spmd_rl.config import Config
from spmd_rl.diagnostics.terminal import below
from spmd_rl.distributed.liveness import Failure, Liveness
from spmd_rl.distributed.stop_signals import StopSignals
from spmd_rl.distributed.transport import Inbox, Kind, Message, Outbox
from spmd_rl.distributed.world import World
from spmd_rl.envs.environment import Environment
from spmd_rl.files import disk_space
from spmd_rl.metrics.bottleneck import Knobs
from spmd_rl.metrics.plot import plot_run
from spmd_rl.metrics.probe import Limits, Sampled, Scored
from spmd_rl.metrics.report import Report
from spmd_rl.metrics.writer import Recorder
from spmd_rl.model.causal_lm import has_experts, hidden_size
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.orchestrator.orchestrator import Links, Orchestrator
from spmd_rl.orchestrator.weight_exchange import Loaded, Sent, WeightExchange
from spmd_rl.packing import packing
from spmd_rl.packing.packing import Packed
from spmd_rl.ranks.build_tasks import Tasks
from spmd_rl.ranks.inference_rank import InferenceRank, work_message
from spmd_rl.ranks.resume import model_config
from spmd_rl.storage import checkpoint, history
from spmd_rl.storage.continuation import data_anew
from spmd_rl.storage.run_dir import RunDir, Summary
from spmd_rl.types import FailedAttempt, GroupWork, GuardError, Rollout

CUT = "the stop was cut before its end: what came after saved_version is lost"
ANSWER_S = 0.5  # that a failing run waits for its event loop


async def run_orchestrator(
    world: World,
    config: Config,
    run_dir: RunDir,
    live: Liveness,
    signals: StopSignals,
    version: int,
    restored: Path | None,
    tasks: Tasks,  # taken up to the checkpoint's cursor
    facts: Mapping[str, object],  # that later starts depend on
    environments: Mapping[str, Environment],  # that this rank plays
    file: Summary,
) -> int:
    """Until the run is done (0), stopped (128 + signal) or ended by a guard (1); raises when it fails otherwise."""
    loop = asyncio.get_running_loop()
    live.progress("building the engine")
    tokenizer = Tokenizer(config.model.path, config.model.template)
    width = hidden_size(config.model.path)
    ended: asyncio.Queue[int] = asyncio.Queue()  # ranks that said STOP
    own = None
    if world.rank in world.engine_ranks:
        own = InferenceRank(
            world=world,
            config=config,
            run_dir=run_dir,
            live=live,
            send=lambda message: receive(message, world.rank),
            environments=environments,
        )
    outboxes = {peer: Outbox(peer=peer, group=world.ctl, failed=live.lost, depth=1 << 16) for peer in world.peers}

    def send(rank: int, message: Message) -> None:
        if rank == world.rank:
            loop.call_soon(own.handle, message)
        else:
            outboxes[rank].put(message)

    def ship(index: int, packed: Packed, save: bool) -> None:
        """Every trainer its share of the batch, of about equal cost."""
        shares = packing.shares(
            packed, world.topology.num_shares, width=width, share_prefix=config.trainer.share_prefix
        )
        for rank in world.trainer_ranks:
            share = shares[world.topology.share_of(rank)]
            words = {"index": index, "save": save, "words": share.words}
            send(rank, Message(Kind.BATCH, words, share.arrays()))

    def score(number: int, packed: Packed) -> None:
        for rank in world.trainer_ranks:
            send(rank, Message(Kind.PROBE, {"number": number, "words": packed.words}, packed.arrays()))

    def cancel(rank: int, work: GroupWork) -> None:
        words = {"tickets": [work.tickets.start, work.tickets.stop], "purpose": work.purpose}
        send(rank, Message(Kind.CANCEL, words))

    def to_all(ranks: tuple[int, ...], kind: Kind, **words: object) -> None:
        for rank in ranks:
            send(rank, Message(kind, words))

    links = Links(
        engines=world.topology.engine_leaders,
        trainers=world.trainer_ranks,
        work=lambda rank, work: send(rank, work_message(work)),
        cancel=cancel,
        stats=lambda number: to_all(world.topology.engine_leaders, Kind.STATS, number=number),
        pin=lambda number, upto: to_all(world.topology.engine_leaders, Kind.PIN, number=number, upto=upto),
        batch=ship,
        sample=lambda rank, number, version: send(rank, Message(Kind.SAMPLE, {"number": number, "version": version})),
        score=score,
        finish_training=lambda export, save: to_all(world.trainer_ranks, Kind.STOP, export=export, save=save),
    )
    report = Report(
        steps=config.run.steps,
        knobs=knobs_of(config),
        slots=config.inference.max_slots * len(world.topology.engine_leaders),
        bound=config.age_bound,
        decode=tokenizer.decode,
        say=lambda line: print(line, flush=True),
    )
    by_disk = config.weights.mode == "disk"
    weights = WeightExchange(
        senders=world.trainer_ranks[:1] if by_disk else world.sender_ranks,
        holders=world.engine_ranks,
        engines=links.engines,
        layout=_layout(world, config),
        by_disk=by_disk,
        swap=lambda version, sums: to_all(world.engine_ranks, Kind.SWAP, version=version, checksums=sums),
        say=report.say,
    )
    if restored:
        report.restore(map(json.loads, run_dir.metrics.read_text("utf-8").splitlines()))
    since = version + 1 if restored else 0
    recorder = Recorder(metrics=run_dir.metrics, tensorboard=run_dir.tensorboard, since=since)
    orchestrator = Orchestrator(
        config=config,
        run_dir=run_dir,
        tasks=tasks.train,
        difficulty=tasks.difficulty,
        eval_tasks=tasks.eval,
        links=links,
        weights=weights,
        recorder=recorder,
        report=report,
        decode=tokenizer.decode,
        complete_checkpoint=partial(_complete, live, run_dir, config, facts),
        writing=live.writing,
        recorded=lambda: keep("running"),
        version=version,
        limits=Limits(
            exact=config.model.dtype != "bfloat16" and all(place.name == "cpu" for place in world.places),
            experts=has_experts(config.model.path),
        ),
    )

    starts = [asdict(start) for start in history.starts(run_dir)]

    def summary(status: str) -> dict[str, object]:
        lengths, closed_s = orchestrator.path.mean_lengths(), orchestrator.gate.closed_s()
        numbers = report.summary(orchestrator.ledger_summary(), lengths, closed_s)
        ended = {"status": status, "error": "", "saved_version": orchestrator.saved_version}
        return {**ended, **numbers, "history": starts}

    writer = ThreadPoolExecutor(1, "summary")

    def keep(status: str, error: str = "") -> None:
        """Write what is known, should this process be killed."""
        writer.submit(_kept, live, file, summary(status) | {"error": error})

    live.known = partial(_in_loop, loop, partial(summary, "failed"))
    if restored:
        words, rollouts = checkpoint.load_orchestrator(restored)
        orchestrator.restore(words, rollouts, data_anew=data_anew(config, version, words["data_from"]))

    def receive(message: Message, rank: int) -> None:
        """An answer, from this rank or another."""
        words = message.words
        if message.kind != Kind.STATS:  # those come whether or not anything moves
            live.progress("waiting for rollouts, steps and weights")
        match message.kind:
            case Kind.ROLLOUT:
                (rollout,) = packing.unpack(packing.from_arrays(message.arrays, words["words"]))
                orchestrator.rollout_ended(rollout)
            case Kind.FAILED:
                orchestrator.attempt_failed(FailedAttempt(**words))
            case Kind.STEP:
                orchestrator.stepped(rank, words["version"], words["metrics"])
            case Kind.SENT:
                names = ("sent_bytes", "send_s", "update_norm")
                sent = Sent(checksums=tuple(words["checksums"]), **{name: words[name] for name in names})
                weights.sent(rank, words["version"], sent)
            case Kind.LOADED:
                loaded = Loaded(
                    checksums=tuple(words["checksums"]), receive_s=words["receive_s"], pause_s=words["pause_s"]
                )
                weights.loaded(rank, words["version"], loaded)
            case Kind.SAVED:
                orchestrator.saved(rank, words["version"], words["files"], final=words["final"])
            case Kind.PINNED:
                orchestrator.pin.answered(words["number"], rank, words["version"], words["held_s"])
            case Kind.STATS:
                orchestrator.counted(rank, words["number"], words["stats"])
            case Kind.SAMPLED:
                arrays = dict(message.arrays)
                forward = {name: arrays.pop(name) for name in ("scores", "choices")}
                sampled = Sampled(rank=rank, packed=packing.from_arrays(arrays, words["words"]), **forward)
                orchestrator.sampled(rank, words["number"], words["num_tokens"], sampled)
            case Kind.PROBED:
                orchestrator.scored(rank, words["number"], Scored(**message.arrays, seconds=words["seconds"]))
            case Kind.GAVE_UP:
                orchestrator.trainer_gave_up(rank, words["version"], GuardError(words["text"]))
            case Kind.ASKED:
                signals.ask(words["signal"])
            case Kind.STOP:
                ended.put_nowait(rank)

    def from_peer(message: Message) -> None:
        loop.call_soon_threadsafe(receive, message, message.peer)

    inboxes = [Inbox(peer=peer, group=world.ctl, deliver=from_peer, failed=live.lost) for peer in world.peers]

    def stop(number: int) -> None:
        report.say(
            f"stopping on {signal.Signals(number).name}: at most {config.run.shutdown_s:g} s; again ends at once"
        )
        orchestrator.stop()
        keep("stopped", CUT)

    signals.on_first(lambda number: loop.call_soon_threadsafe(stop, number))
    keep("running")
    live.progress("waiting for the first weights")
    gc.collect()
    gc.freeze()  # what is built by now is never looked through again: that would hold the loop for 0.15 s each time
    live.watch(loop)
    status = await orchestrator.run()
    live.watch(None)
    live.progress("ending")
    end = summary(status)
    if orchestrator.failure:
        rank = orchestrator.failed_rank
        failure = Failure(
            rank=rank, role=world.topology.role(rank), text=str(orchestrator.failure), found_by=world.rank
        )
        end["error"] = str(failure)
        print(f"run failed: {below(str(failure))}", file=sys.stderr, flush=True)
    await asyncio.to_thread(file.write, end, last=True)
    to_all(tuple(rank for rank in world.engine_ranks if rank != world.rank), Kind.STOP)
    if own is not None:
        await asyncio.to_thread(own.close, config.run.shutdown_s)
    left = set(world.peers)
    try:
        async with asyncio.timeout(config.run.shutdown_s):
            while left:
                left.discard(await ended.get())
    except TimeoutError:
        raise RuntimeError(f"ranks {sorted(left)} did not end within {config.run.shutdown_s:g} s") from None
    for outbox in outboxes.values():
        outbox.close(timeout_s=config.run.shutdown_s)
    for inbox in inboxes:
        inbox.join(timeout_s=config.run.shutdown_s)
    recorder.close()
    plot_run(run_dir.metrics, run_dir.curve, bound=config.age_bound.age)
    paths: Mapping[str, object] = {"run directory": run_dir.path, "curve": run_dir.curve}
    if status == "done":
        paths = {**paths, "trained model": run_dir.model}
    report.say(report.table(end, paths=paths))
    return {"done": 0, "failed": 1}.get(status, signals.code)


def _kept(live: Liveness, file: Summary, words: dict[str, object]) -> None:
    """In a worker thread."""
    try:
        file.write(words)
    except OSError as error:
        live.failed(disk_space.blamed(error, file.path.parent))


def _in_loop(loop: asyncio.AbstractEventLoop, ask: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Asked between two events, from another thread; of a loop that is held up, as it stands."""
    answer: Future[dict[str, object]] = Future()
    loop.call_soon_threadsafe(lambda: answer.set_result(ask()))
    try:
        return answer.result(ANSWER_S)
    except TimeoutError:
        return ask()


def knobs_of(config: Config) -> Knobs:
    """The settings that the verdict names."""
    names = ("max_staleness", "max_concurrent", "gate", "order", "window", "max_age")
    return Knobs(
        batch_size=config.rollout.batch_size,
        kv_cache_mib=config.inference.kv_cache_mib,
        solved_at=config.eval.solved_at,
        **{name: getattr(config.staleness, name) for name in names},
    )


def _layout(world: World, config: Config) -> str:
    """Merged weights have none: another machine may round them otherwise."""
    form = f"as {config.model.dtype} on {world.engine_device.type} by {config.weights.mode}"
    return "" if config.lora.rank else f"{form} from {len(world.sender_ranks)} trainers"


def _complete(
    live: Liveness,
    run_dir: RunDir,
    config: Config,
    facts: Mapping[str, object],
    version: int,
    words: Mapping[str, object],
    rollouts: list[Rollout],
    files: Mapping[str, list[int]],
) -> Path:
    """In a worker thread: add rank 0's half to the trainers', and make the checkpoint exist."""
    words = {**words, "model": model_config(config), "facts": facts}
    with live.writing(run_dir.checkpoints):
        checkpoint.save_orchestrator(words, rollouts, checkpoint.aside(run_dir.checkpoints, version))
        folder = checkpoint.complete(run_dir.checkpoints, version, files)
        checkpoint.remove_old(run_dir.checkpoints, config.checkpoint.keep_last)
    return folder
