"""Random runs of the real gate, dispatcher, sink, orders, hold and ledger on a virtual clock, judged from outside.

A `Plan` is a literal: latencies, failures, filters, engines that swap late, and stretches that end in a stop or a
crash, each with settings of its own.  `fault` runs one and says what is wrong, by what was sampled and trained alone:

    bound     every rollout that the settings of now admitted is as old as they allow at most; what an earlier stretch
              admitted is as old as the resume announced, and trained by the batch that docs/staleness.md names
    gate      no group enters a system that holds (S + 1)·B slots already, or C that run
    tickets   every ticket is trained, given up or left over exactly once in what survives of the run
    ledger    counts the same
    progress  virtual time never stands still, and no more is sampled than the plan can need

`smaller` takes away from a plan whatever can go while something is still wrong with it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace

import numpy as np

from spmd_rl.config.age_bound import age_bound, batches_ahead
from spmd_rl.objective.advantages import ADVANTAGES
from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.gate import AdaptiveAdmission, Gate
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.orchestrator.order import make_order
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.ship_hold import ShipHold
from spmd_rl.orchestrator.state import from_json, to_json
from spmd_rl.orchestrator.train_path import PathState, TrainPath
from spmd_rl.orchestrator.train_sink import TrainSink
from spmd_rl.types import Batch, GroupWork, Rollout
from tests import fakes
from tests.clock import run_virtual

ENGINES = 2


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """From a start or resume to the next stop, crash or end, under one set of settings."""

    S: int = 0
    B: int = 1  # in groups
    C: int = 1  # in groups
    w: int = 1
    M: int | None = None
    over_age: str = "wait"
    order: str = "admission"
    gate: str = "admission"
    Q: int = 1
    adaptive: bool = False
    drain: bool = False
    advantage: str = "dr_grpo"
    cut_s: int | None = None  # seconds after which it ends; None: it runs to the last version
    crash: bool = False  # goes on from the newest checkpoint; else a stop, with one of its own
    drain_s: int = 0  # that a stop waits for what is in flight
    save_every: int = 1  # versions


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that decides a run."""

    seed: int = 0
    G: int = 1
    steps: int = 6
    trainer_s: int = 1
    late_s: float = 0.0  # an engine swaps up to that much later than it could
    spread: float = 0.0  # of latencies around 1 s, lognormal; 0: all equal
    tasks: int | None = None
    slow: tuple[tuple[int, int, int], ...] = ()  # (stretch, ticket, seconds)
    failed: tuple[int, ...] = ()  # tickets
    filtered: tuple[int, ...] = ()  # first tickets
    stretches: tuple[Stretch, ...] = (Stretch(),)


class Wrong(AssertionError):
    """What a run did that it must not."""


# ---- plans


def draw(seed: int) -> Plan:
    """The plan of a seed."""
    coin = random.Random(seed)
    group_size = coin.choice([1, 1, 1, 2, 3])
    trainer_s = coin.choice([0, 1, 1, 2, 5, 10])
    tightened = coin.random() < 0.4  # full of stragglers, in ticket order, and then less is allowed
    stretches: list[Stretch] = []
    for _ in range(coin.choice([2, 2, 3]) if tightened else coin.choice([1, 2, 2, 3, 3, 4, 5])):
        before = stretches[-1] if stretches and (tightened or coin.random() < 0.85) else None
        stretches.append(_stretch(coin, group_size, before, longest_s=4 * max(1, trainer_s), tightened=tightened))
    stretches[-1] = replace(stretches[-1], cut_s=None)
    tickets = range(0, 60 * group_size)
    plan = Plan(
        seed=seed,
        G=group_size,
        steps=coin.randint(4, 14),
        trainer_s=trainer_s,
        late_s=coin.choice([0.0, 0.0, 0.7, 3.0]),
        spread=0.0 if tightened else coin.choice([0.0, 0.0, 0.5, 1.0, 1.5]),
        tasks=coin.choice([None, None, None, coin.randint(1, 60)]),
        slow=_held_back(coin, stretches, group_size) if tightened else _slow(coin, tickets, len(stretches)),
        failed=_some(coin, tickets, 0.0 if tightened else coin.choice([0.0, 0.0, 0.05, 0.3])),
        filtered=tuple(t for t in _some(coin, tickets, coin.choice([0.0, 0.0, 0.05, 0.3])) if t % group_size == 0),
        stretches=tuple(stretches),
    )
    return plan if allowed(plan) else draw(seed + 10**9)


