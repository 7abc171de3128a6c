"""One run on a virtual clock.

The real gate, dispatcher, sink and orders run on a virtual clock.  Only three things are made up: an episode lasts what
the latency law says (whatever the load), a step takes `trainer_seconds`, and a rollout is one token of the version at
its start, with a reward that never lets a group be filtered unless asked for.

Memory does not grow with the number of rollouts.  Imports no torch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import repeat

import numpy as np

from spmd_rl.commands.simulate.virtual_time import VirtualLoop, run_virtual
from spmd_rl.config.age_bound import Bound, age_bound, batches_ahead
from spmd_rl.metrics.ages import AgeStats
from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.gate import AdaptiveAdmission, Gate
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.orchestrator.order import make_order
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.ship_hold import ShipHold
from spmd_rl.orchestrator.train_path import TrainPath
from spmd_rl.orchestrator.train_sink import TrainSink
from spmd_rl.types import Batch, GroupWork, Rollout, Task


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The staleness settings, as in the config; None where that says -1."""

    max_staleness: int = 2
    batch_size: int = 64
    group_size: int = 1
    max_concurrent: int = 128
    gate: str = "admission"
    order: str = "admission"
    window: int = 1
    max_age: int | None = None
    over_age: str = "wait"
    queue_size: int = 64
    adaptive: bool = False
    target_idle: float = 0.02

    @property
    def bound(self) -> Bound:
        return age_bound(**{f.name: getattr(self, f.name) for f in fields(self) if f.name not in NOT_OF_THE_BOUND})


NOT_OF_THE_BOUND = ("adaptive", "target_idle")


@dataclass(frozen=True, kw_only=True)
class SimResult:
    """One simulated run."""

    age_mean: float
    age_p99: int
    age_max: int
    age_bound: int | None
    bound_line: str
    trainer_idle: float  # share of the time from the first batch on in which the trainer waited
    engine_idle: float  # share of the time in which no rollout ran at all, as a run measures it
    places_empty: float  # of the C places, on average
    rollouts_per_s: float  # trained
    dropped: float  # share of the admitted rollouts
    filtered: float
    failed: float
    parked_s: float  # batches held for the trainer, ship gate only
    trained_length_s: float  # mean latency of what was trained
    dropped_length_s: float  # and of what was dropped, as far as it got
    most_slots: int  # in the system at once
    steps: int
    duration_s: float
    ledger: dict[str, object]


def simulate(
    settings: Settings,
    *,
    latencies: Iterator[float],  # seconds, one per rollout in order of its ticket
    trainer_seconds: float,
    steps: int | None = None,  # batches to train; None: until `until_s`
    until_s: float | None = None,  # seconds to run, the last instant included
    failing: float = 0.0,  # share of rollouts that fail
    filtered: float = 0.0,  # share of groups that a filter gives up
    lost: float = 0.0,  # share of groups whose every member fails
    num_tasks: int | None = None,  # prompts; None: endless
    seed: int = 0,  # of failing, filtered and lost
    on_batch: Callable[[Batch], None] | None = None,
) -> SimResult:
    """Run to the end on a clock of its own."""

    async def run() -> SimResult:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        parts = (latencies, trainer_seconds, failing, filtered, lost, num_tasks, seed, on_batch)
        return await _Simulation(loop, settings, *parts).run(steps, until_s)

    return run_virtual(run())


