"""Wires the parts of rank 0 together and turns the loop: the only file that imports them all.

    tasks → dispatcher → (engines) → train path → batch → hold → batch log → trainers → version → policy → gate

Everything here runs on one event loop and waits on nothing but it; other ranks are reached through `Links`, and what
they answer comes in by the methods under "answers", of weights and of the pin by theirs.  Imports no torch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from spmd_rl.config import Config
from spmd_rl.metrics.interval import MetricsLoop
from spmd_rl.metrics.probe import Limits, Sampled, Scored, check_mismatch
from spmd_rl.metrics.report import Report, batch_metrics, eval_texts, eval_values, reward_metrics, trainer_metrics
from spmd_rl.objective.advantages import ADVANTAGES, overlong_penalty
from spmd_rl.orchestrator import state as saved_state
from spmd_rl.orchestrator.difficulty import Difficulty
from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.engine_pool import EnginePool
from spmd_rl.orchestrator.eval_runner import EvalRunner
from spmd_rl.orchestrator.failure_log import FailureLog
from spmd_rl.orchestrator.failure_rate import FailureRate
from spmd_rl.orchestrator.gate import AdaptiveAdmission, Gate
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.orchestrator.order import make_order
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.prober import Prober
from spmd_rl.orchestrator.roll_call import RollCall
from spmd_rl.orchestrator.ship_hold import ShipHold
from spmd_rl.orchestrator.task_stream import TaskStream
from spmd_rl.orchestrator.train_path import TrainPath
from spmd_rl.orchestrator.train_sink import TrainSink, zero_spread
from spmd_rl.orchestrator.version_pin import VersionPin
from spmd_rl.orchestrator.weight_exchange import WeightExchange, assert_moved
from spmd_rl.orchestrator.weight_watcher import WeightWatcher
from spmd_rl.packing.packing import Packed
from spmd_rl.storage import batch_log
from spmd_rl.storage.run_dir import RunDir, write_whole
from spmd_rl.types import Batch, FailedAttempt, GroupWork, GuardError, Rollout, Task

RECORDER = -1  # beside the trainers' ranks: a checkpoint is complete once its step is in the metrics
COUNT_S = 2.0  # that a stopped run waits for the last count of its engines, which only its ledger needs

Files = Mapping[str, list[int]]  # size and CRC-32 by name, of what a trainer rank wrote


class Recorder(Protocol):
    def write(self, kind: str, version: int, values: Mapping[str, object]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Links:
    """What the orchestrator may ask of other ranks; none of these waits."""

    engines: tuple[int, ...]  # ranks that lead an engine
    trainers: tuple[int, ...]
    work: Callable[[int, GroupWork], None]  # start a group on an engine's rank
    cancel: Callable[[int, GroupWork], None]
    stats: Callable[[int], None]  # have every engine answer with its counters, under this number
    pin: Callable[[int, int | None], None]  # (number, version): hold swaps above it; None: swap again
    batch: Callable[[int, Packed, bool], None]  # (index, batch, save afterwards) to all trainers
    sample: Callable[[int, int, int | None], None]  # (engine, number, version; None: of now, in full) for the probe
    score: Callable[[int, Packed], None]  # (number, tokens) for the probe, by all trainers
    finish_training: Callable[[bool, bool], None]  # (export, save): the model, a checkpoint, and end


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
        links: Links,
        weights: WeightExchange,
        recorder: Recorder,
        report: Report,
        decode: Callable[[np.ndarray], str],
        complete_checkpoint: Callable[[int, Mapping[str, object], list[Rollout], Files], Path],  # in a worker thread
        writing: Callable[[Path], AbstractContextManager[None]] = nullcontext,  # while a thread writes there
        recorded: Callable[[], None] = lambda: None,  # called once a step is
        version: int = 0,  # that the trainers start with
        limits: Limits = Limits(),  # of what engines and trainers compute differently  # noqa: B008 (it is frozen)
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rollout, staleness, trainer = config.rollout, config.staleness, config.trainer
        self._config, self._run_dir, self._tasks, self._links = config, run_dir, tasks, links
        self._difficulty, self.weights = difficulty, weights
        self._on_recorded, self._writing = recorded, writing
        self._recorder, self._report, self._decode, self._clock = recorder, report, decode, clock
        self._complete_checkpoint, self._limits = complete_checkpoint, limits
        self._first_version, self._last_version = version, config.run.steps
        self._data_from = 0  # version at which the data started

        self.policy = Policy(version)
        self.pool = EnginePool(engines=links.engines, work=links.work, cancel=links.cancel)
        adaptive = AdaptiveAdmission(
            max_staleness=staleness.max_staleness, batch_size=rollout.batch_size, target_idle=staleness.target_idle
        )
        self._adaptive = adaptive if staleness.adaptive else None
        self.gate = Gate(
            self.policy,
            max_staleness=staleness.max_staleness,
            batch_size=rollout.batch_size,
            max_concurrent=staleness.max_concurrent,
            mode=staleness.gate,
            queue_size=staleness.queue_size,
            max_age=None if staleness.max_age < 0 else staleness.max_age,
            last_version=self._last_version,
            adaptive=self._adaptive,
            clock=clock,
        )
        self.dispatcher = Dispatcher(
            tasks=_drawn(tasks),
            gate=self.gate,
            policy=self.policy,
            submit=self.pool.submit,
            group_size=rollout.group_size,
            cancel=self.pool.cancel,
        )
        advantage = ADVANTAGES[trainer.advantage]
        of_batch = None if trainer.kl_in_reward else advantage.of_batch  # that KL takes part: the trainer's business

        def scaled(stage: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
            return lambda *arrays: trainer.advantage_scale * stage(*arrays)

        self.sink = TrainSink(
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
        self.ledger = Ledger()
        self.path = TrainPath(
            dispatcher=self.dispatcher,
            sink=self.sink,
            gate=self.gate,
            policy=self.policy,
            ledger=self.ledger,
            observe=difficulty.observe,
            clock=clock,
        )
        self.hold = ShipHold(self.policy, max_staleness=config.batches_ahead, clock=clock)
        self.watcher = WeightWatcher(announced=self._announced, reload=self._reload, policy=self.policy)
        self.evals = EvalRunner(
            tasks=eval_tasks,
            samples=config.eval.samples,
            submit=self.pool.submit,
            version=lambda: self.policy.version,
            solved_at=config.eval.solved_at,
        )
        self.pin = VersionPin(engines=links.engines, ask=links.pin, policy=self.policy)
        self.metrics = MetricsLoop(
            interval_s=config.run.metrics_interval_s,
            collect=self._interval_metrics(),
            emit=self._emit_interval,
            checks=[self.path.assert_closed],
        )

        self._steps: RollCall[dict[str, float]] = RollCall("step to version", links.trainers)
        self._saves: RollCall[Files] = RollCall("checkpoint", (RECORDER, *links.trainers))
        self._final_saves: RollCall[Files] = RollCall("final checkpoint", links.trainers)
        self._stats: RollCall[dict[str, float]] = RollCall("engine counters", links.engines)
        recomputes = config.inference.kv_on_update == "recompute"
        self._prober = Prober(
            engines=links.engines,
            trainers=links.trainers,
            sample=links.sample,
            score=links.score,
            every=config.run.probe_every,
            limits=limits,
            recomputes=recomputes,
            clock=clock,
        )
        self._is_limited = recomputes or staleness.on_update != "continue"  # what a version sampled is exact of it
        self._failures = {
            purpose: FailureRate(window=2 * rollout.batch_size, most=rollout.max_failure_rate)
            for purpose in ("train", "eval")
        }
        self._failure_log = FailureLog(run_dir.failures)
        self._values: dict[int, dict[str, float]] = {}  # of the step that makes a version, until it is recorded
        self._last_shipped = version - 1
        self._shipped: asyncio.Queue[int | None] = asyncio.Queue()  # versions to come
        self._slots_until = {version: (0, 0)}  # admitted, and given up, before a version was live
        self.policy.on_change(self._version_changed)
        self._stepped_at = self._swapped_at = clock()  # the newest version: made, and live
        self._stop = asyncio.Event()
        self.failure: GuardError | None = None  # that ends the run
        self.failed_rank = 0
        self._faulty: int | None = None  # the version that trainers cannot train on
        self._recorded = Policy(version)  # the steps of which are recorded
        self._counted, self._counted_at = 0, clock()  # tokens of all engines, by their last count
        self._num_stats = 0
        self._save_at: set[int] = set()  # versions to come at which the trainers save
        self._saved_version = -1  # newest whose checkpoint this process has completed
        self._restored_version: int | None = None
        self._evaluations: list[asyncio.Task[None]] = []  # one that runs beside training, one that waits for it
        self._writes: list[asyncio.Task[None]] = []  # checkpoints and evaluations, and nothing cuts them
        self._recording: asyncio.Task[None] | None = None
        self._finishing: asyncio.Task[None] | None = None  # the last checkpoint and the export
        self._beside: set[asyncio.Task[None]] = set()
        self._tasks_group: asyncio.TaskGroup | None = None

    # ---- from outside

    def restore(self, words: Mapping[str, object], rollouts: Sequence[Rollout], *, data_anew: bool = False) -> None:
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
        self._data_from = self._first_version if data_anew else words["data_from"]
        self.path.restore(state)
        self._restored_version = self._first_version
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
        self._slots_until = {self._first_version: (self.ledger.admitted, self.gate.given_up)}
        self.weights.restore(words.get("weights"))

    def stop(self) -> None:
        """End early, with a checkpoint of what there is, within shutdown_s."""
        self._stop.set()

    def guard(self, failure: GuardError) -> None:
        """End as failed, with a checkpoint of what there is, within shutdown_s; the first failure counts."""
        self.failure = self.failure or failure
        self._stop.set()

    def trainer_gave_up(self, rank: int, version: int, failure: GuardError) -> None:
        """As all of them did, which hold `version`: what was shipped from there on they cannot train."""
        if self.failure is None:
            self.failed_rank = rank
        self._faulty = version
        self.guard(failure)

    @property
    def saved_version(self) -> int | None:
        """The newest of which there is a checkpoint."""
        return self._restored_version if self._saved_version < 0 else self._saved_version

    def ledger_summary(self) -> dict[str, object]:
        """Both equations as of now, and for how long the engines have not been counted."""
        reported = self._counted - self._sampled_beside
        closed = self.ledger.summary(in_flight=self.gate.running, waiting=self.gate.waiting, reported=reported)
        return closed | {"engines_counted_s_ago": self._clock() - self._counted_at}

    # ---- answers of other ranks

    def rollout_ended(self, rollout: Rollout) -> None:
        self.pool.ended(rollout)
        try:
            self._failures[rollout.purpose].add(rollout)
        except GuardError as failure:
            self.guard(failure)
        if rollout.failed:
            self._report.failed(rollout)
        if rollout.skipped and self._config.rollout.long_prompts == "refuse":
            self.guard(GuardError(f"{rollout.error}; rollout.long_prompts = 'refuse'"))
        if rollout.purpose == "eval":
            self.evals.ended(rollout)
        else:
            self.path.ended(rollout)

    def attempt_failed(self, attempt: FailedAttempt) -> None:
        """An episode raised, and may be tried again."""
        self._failure_log.add(attempt)

    def stepped(self, rank: int, version: int, metrics: dict[str, float]) -> None:
        self._steps.answer(version, rank, metrics)

    def saved(self, rank: int, version: int, files: Files, *, final: bool) -> None:
        (self._final_saves if final else self._saves).answer(version, rank, files)

    def counted(self, rank: int, number: int, stats: dict[str, float]) -> None:
        self._stats.answer(number, rank, stats)

    def sampled(self, rank: int, number: int, num_tokens: int, sampled: Sampled) -> None:
        self._prober.sampled(number, rank, num_tokens, sampled)

    def scored(self, rank: int, number: int, scored: Scored) -> None:
        self._prober.scored(number, rank, scored)

    # ---- the run

    async def run(self) -> str:
        """Until the last version is trained ("done"), `stop` ("stopped") or a guard ("failed", and `failure` says why).

        Raises when a promise is broken.
        """
        await self.weights.take(self.policy.version)
        self._stepped_at = self._swapped_at = self._clock()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks_group = tasks
                watching = tasks.create_task(self.watcher.run())
                ticking = tasks.create_task(self.metrics.run())
                ended = await self._until_stopped(tasks.create_task(self._train()))
                for task in (watching, ticking, *self._beside):
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first(group) from None
        return ended

    async def _until_stopped(self, training: asyncio.Task[None]) -> str:
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({training, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if training.done():
            await training
            return "failed" if self.failure else "done"
        shutdown_s = self._config.run.shutdown_s
        try:
            async with asyncio.timeout(shutdown_s):
                if self._finishing is None:
                    training.cancel()
                    await asyncio.wait({training})
                    await self._stop_orderly(0.0 if self.failure else shutdown_s / 2)
                else:  # at its end anyway
                    await asyncio.wait({self._finishing})
                    await self._evaluations_ended(timeout=shutdown_s / 2)
                    await self._written()
                    training.cancel()
        except TimeoutError:
            reason = f"{self.failure}; " if self.failure else ""
            raise RuntimeError(
                f"{reason}run.shutdown_s = {shutdown_s:g} s were not enough for a checkpoint: "
                "the last complete one stays"
            ) from None
        return "failed" if self.failure else "stopped"

    async def _stop_orderly(self, drain_s: float) -> None:
        """`drain_s` for what is in flight: what has not ended by then runs again after a resume."""
        self.dispatcher.close()
        self._shipped.put_nowait(None)
        if drain_s:
            collecting = asyncio.create_task(self._guarded(self.path.collect()))
            await asyncio.wait({collecting, *self._evaluations}, timeout=drain_s)
            if collecting.done():
                collecting.result()
            collecting.cancel()
        self.dispatcher.abandon()
        for task in self._evaluations:
            task.cancel()
        await self._trained()
        self.path.assert_closed()
        await self._finish_training(export=False)
        counting = self._later(self._count_engines())
        await asyncio.wait({counting}, timeout=COUNT_S)
        if counting.done() and not (self.gate.running or self.evals.in_flight or self._prober.in_flight):
            self.ledger.assert_tokens_closed(self._counted - self._sampled_beside)

    async def _trained(self) -> None:
        """Waits until all that the trainers hold is trained, live and recorded; where they gave up, up to there."""
        shipped = self._last_shipped + 1
        last = shipped if self._faulty is None else self._faulty
        await self.policy.reached(last)
        if self._recording is not None and last < shipped:
            await self._recorded.reached(last)
            self._recording.cancel()
        if self._recording is not None:
            await asyncio.wait({self._recording})

    async def _guarded(self, job: Coroutine[None, None, None]) -> None:
        """A guard that speaks up in it ends the run in good order."""
        try:
            await job
        except GuardError as failure:
            self.guard(failure)

    async def _unless_failed(self) -> None:
        """Waits for its cancellation where a guard has spoken up."""
        if self.failure:
            await asyncio.get_running_loop().create_future()

    async def _train(self) -> None:
        evaluates = self._config.eval.every >= 0
        if self._config.run.probe_every and self._first_version < self._last_version:
            self._probed(self._first_version, await self._prober.at_start(self._first_version))
        if evaluates and self._first_version == 0:
            await self._evaluate_alone()
        elif self._evaluation_was_cut():
            self._evaluate_beside()
        await self._count_engines()
        self._report.training_begins()
        self._recording = self._later(self._record_steps())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._guarded(self.dispatcher.run()))
            tasks.create_task(self._guarded(self.path.collect()))
            await self._guarded(self._ship())
            await self._unless_failed()
            await self._count_engines()
            self._report.engines.mark()
            await asyncio.wait({self._recording})
            self.dispatcher.close()  # drain: what is in flight ends, is judged and saved
        self._finishing = self._later(self._finish_training(export=True))
        await asyncio.wait({self._finishing})
        if evaluates:
            await self._evaluate_alone()
        self.path.leave_over()
        self.metrics.tick()
        await self._prober.ended()
        self.ledger.assert_tokens_closed(await self._count_engines() - self._sampled_beside)

    async def _finish_training(self, *, export: bool) -> None:
        """The trainers export and save and end; rank 0 adds its half, and the checkpoint is complete.

        A version that has its checkpoint keeps that one: two would be written into one folder.
        """
        await self._written()
        version = self.policy.version
        save = version != self._saved_version
        self._links.finish_training(export, save)
        files = await self._final_saves.all(version)
        if save:
            words, rollouts = self._snapshot()
            await self._complete(version, {**words, "exported": export}, rollouts, files)

    # ---- batches

    async def _ship(self) -> None:
        """Form, hold, log and send every batch.  Waits for: finished groups, then the policy's version."""
        every = self._config.checkpoint.every
        for index in range(self._first_version, self._last_version):
            batch = await self.path.form(index)
            if batch is None:
                self._tasks_ended(index)
                break
            given_up = self.path.take_given_up()
            values = batch_metrics(batch, given_up=given_up, usable=self.sink.usable)
            values |= reward_metrics([*batch.rollouts, *itertools.chain.from_iterable(given_up.values())])
            values["time/parked_s"] = await self.hold.wait(index)
            values["time/held_back_s"] = self.path.held_back_s
            values["admission/used"] = self.path.used_slots(index)
            self._values[index + 1] = values
            packed = await asyncio.to_thread(self._log, batch)
            await self._probe(index)
            save = every > 0 and (index + 1) % every == 0 and index + 1 < self._last_version
            self._last_shipped = index
            if save:
                self._save_at.add(index + 1)
            if index + 1 < self._last_version:
                self._prober.plan(index + 1)
            self._links.batch(index, packed, save)
            self._shipped.put_nowait(index + 1)
        self._shipped.put_nowait(None)

    def _log(self, batch: Batch) -> Packed:
        """In a worker thread."""
        with self._writing(self._run_dir.batches):
            return batch_log.write(
                self._run_dir.batches,
                batch,
                self.sink.usable,
                num_minibatches=self._config.trainer.num_minibatches,
                whole_groups=self._config.trainer.share_prefix,
            )

    def _tasks_ended(self, index: int) -> None:
        """The run ends with the last full batch; groups that do not fill one are not trained on."""
        groups = self.sink.num_waiting // self._config.rollout.group_size
        if index == 0 and self.path.solved:
            raise GuardError(
                f"all is solved before anything is trained, {self.path.solved}: check the reward, or give harder tasks"
            )
        if index == 0:
            raise GuardError(
                f"the tasks ended with {groups} groups before the first batch was full: lower rollout.batch_size, or "
                "give more tasks or epochs"
            )
        end = f"all is solved, {self.path.solved}" if self.path.solved else "the tasks have ended"
        self._report.say(f"{end}: {index} full batches, {groups} groups left over")
        self._last_version = index

    async def _record_steps(self) -> None:
        """Each version's metrics, then its evaluation beside.  Waits for: a shipped batch, the policy, counters."""
        eval_every = self._config.eval.every
        while (version := await self._shipped.get()) is not None:
            await self.policy.reached(version)
            await self._audit_tokens()
            self._record_step(version)
            if eval_every > 0 and version % eval_every == 0 and version < self._last_version:
                self._evaluate_beside()
        await self._evaluations_ended()

    def _version_changed(self) -> None:
        """At once, before anything else happens at the new version: what a checkpoint holds is the state of now."""
        version = self.policy.version
        self._swapped_at = self._clock()
        self._slots_until[version] = self.ledger.admitted, self.gate.given_up
        if version in self._save_at:
            words, rollouts = self._snapshot()
            self._write(self._checkpoint(version, words, rollouts))

    def _record_step(self, version: int) -> None:
        values = self._values.pop(version)
        (admitted, given_up), before = self._slots_until[version], self._slots_until.pop(version - 1)
        values |= {
            "admission/per_step": admitted - before[0],
            "admission/given_up": given_up - before[1],
            "admission/bound": self.gate.most_per_version,
            "age/max_staleness": self._config.staleness.max_staleness,
            "age/bound": self.sink.age_bound_at(version - 1),
            "age/optimizer_steps_max": (values["age/token_max"] + 1) * self._config.trainer.steps_per_batch - 1,
            "queue/in_flight": self.dispatcher.in_flight,
            **self._report.engines.rates("step"),
            "data/drawn": self._tasks.cursor,
            "data/passed_over": self._tasks.num_passed_over,
            **{f"data/{name}": value for name, value in self._difficulty.summary().items()},
            **self._report.failures(),
        }
        if self._adaptive is not None:
            values["admission/limit"] = self._adaptive.limit  # that admission went by in this step
            first = version == self._first_version + 1  # whose batch is waited for however much is admitted
            self._adaptive.observe(
                waited_s=0.0 if first else values["trainer/wait_s"],
                busy_s=values["trainer/step_s"],
                used=values["admission/used"],
            )
        self._recorder.write("step", version, values)
        self._recorded.advance(version)
        if version in self._save_at:
            self._save_at.discard(version)
            self._saves.answer(version, RECORDER, {})
        self._report.step(version, values)
        self._on_recorded()

    # ---- engines

    async def _announced(self) -> int | None:
        """Waits until every trainer has made the next version."""
        version = self.policy.version + 1
        if version > self._last_version:
            return None
        metrics = await self._steps.all(version)
        self._stepped_at = self._clock()
        values = trainer_metrics(metrics)
        self._values[version] |= values | {"queue/out_depth": self.path.out_depth}
        if self._is_limited and self._config.run.probe_every:
            check_mismatch(values, version=version - 1, limits=self._limits)
            self._report.mismatched(version - 1, values.get("trainer/mismatch_kl"))
        return version

    async def _reload(self, version: int) -> None:
        """Waits until every engine has verified and swapped the version."""
        start = self._clock()
        drain = self._config.staleness.on_update == "drain"
        if drain:
            await self.gate.idle(self._config.rollout.group_size)
        figures = await self.weights.take(version, tell=drain)
        values = self._values[version]
        gradient, rate = values["trainer/grad_norm"], values["trainer/learning_rate"]
        try:
            assert_moved(version, figures["weights/update_norm"], gradient=gradient, rate=rate)
        except GuardError as failure:
            self.guard(failure)
        values |= figures | {"weights/poll_to_reload_s": self._clock() - start}

    async def _count_engines(self) -> int:
        """Tokens that all engines have sampled.  Waits for their counters."""
        self._num_stats += 1
        self._links.stats(number := self._num_stats)
        answers = dict(zip(self._links.engines, await self._stats.all(number), strict=True))
        self._report.engines.count(
            {rank: {**counts, "rollouts": self.pool.ended_by[rank]} for rank, counts in answers.items()}
        )
        self._counted, self._counted_at = sum(int(counts["tokens"]) for counts in answers.values()), self._clock()
        return self._counted

    async def _audit_tokens(self) -> None:
        """No token is accounted for that no engine has counted.  Waits for the engines' answers."""
        accounted = self.ledger.accounted_tokens + self._sampled_beside
        self.ledger.assert_generated(accounted, await self._count_engines())

    # ---- probes

    async def _probe(self, index: int) -> None:
        """If it is planned: what an engine samples at version `index`, which no batch may follow before it is scored.

        Waits for the policy, then for the engine; the trainers' scores are waited for beside.
        """
        if not self._prober.is_planned(index):
            return
        ready = self._clock()
        await self.policy.reached(index)
        number, sampled = await self._prober.sample(index)
        held_s = max(0.0, self._clock() - max(ready, self._stepped_at))
        self._later(self._compare_probe(number, sampled, index, held_s))

    async def _compare_probe(self, number: int, sampled: Sampled, version: int, held_s: float) -> None:
        self._probed(version, await self._prober.compare(number, sampled, version, held_s=held_s))

    def _probed(self, version: int, values: Mapping[str, float]) -> None:
        self._recorder.write("probe", version, values)
        self._report.probed(version, values)

    @property
    def _sampled_beside(self) -> int:
        """Tokens of evaluations and probes, which the ledger does not count."""
        return self.evals.sampled_tokens + self._prober.sampled_tokens

    # ---- evaluation, checkpoints, intervals

    async def _evaluate(self, concurrent: int) -> None:
        """One evaluation from the version of now on; pinned, that version makes it all.  Waits for its rollouts."""
        async with self.pin.hold() if self._config.eval.pin else nullcontext():
            version = self.policy.version
            report, rollouts = await self.evals.run(f"eval_{version}", concurrent=concurrent)
        values = eval_values(report)
        if self._config.eval.pin:
            values["eval/pin_stall_s"] = self.pin.stall_s
        self._recorder.write("eval", version, values)
        self._report.evaluated(version, report, values, rollouts)
        await asyncio.wait({self._write(asyncio.to_thread(self._write_evaluation, version, values, rollouts))})

    def _write_evaluation(self, version: int, values: Mapping[str, float], rollouts: Sequence[Rollout]) -> None:
        """In a worker thread: many long texts take seconds."""
        content = {"version": version, **values, "rollouts": eval_texts(rollouts, self._decode)}
        with self._writing(self._run_dir.evaluation(version)):
            write_whole(self._run_dir.evaluation(version), json.dumps(content, indent=1))

    async def _evaluate_alone(self) -> None:
        """While nothing is trained, once for a version.  Waits for it; being cancelled does not cut it."""
        if not self._stop.is_set() and not self._run_dir.evaluation(self.policy.version).exists():
            self._evaluations = [self._later(self._evaluate(self._config.staleness.max_concurrent))]
            await self._evaluations_ended()

    def _evaluate_beside(self) -> None:
        """Once the one that runs has ended; of those that become due until then, one."""
        running = [task for task in self._evaluations if not task.done()]
        if len(running) < 2:
            self._evaluations = [*running, self._later(self._evaluate_after(running))]

    async def _evaluate_after(self, running: Sequence[asyncio.Task[None]]) -> None:
        """Unless the run stops meanwhile, or comes to the version that is evaluated at its end."""
        if running:
            await asyncio.wait(running)
        if not self._stop.is_set() and self.policy.version < self._last_version:
            await self._evaluate(self._config.eval_concurrent)

    async def _evaluations_ended(self, timeout: float | None = None) -> None:
        if self._evaluations:
            await asyncio.wait(self._evaluations, timeout=timeout)

    def _evaluation_was_cut(self) -> bool:
        """Whether the last evaluation that was due before the version resumed left no report."""
        every, version = self._config.eval.every, self._first_version
        if every <= 0 or version < every:
            return False
        due = range(version // every * every, version + 1)
        return not any(self._run_dir.evaluation(v).exists() for v in due)

    def _snapshot(self) -> tuple[dict[str, object], list[Rollout]]:
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

    async def _checkpoint(self, version: int, words: dict[str, object], rollouts: list[Rollout]) -> None:
        """Waits for the trainers' half and for the step to be recorded, then adds this one."""
        await self._complete(version, words, rollouts, await self._saves.all(version))

    async def _complete(
        self, version: int, words: Mapping[str, object], rollouts: list[Rollout], files: Sequence[Files]
    ) -> None:
        await asyncio.to_thread(self._complete_checkpoint, version, words, rollouts, dict(ChainMap(*files)))
        self._saved_version = max(self._saved_version, version)

    def _write(self, job: Coroutine[None, None, None]) -> asyncio.Task[None]:
        self._writes = [*(task for task in self._writes if not task.done()), self._later(job)]
        return self._writes[-1]

    async def _written(self) -> None:
        """Waits for what is being written."""
        if self._writes:
            await asyncio.wait(self._writes)

    def _later(self, job: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Beside everything else; its failure is the run's."""
        assert self._tasks_group is not None
        task = self._tasks_group.create_task(job)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    def _lag(self) -> int:
        """By how many versions the oldest group in flight lies back."""
        oldest = self.dispatcher.oldest_version
        return 0 if oldest is None else self.policy.version - oldest

    def _interval_metrics(self) -> dict[str, Callable[[], float]]:
        return {
            "lag": self._lag,
            "step_age_s": lambda: self._clock() - self._stepped_at,
            "swap_age_s": lambda: self._clock() - self._swapped_at,
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
        self._later(self._audit_tokens())


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


def _first(group: BaseExceptionGroup) -> BaseException:
    """The error that the others followed from."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