def _some(coin: random.Random, tickets: range, share: float) -> tuple[int, ...]:
    return tuple(ticket for ticket in tickets if coin.random() < share)


def _slow(coin: random.Random, tickets: range, num_stretches: int) -> tuple[tuple[int, int, int], ...]:
    """Each in one stretch: what was slow before a resume may be fast after it."""
    share = coin.choice([0.0, 0.03, 0.1, 0.3])
    return tuple(
        (number, ticket, coin.choice([0, 3, 8, 20, 50]))
        for number in range(num_stretches)
        for ticket in _some(coin, tickets, share)
    )


def _held_back(coin: random.Random, stretches: list[Stretch], group_size: int) -> tuple[tuple[int, int, int], ...]:
    """First tickets of the system that hold all others back until a resume, then one that is far behind."""
    size = stretches[0].B * group_size
    system = range((stretches[0].S + 1) * size)
    slow = [(0, ticket, 50) for ticket in {0, *coin.sample(system[: size + 1], min(size, coin.choice([1, 2, 3])))}]
    for number, s in enumerate(stretches[1:], 1):
        last = coin.choice(system[-max(s.w, group_size) :])
        slow += [(number - 1, last, 50), (number, last, 50)]
        slow += [(number, coin.choice(system), coin.choice([2, 8])) for _ in range(coin.choice([0, 1]))]
    return tuple(sorted(set(slow)))