class _Simulation:
    """The wiring; the counterpart of orchestrator.py with everything outside the event loop made up."""

    def __init__(
        self,
        loop: VirtualLoop,
        settings: Settings,
        latencies: Iterator[float],
        trainer_seconds: float,
        failing: float,
        filtered: float,
        lost: float,
        num_tasks: int | None,
        seed: int,
        on_batch: Callable[[Batch], None] | None,
    ) -> None:
        s, self.settings, self.trainer_seconds = settings, settings, trainer_seconds
        self.latencies, self.failing, self.lost = latencies, failing, lost
        self.on_batch = on_batch
        self.coin = random.Random(seed)
        self.ages = AgeStats()
        self.waited_s = self.busy_s = 0.0
        self.place_s = self.empty_s = self.counted_to_s = 0.0  # places taken, and none at all, up to a time
        self.most_slots = 0
        self.loop = loop
        self.timers: dict[int, list[asyncio.TimerHandle | None]] = {}  # by group_id, only where groups can be aborted
        self.policy = Policy()
        self.ledger = Ledger()
        self.adaptive = (
            AdaptiveAdmission(max_staleness=s.max_staleness, batch_size=s.batch_size, target_idle=s.target_idle)
            if s.adaptive
            else None
        )
        self.gate = Gate(
            self.policy,
            max_staleness=s.max_staleness,
            batch_size=s.batch_size,
            max_concurrent=s.max_concurrent,
            mode=s.gate,
            queue_size=s.queue_size,
            max_age=s.max_age,
            adaptive=self.adaptive,
            defer=lambda wake: self.loop.call_when_settled(wake),
        )
        task = Task(env="simulated", task_id="0")
        self.dispatcher = Dispatcher(
            tasks=repeat(task) if num_tasks is None else iter([task] * num_tasks),
            gate=self.gate,
            policy=self.policy,
            submit=self.submit,
            cancel=self.cancel,
            group_size=s.group_size,
        )
        self.sink = TrainSink(
            batch_size=s.batch_size,
            group_size=s.group_size,
            advantages=lambda rewards, usable: np.ones(len(rewards), np.float32),
            order=make_order(s.order, s.window),
            bound=s.bound,
            over_age=s.over_age,
            filters={"filtered": lambda group, usable: self.coin.random() < filtered} if filtered else {},
        )
        self.path = TrainPath(
            dispatcher=self.dispatcher, sink=self.sink, gate=self.gate, policy=self.policy, ledger=self.ledger
        )
        self.droppable = s.bound.cap is not None and s.over_age == "drop"
        self.shipped: asyncio.Queue[tuple[Batch, int] | None] = asyncio.Queue()

    async def run(self, steps: int | None, until_s: float | None) -> SimResult:
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(part) for part in (self.dispatcher.run(), self.path.collect())]
            background.append(tasks.create_task(self.form()))
            trainer = tasks.create_task(self.train(steps))
            if until_s is not None:
                await asyncio.wait({trainer}, timeout=until_s + 1e-6)
                trainer.cancel()
            else:
                await asyncio.wait({trainer})
            for task in background:
                task.cancel()
        self.path.assert_closed()
        return self.result()

    async def form(self) -> None:
        """As the orchestrator ships."""
        ahead = batches_ahead(gate=self.settings.gate, max_staleness=self.settings.max_staleness)
        self.hold = ShipHold(self.policy, max_staleness=ahead, clock=self.loop.time)
        index = 0
        while (batch := await self.path.form(index)) is not None:
            await self.hold.wait(index)
            self.shipped.put_nowait((batch, self.path.used_slots(index)))
            index += 1
        self.shipped.put_nowait(None)

    async def train(self, steps: int | None) -> None:
        while steps is None or self.policy.version < steps:
            start = self.loop.time()
            if (shipped := await self.shipped.get()) is None:
                return
            batch, used = shipped
            waited_s = self.loop.time() - start if batch.index else 0.0
            self.ages.add(batch, self.sink.usable)
            if self.on_batch is not None:
                self.on_batch(batch)
            if self.trainer_seconds:
                await asyncio.sleep(self.trainer_seconds)
            self.waited_s += waited_s
            self.busy_s += self.trainer_seconds
            if self.adaptive is not None:
                self.adaptive.observe(waited_s=waited_s, busy_s=self.trainer_seconds, used=used)
            self.policy.advance(self.policy.version + 1)

    def submit(self, work: GroupWork) -> None:
        """Every member ends after its latency."""
        self.count_places(-work.size)  # these run from now on
        now, call_at, draw = self.loop.time(), self.loop.call_at, self.latencies
        self.most_slots = max(self.most_slots, self.gate.running + self.gate.waiting)
        lost = self.lost and self.coin.random() < self.lost
        timers: list[asyncio.TimerHandle | None] = []
        for sample in range(work.size):
            latency = float(next(draw))
            failed = lost or (self.failing and self.coin.random() < self.failing)
            timers.append(call_at(now + latency, self.end, work, sample, latency, failed))
        if self.droppable:
            self.timers[work.group_id] = timers

    def end(self, work: GroupWork, sample: int, latency: float, failed: bool) -> None:
        self.count_places()
        if self.droppable and self.timers[work.group_id][sample] is not None:
            self.timers[work.group_id][sample] = None
            if not any(self.timers[work.group_id]):
                del self.timers[work.group_id]
        tokens, mask, zeros, versions = _token(work.version)
        rollout = Rollout(
            env="simulated",
            task_id="0",
            group_id=work.group_id,
            sample=sample,
            ticket=work.first_ticket + sample,
            token_ids=tokens,
            loss_mask=mask,
            behavior_logprobs=zeros,
            versions=versions,
            finish_reason="error" if failed else "stop",
            generation_s=latency,
        )
        rollout.__dict__.update(head=work.version, tail=work.version, num_trainable=1, num_sampled=1)
        self.path.ended(rollout)

    def cancel(self, work: GroupWork) -> None:
        """Running members end now, as in an engine that is told to."""
        now = self.loop.time()
        for sample, timer in enumerate(list(self.timers[work.group_id])):
            if timer is not None:
                latency, ends_at = timer._args[2], timer.when()
                timer.cancel()
                self.loop.call_soon(self.end, work, sample, latency - (ends_at - now), True)

    def count_places(self, change: int = 0) -> None:
        """Add the time since the last call, in which `change` more episodes ran than now."""
        now, running = self.loop.time(), self.dispatcher.in_flight + change
        self.place_s += running * (now - self.counted_to_s)
        self.empty_s += (not running) * (now - self.counted_to_s)
        self.counted_to_s = now

    def result(self) -> SimResult:
        summary, counts, bound = self.ages.summary(), self.ledger.rollouts, self.settings.bound
        self.count_places()
        duration_s = self.loop.time()
        lengths = self.path.mean_lengths()
        admitted = max(1, self.ledger.admitted)
        return SimResult(
            age_mean=summary["rollout_mean"],
            age_p99=int(summary["rollout_p99"]),
            age_max=int(summary["rollout_max"]),
            age_bound=bound.age,
            bound_line=bound.line,
            trainer_idle=self.waited_s / max(self.waited_s + self.busy_s, 1e-9),
            engine_idle=self.empty_s / max(duration_s, 1e-9),
            places_empty=1.0 - self.place_s / max(self.settings.max_concurrent * duration_s, 1e-9),
            rollouts_per_s=self.policy.version * self.settings.batch_size / max(duration_s, 1e-9),
            dropped=counts["dropped"] / admitted,
            filtered=counts["filtered"] / admitted,
            failed=counts["failed"] / admitted,
            parked_s=self.hold.parked_s,
            trained_length_s=lengths["trained"]["seconds"] if counts["trained"] else 0.0,
            dropped_length_s=lengths["dropped"]["seconds"] if counts["dropped"] else 0.0,
            most_slots=self.most_slots,
            steps=self.policy.version,
            duration_s=duration_s,
            ledger=self.ledger.state(),
        )


@lru_cache(1024)
def _token(version: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """One sampled token of `version`; shared, so never written."""
    return np.zeros(1, np.int32), np.ones(1, np.bool_), np.zeros(1, np.float32), np.full(1, version, np.int32)
