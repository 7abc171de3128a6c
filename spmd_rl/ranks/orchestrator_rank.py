"""Rank 0's life: the orchestrator and, where it has one, an engine, in one event loop.

Carries messages between the orchestrator and other ranks; those of this rank's own engine take the same way.
Knows the ranks; decides nothing.
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
from spmd_rl.distributed.mail import Mail
from spmd_rl.distributed.stop_signals import StopSignals
from spmd_rl.distributed.world import World
from spmd_rl.envs.environment import Environment
from spmd_rl.files import disk_space
from spmd_rl.metrics.bottleneck import Knobs
from spmd_rl.metrics.plot import plot_run
from spmd_rl.metrics.probe import Limits
from spmd_rl.metrics.report import Report
from spmd_rl.metrics.writer import Recorder
from spmd_rl.model.causal_lm import has_experts, hidden_size
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.orchestrator.orchestrator import Orchestrator, Ranks
from spmd_rl.packing import packing
from spmd_rl.packing.messages import (
    AnyMessage,
    Bye,
    Counters,
    Files,
    Message,
    StopRequested,
    ToEngine,
    ToOrchestrator,
    TrainBatch,
)
from spmd_rl.packing.packing import Packed
from spmd_rl.ranks.build_tasks import Tasks
from spmd_rl.ranks.inference_rank import InferenceRank
from spmd_rl.ranks.resume import model_config
from spmd_rl.storage import checkpoint, history
from spmd_rl.storage.continuation import data_anew
from spmd_rl.storage.run_dir import RunDir, Summary
from spmd_rl.types import Rollout

CUT = "the stop was cut before its end: what came after saved_version is lost"
ANSWER_S = 0.5  # that a failing run waits for its event loop


class OrchestratorRank:
    """Build inside the event loop, `restore` if resuming, `await run()`."""

    def __init__(
        self,
        *,
        world: World,
        config: Config,
        run_dir: RunDir,
        live: Liveness,
        signals: StopSignals,
        version: int,
        tasks: Tasks,  # taken up to the checkpoint's cursor
        facts: Mapping[str, object],  # that later starts depend on
        environments: Mapping[str, Environment],  # that this rank plays
        file: Summary,
        resumed: bool,
    ) -> None:
        self._world, self._config, self._run_dir, self._live = world, config, run_dir, live
        self._signals, self._file = signals, file
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Queue[int] = asyncio.Queue()  # ranks that said Bye
        self._summaries = ThreadPoolExecutor(1, "summary")
        self._starts = [asdict(start) for start in history.starts(run_dir)]
        live.progress("building the engine")
        tokenizer = Tokenizer(config.model.path, config.model.template)
        self._width = hidden_size(config.model.path)
        self._engine = self._own_engine(environments)
        self._report = self._make_report(tokenizer, resumed)
        since = version + 1 if resumed else 0
        self._recorder = Recorder(metrics=run_dir.metrics, tensorboard=run_dir.tensorboard, since=since)
        self._orchestrator = Orchestrator(
            config=config,
            run_dir=run_dir,
            tasks=tasks.train,
            difficulty=tasks.difficulty,
            eval_tasks=tasks.eval,
            ranks=self._ranks(),
            send=self._send,
            send_batch=self._send_batch,
            layout=_layout(world, config),
            recorder=self._recorder,
            report=self._report,
            decode=tokenizer.decode,
            complete_checkpoint=partial(_complete, live, run_dir, config, facts),
            writing=live.writing,
            recorded=lambda: self._keep("running"),
            version=version,
            limits=Limits(
                exact=config.model.dtype != "bfloat16" and all(place.name == "cpu" for place in world.places),
                experts=has_experts(config.model.path),
            ),
        )
        self._mail = Mail(peers=world.peers, group=world.ctl, deliver=self._from_peer, failed=live.lost)

    def restore(self, version: int, folder: Path) -> None:
        """Go on from the checkpoint at `version`.  ValueError where it does not fit this run."""
        words, rollouts = checkpoint.load_orchestrator(folder)
        anew = data_anew(self._config, version, words["data_from"])
        self._orchestrator.restore(words, rollouts, data_anew=anew)

    async def run(self) -> int:
        """Until the run is done (0), stopped (128 + signal) or ended by a guard (1); raises when it fails otherwise."""
        live = self._live
        live.known = partial(_in_loop, self._loop, partial(self._summary, "failed"))
        self._signals.on_first(lambda number: self._loop.call_soon_threadsafe(self._stop, number))
        self._keep("running")
        live.progress("waiting for the first weights")
        gc.collect()
        gc.freeze()  # what is built by now is never looked through again: that would hold the loop for 0.15 s each time
        live.watch(self._loop)
        status = await self._orchestrator.run()
        live.watch(None)
        live.progress("ending")
        end = self._summary(status)
        if failure := self._orchestrator.ending.failure:
            end["error"] = self._say_failure(str(failure))
        await asyncio.to_thread(self._file.write, end, last=True)
        await self._part()
        self._recorder.close()
        plot_run(self._run_dir.metrics, self._run_dir.curve, bound=self._config.age_bound.age)
        paths: dict[str, object] = {"run directory": self._run_dir.path, "curve": self._run_dir.curve}
        if status == "done":
            paths["trained model"] = self._run_dir.model
        self._report.say(self._report.table(end, paths=paths))
        return {"done": 0, "failed": 1}.get(status, self._signals.code)

    def handle(self, rank: int, message: ToOrchestrator) -> None:
        """What another rank, or this one's engine, has to say."""
        if not isinstance(message, Counters):  # those come whether or not anything moves
            self._live.progress("waiting for rollouts, steps and weights")
        match message:
            case StopRequested(signal=number):
                self._signals.ask(number)
            case Bye():
                self._ended.put_nowait(rank)
            case _:
                self._orchestrator.handle(rank, message)

    def _from_peer(self, peer: int, message: AnyMessage) -> None:
        """On the thread of the peer's inbox."""
        assert isinstance(message, ToOrchestrator)
        self._loop.call_soon_threadsafe(self.handle, peer, message)

    def _send(self, rank: int, message: Message) -> None:
        if rank == self._world.rank:
            assert self._engine is not None and isinstance(message, ToEngine)
            self._loop.call_soon(self._engine.handle, message)
        else:
            self._mail.send(rank, message)

    def _send_batch(self, index: int, packed: Packed, save: bool) -> None:
        """Every trainer its share of the batch, of about equal cost."""
        topology, share_prefix = self._world.topology, self._config.trainer.share_prefix
        shares = packing.shares(packed, topology.num_shares, width=self._width, share_prefix=share_prefix)
        for rank in self._world.trainer_ranks:
            self._send(rank, TrainBatch(index=index, save=save, share=shares[topology.share_of(rank)]))

    def _stop(self, number: int) -> None:
        self._report.say(
            f"stopping on {signal.Signals(number).name}: at most {self._config.run.shutdown_s:g} s; again ends at once"
        )
        self._orchestrator.ending.stop()
        self._keep("stopped", CUT)

    async def _part(self) -> None:
        """Say Bye to all ranks and wait until all have said it.  RuntimeError where one does not in time."""
        world, limit_s = self._world, self._config.run.shutdown_s
        for rank in world.peers:
            self._mail.send(rank, Bye())
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close, limit_s)
        left = set(world.peers)
        try:
            async with asyncio.timeout(limit_s):
                while left:
                    left.discard(await self._ended.get())
        except TimeoutError:
            raise RuntimeError(f"ranks {sorted(left)} did not end within {limit_s:g} s") from None
        self._mail.close(timeout_s=limit_s)

    # ---- what is kept and said

    def _summary(self, status: str) -> dict[str, object]:
        orchestrator = self._orchestrator
        lengths, closed_s = orchestrator.path.mean_lengths(), orchestrator.gate.closed_s()
        numbers = self._report.summary(orchestrator.ledger_summary(), lengths, closed_s)
        ended = {"status": status, "error": "", "saved_version": orchestrator.checkpoints.saved_version}
        return {**ended, **numbers, "history": self._starts}

    def _keep(self, status: str, error: str = "") -> None:
        """Write what is known, should this process be killed."""
        self._summaries.submit(_kept, self._live, self._file, self._summary(status) | {"error": error})

    def _say_failure(self, text: str) -> str:
        rank = self._orchestrator.ending.failed_rank
        role = self._world.topology.role(rank)
        failure = str(Failure(rank=rank, role=role, text=text, found_by=self._world.rank))
        print(f"run failed: {below(failure)}", file=sys.stderr, flush=True)
        return failure

    # ---- building

    def _own_engine(self, environments: Mapping[str, Environment]) -> InferenceRank | None:
        world = self._world
        if world.rank not in world.engine_ranks:
            return None
        return InferenceRank(
            world=world,
            config=self._config,
            run_dir=self._run_dir,
            live=self._live,
            send=lambda message: self.handle(world.rank, message),
            environments=environments,
        )

    def _make_report(self, tokenizer: Tokenizer, resumed: bool) -> Report:
        config = self._config
        report = Report(
            steps=config.run.steps,
            knobs=knobs_of(config),
            slots=config.inference.max_slots * len(self._world.topology.engine_leaders),
            bound=config.age_bound,
            decode=tokenizer.decode,
            say=lambda line: print(line, flush=True),
        )
        if resumed:
            report.restore(map(json.loads, self._run_dir.metrics.read_text("utf-8").splitlines()))
        return report

    def _ranks(self) -> Ranks:
        world = self._world
        by_disk = self._config.weights.mode == "disk"
        return Ranks(
            engines=world.topology.engine_leaders,
            holders=world.engine_ranks,
            trainers=world.trainer_ranks,
            senders=world.trainer_ranks[:1] if by_disk else world.sender_ranks,
        )


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
    files: Files,
) -> Path:
    """In a worker thread: add rank 0's half to the trainers', and make the checkpoint exist."""
    words = {**words, "model": model_config(config), "facts": facts}
    with live.writing(run_dir.checkpoints):
        checkpoint.save_orchestrator(words, rollouts, checkpoint.aside(run_dir.checkpoints, version))
        folder = checkpoint.complete(run_dir.checkpoints, version, files)
        checkpoint.remove_old(run_dir.checkpoints, config.checkpoint.keep_last)
    return folder
