"""One batch after the other: form, hold, log, send; then each version's metrics once it is live.

Waits for finished groups, for the policy and for engines.  Knows nothing of how weights or checkpoints move.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from spmd_rl.config import Config
from spmd_rl.metrics.probe import Limits, Sampled, check_mismatch
from spmd_rl.metrics.report import Report, batch_metrics, reward_metrics, trainer_metrics
from spmd_rl.metrics.writer import Recorder
from spmd_rl.orchestrator.background import Background
from spmd_rl.orchestrator.checkpoints import Checkpoints
from spmd_rl.orchestrator.difficulty import Difficulty
from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.ending import Ending
from spmd_rl.orchestrator.engine_counts import EngineCounts
from spmd_rl.orchestrator.evaluations import Evaluations
from spmd_rl.orchestrator.gate import AdaptiveAdmission, Gate
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.prober import Prober
from spmd_rl.orchestrator.ship_hold import ShipHold
from spmd_rl.orchestrator.task_stream import TaskStream
from spmd_rl.orchestrator.train_path import TrainPath
from spmd_rl.orchestrator.train_sink import TrainSink
from spmd_rl.orchestrator.weight_sync import assert_moved
from spmd_rl.packing.messages import Number
from spmd_rl.packing.packing import Packed
from spmd_rl.storage import batch_log
from spmd_rl.types import Batch, GuardError

Values = dict[str, Any]  # metrics by name, as metrics.jsonl has them: numbers, None, and the counts of ages


class Stepping:
    """`ship` and `record` as tasks; `made` and `loaded` hear of each version before it is live."""

    def __init__(
        self,
        *,
        config: Config,
        policy: Policy,
        recorded: Policy,  # moved here: the version whose step is recorded
        dispatcher: Dispatcher,
        path: TrainPath,
        sink: TrainSink,
        gate: Gate,
        adaptive: AdaptiveAdmission | None,
        hold: ShipHold,
        ledger: Ledger,
        tasks: TaskStream,
        difficulty: Difficulty,
        prober: Prober,
        counts: EngineCounts,
        checkpoints: Checkpoints,
        evaluations: Evaluations,
        ending: Ending,
        background: Background,
        send_batch: Callable[[int, Packed, bool], None],  # (index, batch, save afterwards) to all trainers
        batches: Path,  # the folder of their log
        recorder: Recorder,
        report: Report,
        writing: Callable[[Path], AbstractContextManager[None]],  # while a thread writes there
        on_recorded: Callable[[], None],  # called once a step is
        limits: Limits,  # of what engines and trainers compute differently
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._policy, self._recorded = config, policy, recorded
        self._dispatcher, self._path, self._sink, self._hold = dispatcher, path, sink, hold
        self._gate, self._adaptive = gate, adaptive
        self._ledger, self._tasks, self._difficulty, self._prober = ledger, tasks, difficulty, prober
        self._counts, self._checkpoints, self._evaluations = counts, checkpoints, evaluations
        self._ending, self._background, self._send_batch, self._batches = ending, background, send_batch, batches
        self._recorder, self._report, self._writing = recorder, report, writing
        self._on_recorded, self._limits, self._clock = on_recorded, limits, clock
        self.last_version = config.run.steps  # lower once the tasks have ended
        self._first_version = policy.version
        self._last_shipped = policy.version - 1
        self._shipped: asyncio.Queue[int | None] = asyncio.Queue()  # versions to come
        self._recording: asyncio.Task[None] | None = None
        self._values: dict[int, Values] = {}  # of the step that makes a version, until it is recorded
        self._slots_until = {policy.version: (0, 0)}  # admitted, and given up, before a version was live
        self._made_at = self._live_at = clock()  # the newest version: made by the trainers, and live
        policy.on_change(self._version_changed)

    # ---- the way of a batch

    async def ship(self) -> None:
        """Form, hold, log and send every batch.  Waits for: finished groups, then the policy's version."""
        every = self._config.checkpoint.every
        for index in range(self._first_version, self.last_version):
            batch = await self._path.form(index)
            if batch is None:
                self._tasks_ended(index)
                break
            self._values[index + 1] = self._measured(batch) | {
                "time/parked_s": await self._hold.wait(index),
                "time/held_back_s": self._path.held_back_s,
                "admission/used": self._path.used_slots(index),
            }
            packed = await asyncio.to_thread(self._log, batch)
            await self._probe(index)
            save = every > 0 and (index + 1) % every == 0 and index + 1 < self.last_version
            self._last_shipped = index
            if save:
                self._checkpoints.plan(index + 1)
            if index + 1 < self.last_version:
                self._prober.plan(index + 1)
            self._send_batch(index, packed, save)
            self._shipped.put_nowait(index + 1)
        self._shipped.put_nowait(None)

    def no_more(self) -> None:
        """Nothing more is shipped: `record` ends with what is."""
        self._shipped.put_nowait(None)

    async def trained(self) -> None:
        """Wait until all that the trainers hold is trained, live and recorded; where they refused, up to there."""
        shipped, refused = self._last_shipped + 1, self._ending.refused_version
        last = shipped if refused is None else refused
        await self._policy.reached(last)
        if self._recording is not None and last < shipped:
            await self._recorded.reached(last)
            self._recording.cancel()
        await self.all_recorded()

    async def all_recorded(self) -> None:
        """Wait for the end of `record`."""
        if self._recording is not None:
            await asyncio.wait({self._recording})

    def _measured(self, batch: Batch) -> Values:
        given_up = self._path.take_given_up()
        values = batch_metrics(batch, given_up=given_up, usable=self._sink.usable)
        return values | reward_metrics([*batch.rollouts, *itertools.chain.from_iterable(given_up.values())])

    def _log(self, batch: Batch) -> Packed:
        """In a worker thread."""
        with self._writing(self._batches):
            return batch_log.write(
                self._batches,
                batch,
                self._sink.usable,
                num_minibatches=self._config.trainer.num_minibatches,
                whole_groups=self._config.trainer.share_prefix,
            )

    def _tasks_ended(self, index: int) -> None:
        """The run ends with the last full batch; groups that do not fill one are not trained on."""
        groups = self._sink.num_waiting // self._config.rollout.group_size
        if index == 0 and self._path.solved:
            raise GuardError(
                f"all is solved before anything is trained, {self._path.solved}: check the reward, or give harder tasks"
            )
        if index == 0:
            raise GuardError(
                f"the tasks ended with {groups} groups before the first batch was full: lower rollout.batch_size, or "
                "give more tasks or epochs"
            )
        end = f"all is solved, {self._path.solved}" if self._path.solved else "the tasks have ended"
        self._report.say(f"{end}: {index} full batches, {groups} groups left over")
        self.last_version = index

    # ---- the way of a version

    def begin(self) -> None:
        """The first version is live: record steps from here on."""
        self._recording = self._background.start(self._record())

    def first_is_live(self) -> None:
        """The engines hold the version that the run begins with."""
        self._made_at = self._live_at = self._clock()

    def made(self, version: int, metrics: Sequence[Mapping[str, Number]]) -> None:
        """All trainers have made a version.  Disagreement where engines sampled from another model than they train."""
        self._made_at = self._clock()
        values = trainer_metrics(metrics)
        self._values[version] |= values | {"queue/out_depth": self._path.out_depth}
        recomputes = self._config.inference.kv_on_update == "recompute"
        is_exact = recomputes or self._config.staleness.on_update != "continue"  # what a version sampled is of it alone
        if is_exact and self._config.run.probe_every:
            check_mismatch(values, version=version - 1, limits=self._limits)
            self._report.mismatched(version - 1, values.get("trainer/mismatch_kl"))

    def loaded(self, version: int, figures: Mapping[str, float]) -> None:
        """All engines hold a version, which is about to be live."""
        values = self._values[version]
        gradient, rate = values["trainer/grad_norm"], values["trainer/learning_rate"]
        try:
            assert_moved(version, figures["weights/update_norm"], gradient=gradient, rate=rate)
        except GuardError as failure:
            self._ending.guard(failure)
        values |= figures

    def ages_s(self) -> dict[str, Callable[[], float]]:
        """Seconds since the newest version was made, and since it is live."""
        return {
            "step_age_s": lambda: self._clock() - self._made_at,
            "swap_age_s": lambda: self._clock() - self._live_at,
        }

    def restore(self) -> None:
        """After the parts were restored: what was admitted before counts for no step."""
        self._slots_until = {self._first_version: (self._ledger.admitted, self._gate.given_up)}

    def _version_changed(self) -> None:
        self._live_at = self._clock()
        self._slots_until[self._policy.version] = self._ledger.admitted, self._gate.given_up

    async def _record(self) -> None:
        """Each version's metrics, then its evaluation beside.  Waits for: a shipped batch, the policy, counters."""
        while (version := await self._shipped.get()) is not None:
            await self._policy.reached(version)
            await self._counts.audit()
            self._record_step(version)
            self._evaluations.stepped(version)
        await self._evaluations.ended()

    def _record_step(self, version: int) -> None:
        values = self._values.pop(version)
        (admitted, given_up), before = self._slots_until[version], self._slots_until.pop(version - 1)
        values |= {
            "admission/per_step": admitted - before[0],
            "admission/given_up": given_up - before[1],
            "admission/bound": self._gate.most_per_version,
            "age/max_staleness": self._config.staleness.max_staleness,
            "age/bound": self._sink.age_bound_at(version - 1),
            "age/optimizer_steps_max": (values["age/token_max"] + 1) * self._config.trainer.steps_per_batch - 1,
            "queue/in_flight": self._dispatcher.in_flight,
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
        self._report.step(version, values)
        self._on_recorded()

    # ---- probes

    async def probe_at_start(self) -> None:
        """Every engine, in full, before anything is trained."""
        if self._config.run.probe_every and self._first_version < self.last_version:
            self._probed(self._first_version, await self._prober.at_start(self._first_version))

    async def _probe(self, index: int) -> None:
        """If it is planned: what an engine samples at version `index`, which no batch may follow before it is scored.

        Waits for the policy, then for the engine; the trainers' scores are waited for beside.
        """
        if not self._prober.is_planned(index):
            return
        ready = self._clock()
        await self._policy.reached(index)
        number, sampled = await self._prober.sample(index)
        held_s = max(0.0, self._clock() - max(ready, self._made_at))
        self._background.start(self._compare(number, sampled, index, held_s))

    async def _compare(self, number: int, sampled: Sampled, version: int, held_s: float) -> None:
        self._probed(version, await self._prober.compare(number, sampled, version, held_s=held_s))

    def _probed(self, version: int, values: Mapping[str, float]) -> None:
        self._recorder.write("probe", version, values)
        self._report.probed(version, values)
