"""Wires the parts of rank 0 together and turns the loop: the only file that imports them all.

    tasks → dispatcher → (engines) → train path → batch → hold → batch log → trainers → version → policy → gate

Everything here runs on one event loop and waits on nothing but it.  Other ranks are reached by `send`, which never
waits; what they say comes in by `handle`.  Imports no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.config import Config
from spmd_rl.metrics.interval import MetricsLoop
from spmd_rl.metrics.probe import Limits
from spmd_rl.metrics.report import Report
from spmd_rl.metrics.writer import Recorder
from spmd_rl.objective.advantages import ADVANTAGES, overlong_penalty
from spmd_rl.orchestrator import state as saved_state
from spmd_rl.orchestrator.answers import Answers
from spmd_rl.orchestrator.background import Background, ended
from spmd_rl.orchestrator.checkpoints import Checkpoints, Complete, Half
from spmd_rl.orchestrator.difficulty import Difficulty
from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.ending import Ending
from spmd_rl.orchestrator.engine_counts import EngineCounts
from spmd_rl.orchestrator.engine_pool import EnginePool
from spmd_rl.orchestrator.eval_runner import EvalRunner
from spmd_rl.orchestrator.evaluations import Evaluations
from spmd_rl.orchestrator.failure_log import FailureLog
from spmd_rl.orchestrator.failure_rate import FailureRate
from spmd_rl.orchestrator.gate import AdaptiveAdmission, Gate
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.orchestrator.order import make_order
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.prober import Prober
from spmd_rl.orchestrator.ship_hold import ShipHold
from spmd_rl.orchestrator.stepping import Stepping
from spmd_rl.orchestrator.task_stream import TaskStream
from spmd_rl.orchestrator.train_path import TrainPath
from spmd_rl.orchestrator.train_sink import TrainSink, zero_spread
from spmd_rl.orchestrator.version_pin import VersionPin
from spmd_rl.orchestrator.weight_sync import WeightSync
from spmd_rl.packing import packing
from spmd_rl.packing.messages import (
    AttemptFailed,
    BatchRefused,
    FromEngine,
    FromTrainer,
    Message,
    ProbeSampled,
    RolloutFinished,
)
from spmd_rl.packing.packing import Packed
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.types import GuardError, Rollout, Task

COUNT_S = 2.0  # that a stopped run waits for the last count of its engines, which only its ledger needs


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Who is who, for the orchestrator."""

    engines: tuple[int, ...]  # that lead an engine
    holders: tuple[int, ...]  # of engines, those that lead one among them
    trainers: tuple[int, ...]
    senders: tuple[int, ...]  # trainers that send weights


def unwatched(path: Path) -> AbstractContextManager[None]:
    """Nobody looks whether what is written there grows."""
    return nullcontext()