def _stretch(
    coin: random.Random, group_size: int, before: Stretch | None, *, longest_s: int, tightened: bool
) -> Stretch:
    """A few settings other than before, or all drawn anew."""
    batch = coin.randint(1 + tightened, 8 // group_size)
    fresh = Stretch(
        S=coin.choice([2, 3, 4] if tightened else [0, 1, 2, 2, 3, 4]),
        B=batch,
        C=coin.randint(max(1, batch // 2), 5 * batch),
        w=coin.choice([1, coin.randint(1, 3 * batch * group_size)]),
        M=coin.choice([None, None, None, 0, 1, 2]),
        over_age=coin.choice(["wait", "drop"]),
        order=coin.choice(["completion", "oldest", "admission", "admission", "admission"]),
        gate=coin.choice(["admission", "admission", "admission", "ship"]),
        Q=coin.randint(1, 2 * batch * group_size),
        adaptive=coin.random() < 0.2,
        drain=coin.random() < 0.2,
        advantage=coin.choice(["dr_grpo", "reinforce_pp"]),
        cut_s=coin.randint(0, longest_s),
        crash=coin.random() < 0.4,
        drain_s=coin.choice([0, 0, 2, 10]),
        save_every=coin.choice([1, 1, 1, 2]),
    )
    if tightened and before is None:
        window = coin.choice([coin.randint(1, 2 * batch * group_size), group_size * (1 + batch)])
        easy = {"C": 5 * batch, "w": window, "order": "admission", "gate": "admission", "adaptive": False}
        return replace(fresh, **easy, M=None, drain=False, crash=False, drain_s=2, cut_s=coin.choice([0, 2, 6]))
    if before is not None:
        of_the_end = {"cut_s", "crash", "drain_s", "save_every"}
        settings = [f.name for f in fields(Stretch) if f.name not in of_the_end]
        changed = set(coin.sample(settings, coin.choice([0, 0, 0, 1] if tightened else [0, 0, 1, 2, 4])))
        if tightened or coin.random() < 0.4:
            changed |= {"S"}
            fresh = replace(fresh, S=max(0, before.S - coin.choice([1, 1, 1, 2, 3])))
        fresh = replace(fresh, **{name: getattr(before, name) for name in settings if name not in changed})
    if fresh.M is not None:
        fresh = replace(fresh, M=fresh.S + fresh.M if before is None else max(fresh.S, fresh.M))
    if fresh.gate == "ship":
        fresh = replace(fresh, adaptive=False, drain=False)
        if fresh.M is not None and fresh.over_age == "wait":
            system = (fresh.S + 2) * fresh.B * group_size + fresh.Q + fresh.C * group_size
            fresh = replace(fresh, M=max(fresh.M, (system - 1) // (fresh.B * group_size)))
    return fresh


def allowed(plan: Plan) -> bool:
    """Whether config/rules.py would let every stretch start."""
    for s in plan.stretches:
        sizes = min(s.B, s.C, s.w, s.Q, s.save_every) >= 1 and s.S >= 0
        ship = s.gate != "ship" or (not s.adaptive and not s.drain and s.Q + s.C * plan.G >= s.B * plan.G)
        if not (sizes and ship):
            return False
        try:
            bound_of(plan, s)
        except ValueError:
            return False
    return plan.steps >= 1 and plan.stretches[-1].cut_s is None


def bound_of(plan: Plan, s: Stretch):
    return age_bound(
        gate=s.gate,
        order=s.order,
        max_staleness=s.S,
        batch_size=s.B * plan.G,
        group_size=plan.G,
        max_concurrent=s.C * plan.G,
        window=s.w,
        queue_size=s.Q,
        max_age=s.M,
        over_age=s.over_age,
    )


def promised(plan: Plan, s: Stretch) -> int | None:
    """The age that docs/staleness.md promises for what these settings admit."""
    B, ahead = s.B * plan.G, max(0, s.w - plan.G)
    ages = [] if s.M is None else [s.M]
    if s.gate == "admission":
        ages += [s.S + -(-ahead // B)] if s.order == "admission" else []
        ages += [0] if s.S == 0 else []
    elif s.order == "admission":
        ages.append(((s.S + 2) * B + s.Q + s.C * plan.G - 1 + ahead) // B)
    return min(ages, default=None)


# ---- a run


@dataclass
class Lineage:
    """What survives of the run so far."""

    trained: dict[int, list[int]] = field(default_factory=dict)  # tickets by batch
    given_up: list[int] = field(default_factory=list)  # tickets

    def copy(self) -> Lineage:
        return Lineage(dict(self.trained), list(self.given_up))


class _Life:
    """One stretch: the counterpart of orchestrator.py, with engines, trainer and watcher made up."""

    def __init__(self, plan: Plan, number: int, state: PathState | None, lineage: Lineage, since: int) -> None:
        s = plan.stretches[number]
        self.plan, self.number, self.s, self.lineage, self.since = plan, number, s, lineage, since
        self.G, self.B, self.C = plan.G, s.B * plan.G, s.C * plan.G
        self.version = 0 if state is None else state.version
        self.state = state
        self.newest: tuple[str, list[Rollout], Lineage] | None = None
        self.policy = Policy(self.version)
        self.adaptive = (
            AdaptiveAdmission(max_staleness=s.S, batch_size=self.B, target_idle=0.02) if s.adaptive else None
        )
        self.bound = bound_of(plan, s)
        self.gate = Gate(
            self.policy,
            max_staleness=s.S,
            batch_size=self.B,
            max_concurrent=self.C,
            mode=s.gate,
            queue_size=s.Q,
            max_age=s.M,
            last_version=plan.steps,
            adaptive=self.adaptive,
            clock=lambda: 0.0,
        )
        drawn = 0 if state is None else state.next_group
        left = None if plan.tasks is None else max(0, plan.tasks - drawn)
        self.dispatcher = Dispatcher(
            tasks=fakes.tasks(left),
            gate=self.gate,
            policy=self.policy,
            submit=self.submit,
            cancel=self.cancel,
            group_size=self.G,
        )
        advantage = ADVANTAGES[s.advantage]
        self.sink = TrainSink(
            batch_size=self.B,
            group_size=self.G,
            advantages=advantage.of_group,
            batch_advantages=advantage.of_batch,
            order=make_order(s.order, s.w),
            bound=self.bound,
            over_age=s.over_age,
            filters={"filtered": lambda group, usable: group.first_ticket in plan.filtered},
        )
        self.ledger = Ledger()
        self.path = TrainPath(
            dispatcher=self.dispatcher, sink=self.sink, gate=self.gate, policy=self.policy, ledger=self.ledger
        )
        self.hold = ShipHold(
            self.policy, max_staleness=batches_ahead(gate=s.gate, max_staleness=s.S), clock=lambda: 0.0
        )
        self.policy.on_change(self.version_changed)
        self.engines = [self.version] * ENGINES
        self.waiting: list[list[GroupWork]] = [[] for _ in range(ENGINES)]  # for a version
        self.running: dict[int, tuple[int, asyncio.TimerHandle, int]] = {}  # ticket -> sample, timer, first version
        self.shipped: asyncio.Queue[Batch | None] = asyncio.Queue()
        self.made: asyncio.Queue[int | None] = asyncio.Queue()
        self.observing: list[asyncio.Task[None]] = []
        self.batches: dict[int, Batch] = {}
        self.last_shipped = self.version - 1
        self.new_from = 0 if state is None else state.next_ticket
        self.most = 40 * (plan.steps + 8) * self.B + 40 * self.C + self.new_from
        if state is not None:
            self.path.restore(state)
            if since == 0 and self.sink.transition:
                raise Wrong(f"bound: {self.sink.transition}, though no setting has changed")
            self.ledger.close_tokens()
            if self.adaptive is not None:
                self.adaptive.restore(self.B)
            slots = sum(work.size for work in state.unfinished) + sum(len(g.rollouts) for g in state.groups)
            formed = len(state.batches)
            if any(len(batch.rollouts) != self.B for batch in state.batches):
                slots, formed = slots + sum(len(batch.rollouts) for batch in state.batches), 0
            ahead = max(0, s.w - self.G) if s.order == "admission" else 0
            self.old_by = max(
                [self.version + formed - 1 + -(-(slots + ahead) // self.B)] + [batch.index for batch in state.batches]
            )
        self.counted = self.count_slots()  # when the newest version went live

    # inference

    def submit(self, work: GroupWork) -> None:
        if work.first_ticket >= self.new_from:
            self.judge_admission(work)
        if work.first_ticket > self.most:
            raise Wrong(f"progress: ticket {work.first_ticket} at version {self.policy.version}: it never ends")
        engine = work.group_id % ENGINES
        if self.engines[engine] < work.version:
            self.waiting[engine].append(work)
        else:
            self.start(work)

    def start(self, work: GroupWork) -> None:
        loop, engine = asyncio.get_running_loop(), work.group_id % ENGINES
        slow = {ticket: seconds for number, ticket, seconds in self.plan.slow if number == self.number}
        for sample, ticket in enumerate(work.tickets):
            spread = random.Random(f"{self.plan.seed} {self.number} {ticket}").lognormvariate(0, self.plan.spread)
            seconds = slow.get(ticket, spread if self.plan.spread else 1.0)
            timer = loop.call_later(seconds, self.end, work, sample, False)
            self.running[ticket] = sample, timer, self.engines[engine]

    def end(self, work: GroupWork, sample: int, cancelled: bool) -> None:
        ticket = work.first_ticket + sample
        _, _, first = self.running.pop(ticket)
        versions = [first, self.engines[work.group_id % ENGINES]]
        failed = cancelled or ticket in self.plan.failed
        rollout = fakes.rollout(work, sample, versions=versions, reward=float(ticket % 7), failed=failed)
        self.ledger.generate(len(versions))
        self.path.ended(rollout)

    def cancel(self, work: GroupWork) -> None:
        loop, waiting = asyncio.get_running_loop(), self.waiting[work.group_id % ENGINES]
        if work in waiting:
            waiting.remove(work)
            self.start(work)
        for sample, ticket in enumerate(work.tickets):
            if ticket in self.running:
                self.running[ticket][1].cancel()
                loop.call_soon(self.end, work, sample, True)

    def swap(self, engine: int, version: int) -> None:
        self.engines[engine] = version
        ready = [work for work in self.waiting[engine] if work.version <= version]
        self.waiting[engine] = [work for work in self.waiting[engine] if work.version > version]
        for work in ready:
            self.start(work)

    # the run

    async def ship(self) -> None:
        for index in range(self.version, self.plan.steps):
            batch = await self.path.form(index)
            if batch is None:
                break
            self.take_given_up()
            self.judge_batch(batch)
            self.batches[index] = batch
            await self.hold.wait(index)
            if index - self.policy.version > (self.s.S if self.s.gate == "ship" else 1):
                raise Wrong(f"hold: batch {index} is shipped at version {self.policy.version}")
            self.last_shipped = index
            self.shipped.put_nowait(batch)
        self.shipped.put_nowait(None)

    async def train(self) -> None:
        while (batch := await self.shipped.get()) is not None:
            await asyncio.sleep(self.plan.trainer_s)
            self.made.put_nowait(batch.index + 1)
            if self.adaptive is not None:
                self.observing.append(asyncio.create_task(self.observe(batch.index + 1)))
        self.made.put_nowait(None)

    async def observe(self, version: int) -> None:
        """As a step is recorded: some time after its version is live."""
        await self.policy.reached(version)
        await asyncio.sleep(self.plan.late_s)
        waited_s = random.Random(f"{self.plan.seed} waited {version}").choice([0.0, 0.1])
        self.adaptive.observe(waited_s=waited_s, busy_s=1.0, used=self.gate.running)

    async def watch(self) -> None:
        while (version := await self.made.get()) is not None:
            if self.s.drain:
                await self.gate.idle(self.G)
            coin = random.Random(f"{self.plan.seed} swap {version}")
            late = sorted((coin.uniform(0, self.plan.late_s), engine) for engine in range(ENGINES))
            slept = 0.0
            for seconds, engine in late:
                await asyncio.sleep(seconds - slept)
                slept = seconds
                self.swap(engine, version)
            self.policy.advance(version)

    def version_changed(self) -> None:
        version = self.policy.version
        self.lineage.trained[version - 1] = [r.ticket for r in self.batches[version - 1].rollouts]
        self.path.assert_closed()
        self.judge_step()
        if version % self.s.save_every == 0:
            self.save()

    def save(self) -> None:
        words, rollouts = to_json(self.path.snapshot())
        self.take_given_up()
        self.newest = json.dumps(words), list(rollouts), self.lineage.copy()

    def take_given_up(self) -> None:
        for rollouts in self.path.take_given_up().values():
            self.lineage.given_up += [r.ticket for r in rollouts]

    async def live(self) -> bool:
        """Whether it came to the end."""
        collecting = asyncio.create_task(self.path.collect())
        parts = [asyncio.create_task(part) for part in (self.dispatcher.run(), self.ship(), self.train(), self.watch())]
        watching = parts[-1]
        try:
            cut = None if self.s.cut_s is None else asyncio.create_task(asyncio.sleep(self.s.cut_s + 0.001))
            while not watching.done() and not (cut and cut.done()):
                alive = [task for task in (*parts, collecting, cut) if task is not None and not task.done()]
                await asyncio.wait(alive, return_when=asyncio.FIRST_COMPLETED)
                for task in (*parts, collecting):
                    if task.done():
                        task.result()
            if watching.done():
                self.dispatcher.close()
                await collecting
                self.judge_end()
                return True
            if not self.s.crash:
                parts[1].cancel()
                await asyncio.wait({parts[1]})
                self.dispatcher.close()
                self.shipped.put_nowait(None)
                await asyncio.wait({collecting}, timeout=self.s.drain_s + 0.001)
                self.dispatcher.abandon()
                collecting.cancel()
                await self.policy.reached(self.last_shipped + 1)
                self.path.assert_closed()
                self.save()
            return False
        finally:
            for task in (*parts, collecting, *self.observing):
                task.cancel()

    # what must be true

    def in_system(self) -> int:
        self.take_given_up()
        trained = sum(map(len, self.lineage.trained.values()))
        return self.dispatcher.next_ticket - trained - len(self.lineage.given_up)

    def judge_admission(self, work: GroupWork) -> None:
        system = self.in_system()
        if self.s.gate == "admission" and system > (self.s.S + 1) * self.B:
            raise Wrong(f"gate: {system} slots at version {self.policy.version}, (S+1)·B = {(self.s.S + 1) * self.B}")
        if self.dispatcher.in_flight > self.C:
            raise Wrong(f"gate: {self.dispatcher.in_flight} episodes run, C = {self.C}")
        if work.version != self.policy.version:
            raise Wrong(f"gate: group of version {work.version} admitted at version {self.policy.version}")

    def count_slots(self) -> tuple[int, int]:
        """Admitted, and given up, so far."""
        trained = sum(map(len, self.lineage.trained.values()))
        return self.ledger.admitted, sum(self.ledger.rollouts.values()) - trained

    def judge_step(self) -> None:
        """What was admitted under the version before, against what was given up under it, by the ledger."""
        before, self.counted = self.counted, self.count_slots()
        admitted, given_up = (now - then for now, then in zip(self.counted, before, strict=True))
        most = (self.s.S + 1) * self.B
        if self.s.gate == "ship":
            most = (self.s.S + 2) * self.B + self.s.Q + self.C
        if admitted > most + given_up or self.gate.most_per_version != most:
            raise Wrong(f"gate: {admitted} admitted and {given_up} given up in version {self.policy.version}: {most}")

    def judge_batch(self, batch: Batch) -> None:
        most = promised(self.plan, self.s)
        if len(batch.rollouts) != self.B:
            raise Wrong(f"batch {batch.index} of {len(batch.rollouts)}, B = {self.B}")
        usable = [self.sink.usable(r) for r in batch.rollouts]
        if self.s.advantage == "reinforce_pp":
            used = [r for r, use in zip(batch.rollouts, usable, strict=True) if use]
            rewards, want = np.array([r.reward for r in used]), np.zeros(len(usable))
            of_tokens = np.repeat(rewards, [r.loss_mask.sum() for r in used])
            if len(rewards) > 1 and rewards.std() > 0:
                want[np.array(usable)] = (rewards - of_tokens.mean()) / of_tokens.std()
            if not np.allclose(batch.advantages, want, atol=1e-5):
                raise Wrong(f"advantages of batch {batch.index}: {batch.advantages}, of its rewards {want}")
        for rollout in batch.rollouts:
            if rollout.failed:
                continue
            age = batch.index - int(rollout.versions[rollout.loss_mask].min())
            where = f"bound: ticket {rollout.ticket} in batch {batch.index} at age {age}"
            if age < 0:
                raise Wrong(where)
            if most is None:
                continue
            if rollout.ticket >= self.since and age > most:
                raise Wrong(f"{where}, admitted under these settings, bound {most}")
            if age > most and (age > self.sink.age_bound_at(batch.index) or batch.index > self.old_by):
                raise Wrong(f"{where}, announced {self.sink.age_bound_at(batch.index)}, by batch {self.old_by}")

    def judge_end(self) -> None:
        self.take_given_up()
        groups, recorded = self.sink.snapshot()
        left = [r.ticket for group in groups for r in group.rollouts]
        if recorded:
            raise Wrong(f"batches {[b.index for b in recorded]} were formed and not trained")
        self.path.leave_over()
        self.path.assert_closed()
        self.ledger.assert_tokens_closed()
        trained = [ticket for tickets in self.lineage.trained.values() for ticket in tickets]
        met = sorted(trained + self.lineage.given_up + left)
        if met != list(range(self.dispatcher.next_ticket)):
            twice = sorted({t for t in met if met.count(t) > 1})
            lost = sorted(set(range(self.dispatcher.next_ticket)) - set(met))
            raise Wrong(f"tickets: {twice} met two ends, {lost} none")
        if self.ledger.admitted != self.dispatcher.next_ticket or sum(self.ledger.rollouts.values()) != len(met):
            raise Wrong(f"ledger: {self.ledger.state()} for {len(met)} tickets")
        if self.plan.tasks is None and len(self.lineage.trained) != self.plan.steps:
            raise Wrong(f"progress: {len(self.lineage.trained)} batches of {self.plan.steps}")


def fault(plan: Plan) -> str:
    """What is wrong with its run, "" for nothing."""
    try:
        _run(plan)
    except (Wrong, RuntimeError, ValueError, AssertionError, KeyError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _run(plan: Plan) -> None:
    saved: tuple[str, list[Rollout], Lineage] | None = None
    since, before = 0, None  # tickets from there on were admitted under the settings of now
    for number, s in enumerate(plan.stretches):
        settings = replace(s, cut_s=None, crash=False, drain_s=0, save_every=1)
        state = None if saved is None else from_json(json.loads(saved[0]), saved[1])
        lineage = Lineage() if saved is None else saved[2].copy()
        next_ticket = 0 if state is None else state.next_ticket
        since = min(since, next_ticket) if settings == before else next_ticket
        before = settings
        if state is not None and state.version >= plan.steps:
            return

        async def life(number=number, state=state, lineage=lineage, since=since) -> tuple[bool, object]:
            one = _Life(plan, number, state, lineage, since)
            return await one.live(), one.newest

        ended, newest = run_virtual(life())
        saved = newest or saved
        if ended:
            return


# ---- a smaller plan


def smaller(plan: Plan, is_wrong: Callable[[Plan], object] = fault, tries: int = 600) -> Plan:
    """The plan without whatever can go while it stays wrong."""
    moved = True
    while moved and tries > 0:
        moved = False
        for candidate in _less(plan):
            if candidate == plan or not allowed(candidate):
                continue
            tries -= 1
            if is_wrong(candidate):
                plan, moved = candidate, True
                break
            if tries <= 0:
                break
    return plan


def _less(plan: Plan) -> Iterator[Plan]:
    for i in range(len(plan.stretches)):
        rest = plan.stretches[:i] + plan.stretches[i + 1 :]
        if rest:
            slow = tuple((n - (n > i), ticket, s) for n, ticket, s in plan.slow if n != i)
            yield replace(plan, stretches=(*rest[:-1], replace(rest[-1], cut_s=None)), slow=slow)
    for name in ("slow", "failed", "filtered"):
        events = getattr(plan, name)
        size = len(events)
        while size:
            for start in range(0, len(events), size):
                yield replace(plan, **{name: events[:start] + events[start + size :]})
            size //= 2
    for name, value in (("spread", 0.0), ("late_s", 0.0), ("tasks", None), ("trainer_s", 1)):
        yield replace(plan, **{name: value})
    for name in ("steps", "G"):
        for value in _lower(getattr(plan, name), 1):
            yield replace(plan, **{name: value})
    usual = Stretch()
    for i, s in enumerate(plan.stretches):
        for f in fields(Stretch):
            value, least = getattr(s, f.name), getattr(usual, f.name)
            if f.name == "cut_s":
                lower = [] if value is None else _lower(value, 0)
            elif type(value) is int and type(least) is int:
                lower = _lower(value, least)
            elif f.name == "M" and value is not None:
                lower = [None, *_lower(value, 0)]
            else:
                lower = [least] if value != least else []
            for less in lower:
                one = replace(s, **{f.name: less})
                yield replace(plan, stretches=(*plan.stretches[:i], one, *plan.stretches[i + 1 :]))


def _lower(value: int, least: int) -> list[int]:
    return sorted({least, (value + least) // 2, value - 1} - {value}) if value > least else []


def literal(plan: Plan) -> str:
    """As Python, what is usual left out."""

    def words(one: object, usual: object) -> str:
        given = ((f.name, getattr(one, f.name)) for f in fields(one))
        changed = ((name, value) for name, value in given if value != getattr(usual, name))
        texts = (
            f"{name}=({', '.join(words(s, Stretch()) for s in value)},)" if name == "stretches" else f"{name}={value!r}"
            for name, value in changed
        )
        return f"{type(one).__name__}({', '.join(texts)})"

    return words(plan, Plan())