class Orchestrator:
    """Build, `restore` if resuming, `await run()`."""

    def __init__(
        self,
        *,
        config: Config,
        run_dir: RunDir,
        tasks: TaskStream,
        difficulty: Difficulty,  # of these tasks
        eval_tasks: Mapping[str, Sequence[Task]],
        ranks: Ranks,
        send: Callable[[int, Message], None],
        send_batch: Callable[[int, Packed, bool], None],  # (index, batch, save afterwards) to all trainers
        layout: str,  # of weights on the wire: under equal ones equal checksums mean equal weights; "": never
        recorder: Recorder,
        report: Report,
        decode: Callable[[np.ndarray], str],
        complete_checkpoint: Complete,  # in a worker thread
        writing: Callable[[Path], AbstractContextManager[None]] = unwatched,  # while a thread writes there
        recorded: Callable[[], None] = lambda: None,  # called once a step is
        version: int = 0,  # that the trainers start with
        limits: Limits = Limits(),  # of what engines and trainers compute differently  # noqa: B008 (it is frozen)
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._tasks, self._difficulty, self._report = config, tasks, difficulty, report
        self._recorder, self._version = recorder, version
        self._data_from = 0  # version at which the data started
        self._finishing: asyncio.Task[None] | None = None  # the last checkpoint and the export
        self.ending, self.answers, self._background = Ending(), Answers(), Background()
        self.policy, self._recorded = Policy(version), Policy(version)
        self._failures = {purpose: _failure_rate(config) for purpose in ("train", "eval")}
        self._failure_log = FailureLog(run_dir.failures)
        self._build_path(send, ranks, clock)
        self._build_sync(send, ranks, layout, eval_tasks, limits, clock)
        self._build_keeping(send, ranks, run_dir, complete_checkpoint, decode, writing)
        self.stepping = Stepping(
            config=config,
            policy=self.policy,
            recorded=self._recorded,
            dispatcher=self.dispatcher,
            path=self.path,
            sink=self.sink,
            gate=self.gate,
            adaptive=self._adaptive,
            hold=self.hold,
            ledger=self.ledger,
            tasks=tasks,
            difficulty=difficulty,
            prober=self._prober,
            counts=self._counts,
            checkpoints=self.checkpoints,
            evaluations=self.evaluations,
            ending=self.ending,
            background=self._background,
            send_batch=send_batch,
            batches=run_dir.batches,
            on_recorded=recorded,
            limits=limits,
            clock=clock,
            recorder=recorder,
            report=report,
            writing=writing,
        )
        self.metrics = MetricsLoop(
            interval_s=config.run.metrics_interval_s,
            collect=self._interval_metrics(),
            emit=self._emit_interval,
            checks=[self.path.assert_closed],
        )

    def _build_path(self, send: Callable[[int, Message], None], ranks: Ranks, clock: Callable[[], float]) -> None:
        """From tasks to batches."""
        config, staleness = self._config, self._config.staleness
        self.ledger = Ledger()
        self.pool = EnginePool(engines=ranks.engines, send=send)
        self._adaptive = _adaptive_admission(config)
        self.gate = Gate(
            self.policy,
            max_staleness=staleness.max_staleness,
            batch_size=config.rollout.batch_size,
            max_concurrent=staleness.max_concurrent,
            mode=staleness.gate,
            queue_size=staleness.queue_size,
            max_age=None if staleness.max_age < 0 else staleness.max_age,
            last_version=config.run.steps,
            adaptive=self._adaptive,
            clock=clock,
        )
        self.dispatcher = Dispatcher(
            tasks=_drawn(self._tasks),
            gate=self.gate,
            policy=self.policy,
            submit=self.pool.submit,
            group_size=config.rollout.group_size,
            cancel=self.pool.cancel,
        )
        self.sink = _train_sink(config)
        self.path = TrainPath(
            dispatcher=self.dispatcher,
            sink=self.sink,
            gate=self.gate,
            policy=self.policy,
            ledger=self.ledger,
            observe=self._difficulty.observe,
            clock=clock,
        )
        self.hold = ShipHold(self.policy, max_staleness=config.batches_ahead, clock=clock)

    def _build_sync(
        self,
        send: Callable[[int, Message], None],
        ranks: Ranks,
        layout: str,
        eval_tasks: Mapping[str, Sequence[Task]],
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        """What asks other ranks, and waits for their answers."""
        config = self._config
        self.weights = WeightSync(
            policy=self.policy,
            answers=self.answers,
            send=send,
            trainers=ranks.trainers,
            senders=ranks.senders,
            holders=ranks.holders,
            engines=ranks.engines,
            layout=layout,
            by_disk=config.weights.mode == "disk",
            say=self._report.say,
            clock=clock,
        )
        self.evals = EvalRunner(
            tasks=eval_tasks,
            samples=config.eval.samples,
            submit=self.pool.submit,
            version=lambda: self.policy.version,
            solved_at=config.eval.solved_at,
        )
        self.pin = VersionPin(engines=ranks.engines, send=send, answers=self.answers, policy=self.policy)
        self._prober = Prober(
            engines=ranks.engines,
            trainers=ranks.trainers,
            send=send,
            answers=self.answers,
            every=config.run.probe_every,
            limits=limits,
            recomputes=config.inference.kv_on_update == "recompute",
            clock=clock,
        )
        self._counts = EngineCounts(
            engines=ranks.engines,
            send=send,
            answers=self.answers,
            ledger=self.ledger,
            sampled_beside=lambda: self.evals.sampled_tokens + self._prober.sampled_tokens,
            ended_by=self.pool.ended_by.__getitem__,
            figures=self._report.engines,
            clock=clock,
        )

    def _build_keeping(
        self,
        send: Callable[[int, Message], None],
        ranks: Ranks,
        run_dir: RunDir,
        complete_checkpoint: Complete,
        decode: Callable[[np.ndarray], str],
        writing: Callable[[Path], AbstractContextManager[None]],
    ) -> None:
        """What is kept of the run beside its steps: checkpoints and evaluations."""
        config = self._config
        self.checkpoints = Checkpoints(
            trainers=ranks.trainers,
            send=send,
            answers=self.answers,
            background=self._background,
            policy=self.policy,
            recorded=self._recorded,
            snapshot=self.snapshot,
            complete=complete_checkpoint,
        )
        self.evaluations = Evaluations(
            runner=self.evals,
            pin=self.pin if config.eval.pin else None,
            policy=self.policy,
            ending=self.ending,
            background=self._background,
            last_version=lambda: self.stepping.last_version,
            every=config.eval.every,
            concurrent_alone=config.staleness.max_concurrent,
            concurrent_beside=config.eval_concurrent,
            run_dir=run_dir,
            decode=decode,
            recorder=self._recorder,
            report=self._report,
            writing=writing,
        )

    # ---- from outside

    def handle(self, rank: int, message: FromEngine | FromTrainer) -> None:
        """What another rank, or this one's engine, has to say."""
        match message:
            case RolloutFinished(rollout=packed):
                (rollout,) = packing.unpack(packed)
                self._rollout_ended(rollout)
            case AttemptFailed(attempt=attempt):
                self._failure_log.add(attempt)
            case BatchRefused(version=version, text=text):
                self.ending.batch_refused(rank, version, GuardError(text))
            case ProbeSampled():
                self._prober.sampled(message)
                self.answers.add(rank, message)
            case _:
                self.answers.add(rank, message)

    def restore(self, words: Mapping[str, Any], rollouts: Sequence[Rollout], *, data_anew: bool = False) -> None:
        """Go on from a checkpoint's orchestrator half.  ValueError when it does not fit this run.

        data_anew: the data start at 0.  What was admitted and not finished is then of the new data too, under its
        tickets, and no solve rate is known.
        """
        state = saved_state.from_json(words["path"], rollouts)
        if data_anew:
            tasks = list(itertools.islice(self._tasks, len(state.unfinished)))
            if len(tasks) < len(state.unfinished):
                raise ValueError(f"the new data have {len(tasks)} tasks, {len(state.unfinished)} groups are unfinished")
            state = replace(
                state, unfinished=[replace(w, task=t) for w, t in zip(state.unfinished, tasks, strict=True)]
            )
        else:
            self._tasks.restore(words["tasks"])
            self._difficulty.restore(words.get("difficulty", ()))
        self._data_from = self._version if data_anew else words["data_from"]
        self.path.restore(state)
        self.checkpoints.restored_version = self._version
        if self.sink.num_taken_apart:
            self._report.say(
                f"rollout.batch_size = {self._config.rollout.batch_size}, max_age = {self._config.staleness.max_age}: "
                f"{self.sink.num_taken_apart} formed batches of the checkpoint are taken apart and formed anew"
            )
        if self.sink.transition:
            self._report.say(f"age bound: {self.sink.transition}")
        if self._adaptive is not None:
            self._adaptive.restore(words.get("admission_limit", self._adaptive.limit))
        self.ledger.close_tokens()
        self.stepping.restore()
        self.weights.restore(words.get("weights"))

    def ledger_summary(self) -> dict[str, object]:
        """Both equations as of now, and for how long the engines have not been counted."""
        closed = self.ledger.summary(
            in_flight=self.gate.running, waiting=self.gate.waiting, reported=self._counts.reported
        )
        return closed | {"engines_counted_s_ago": self._counts.age_s}

    def snapshot(self) -> Half:
        """This half of a checkpoint, of now."""
        path, rollouts = saved_state.to_json(self.path.snapshot())
        words: dict[str, object] = {
            "path": path,
            "tasks": self._tasks.state(),
            "data_from": self._data_from,
            "difficulty": self._difficulty.state(),
            "weights": self.weights.state,
        }
        if self._adaptive is not None:
            words["admission_limit"] = self._adaptive.limit
        return words, rollouts

    # ---- the run

    async def run(self) -> str:
        """Until the last version is trained ("done"), a stop ("stopped") or a guard ("failed", `ending` says why).

        Raises when a promise is broken.
        """
        await self.weights.start()
        self.stepping.first_is_live()
        drain = self._config.staleness.on_update == "drain"
        syncing = self.weights.run(
            last_version=lambda: self.stepping.last_version,
            made=self.stepping.made,
            idle=(lambda: self.gate.idle(self._config.rollout.group_size)) if drain else None,
            loaded=self.stepping.loaded,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                self._background.open(tasks)
                beside = [tasks.create_task(job) for job in (syncing, self.metrics.run())]
                status = await self._until_stopped(tasks.create_task(self._train()))
                for task in beside:
                    task.cancel()
                self._background.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        return status

    async def _until_stopped(self, training: asyncio.Task[None]) -> str:
        stop = asyncio.create_task(self.ending.asked.wait())
        await asyncio.wait({training, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        failure = self.ending.failure
        if training.done():
            await training
            return "failed" if failure else "done"
        shutdown_s = self._config.run.shutdown_s
        try:
            async with asyncio.timeout(shutdown_s):
                if self._finishing is None:
                    training.cancel()
                    await asyncio.wait({training})
                    await self._stop_orderly(0.0 if failure else shutdown_s / 2)
                else:  # at its end anyway
                    await asyncio.wait({self._finishing})
                    await self.evaluations.ended(timeout=shutdown_s / 2)
                    await self._background.written()
                    training.cancel()
        except TimeoutError:
            reason = f"{self.ending.failure}; " if self.ending.failure else ""
            raise RuntimeError(
                f"{reason}run.shutdown_s = {shutdown_s:g} s were not enough for a checkpoint: "
                "the last complete one stays"
            ) from None
        return "failed" if self.ending.failure else "stopped"

    async def _stop_orderly(self, drain_s: float) -> None:
        """`drain_s` for what is in flight: what has not ended by then runs again after a resume."""
        self.dispatcher.close()
        self.stepping.no_more()
        if drain_s:
            collecting = asyncio.create_task(self.ending.guarded(self.path.collect()))
            await ended([collecting, *self.evaluations.running], timeout=drain_s)
            if collecting.done():
                collecting.result()
            collecting.cancel()
        self.dispatcher.abandon()
        self.evaluations.cut()
        await self.stepping.trained()
        self.path.assert_closed()
        await self.checkpoints.finish(export=False)
        counting = self._background.start(_nothing_of(self._counts.ask()))
        await ended([counting], timeout=COUNT_S)
        if counting.done() and not (self.gate.running or self.evals.in_flight or self._prober.in_flight):
            self.ledger.assert_tokens_closed(self._counts.reported)

    async def _train(self) -> None:
        await self.stepping.probe_at_start()
        await self.evaluations.at_start(self._version)
        await self._counts.ask()
        self._report.training_begins()
        self.stepping.begin()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.ending.guarded(self.dispatcher.run()))
            tasks.create_task(self.ending.guarded(self.path.collect()))
            await self.ending.guarded(self.stepping.ship())
            await self.ending.unless_failed()
            await self._counts.ask()
            self._report.engines.mark()
            await self.stepping.all_recorded()
            self.dispatcher.close()  # drain: what is in flight ends, is judged and saved
        self._finishing = self._background.start(self.checkpoints.finish(export=True))
        await asyncio.wait({self._finishing})
        await self.evaluations.alone()
        self.path.leave_over()
        self.metrics.tick()
        await self._prober.ended()
        self.ledger.assert_tokens_closed(await self._counts.ask())

    def _rollout_ended(self, rollout: Rollout) -> None:
        self.pool.ended(rollout)
        try:
            self._failures[rollout.purpose].add(rollout)
        except GuardError as failure:
            self.ending.guard(failure)
        if rollout.failed:
            self._report.failed(rollout)
        if rollout.skipped and self._config.rollout.long_prompts == "refuse":
            self.ending.guard(GuardError(f"{rollout.error}; rollout.long_prompts = 'refuse'"))
        if rollout.purpose == "eval":
            self.evals.ended(rollout)
        else:
            self.path.ended(rollout)

    def _lag(self) -> int:
        """By how many versions the oldest group in flight lies back."""
        oldest = self.dispatcher.oldest_version
        return 0 if oldest is None else self.policy.version - oldest

    def _interval_metrics(self) -> dict[str, Callable[[], float]]:
        return {
            "lag": self._lag,
            **self.stepping.ages_s(),
            "out_depth": lambda: self.path.out_depth,
            "in_flight": lambda: self.dispatcher.in_flight,
            "waiting": lambda: self.sink.num_waiting,
            "capacity": self.gate.capacity,
            "accepted": lambda: self.gate.accepted,
            "running": lambda: self.gate.running,
            "admitted": lambda: self.ledger.admitted,
            "eval_in_flight": lambda: self.evals.in_flight,
            "parked_s": lambda: self.hold.parked_s,
        }

    def _emit_interval(self, values: dict[str, float]) -> None:
        self._recorder.write("interval", self.policy.version, values | self._report.engines.rates("interval"))
        self._background.start(self._counts.audit())


def _failure_rate(config: Config) -> FailureRate:
    return FailureRate(window=2 * config.rollout.batch_size, most=config.rollout.max_failure_rate)


def _adaptive_admission(config: Config) -> AdaptiveAdmission | None:
    staleness = config.staleness
    if not staleness.adaptive:
        return None
    return AdaptiveAdmission(
        max_staleness=staleness.max_staleness,
        batch_size=config.rollout.batch_size,
        target_idle=staleness.target_idle,
    )


def _train_sink(config: Config) -> TrainSink:
    rollout, staleness, trainer = config.rollout, config.staleness, config.trainer
    advantage = ADVANTAGES[trainer.advantage]
    of_batch = None if trainer.kl_in_reward else advantage.of_batch  # that KL takes part: the trainer's business

    def scaled(stage: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        return lambda *arrays: trainer.advantage_scale * stage(*arrays)

    return TrainSink(
        batch_size=rollout.batch_size,
        group_size=rollout.group_size,
        advantages=advantage.of_group if of_batch else scaled(advantage.of_group),
        batch_advantages=of_batch and scaled(of_batch),
        order=make_order(staleness.order, staleness.window),
        bound=config.age_bound,
        over_age=staleness.over_age,
        filters={"zero_spread": zero_spread} if trainer.filter_zero_spread else {},
        trains=lambda r: not (trainer.mask_truncated and r.finish_reason == "length"),
        shaped_reward=lambda r: (
            r.reward + overlong_penalty(r.longest_turn, longest=rollout.max_tokens, buffer=trainer.overlong_buffer)
        ),
        max_empty_batches=trainer.max_empty_batches,
        solved_at=config.eval.solved_at,
    )


def _drawn(tasks: Iterator[Task]) -> Iterator[Task]:
    """What an environment raises while it makes a task ends the run as a guard does: the next start draws it again."""
    while True:
        try:
            task = next(tasks, None)
        except Exception as error:
            raise GuardError("".join(traceback.format_exception(error)).rstrip()) from error
        if task is None:
            return
        yield task


async def _nothing_of(job: Coroutine[object, object, object]) -> None:
    await job


def _first(group: BaseExceptionGroup) -> BaseException:
    """The error that the others followed from."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
