"""Random runs with stops, crashes and settings changed at each resume: bound, ledger, every ticket, no standstill.

A seed that fails is printed with the smallest plan found that still fails, as a Python literal to run again.
"""

import os

import pytest

from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.gate import AdaptiveAdmission, Gate
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.orchestrator.order import Admission
from spmd_rl.orchestrator.ship_hold import ShipHold
from spmd_rl.orchestrator.train_sink import TrainSink
from tests.random_runs import Plan, Stretch, allowed, draw, fault, literal, smaller

FIRST = int(os.environ.get("FIRST_SEED", "0"))
WITHIN = 300


def clean(seeds: range) -> None:
    for seed in seeds:
        plan = draw(seed)
        if found := fault(plan):
            less = smaller(plan)
            pytest.fail(
                f"seed {seed}: {found}\n{literal(plan)}\nsmaller: {fault(less)}\n{literal(less)}", pytrace=False
            )
    print(f"seeds {seeds.start} … {seeds.stop - 1}")


def test_300_random_runs_keep_every_promise():
    clean(range(FIRST, FIRST + 300))


@pytest.mark.long
def test_5000_random_runs_keep_every_promise():
    clean(range(FIRST + 300, FIRST + 5300))


KNOWN = {
    "S lowered with more held than it admits, a late ticket slow": Plan(
        steps=8,
        slow=((0, 0, 50), (0, 1, 50), (0, 8, 50), (1, 8, 50)),
        stretches=(Stretch(S=2, B=4, C=12, w=5, cut_s=2), Stretch(S=1, B=4, C=12, w=5)),
    ),
    "the limit of adaptive admission rises while a drain waits": Plan(
        steps=6, stretches=(Stretch(cut_s=0), Stretch(S=1, B=6, C=12, adaptive=True, drain=True))
    ),
    "the ship gate drops what is older than its batches ahead": Plan(
        steps=8, trainer_s=0, stretches=(Stretch(S=3, B=4, C=4, Q=4, gate="ship", M=3, over_age="drop"),)
    ),
    "formed batches of another size": Plan(
        steps=8, G=2, trainer_s=10, stretches=(Stretch(S=3, B=4, C=16, cut_s=15), Stretch(S=3, B=1, C=4))
    ),
    "formed batches over a cap that drops": Plan(
        steps=8,
        trainer_s=10,
        stretches=(Stretch(S=3, B=2, C=8, cut_s=35), Stretch(S=0, B=2, C=8, M=0, over_age="drop")),
    ),
}


@pytest.mark.parametrize("plan", KNOWN.values(), ids=KNOWN)
def test_what_once_went_wrong_goes_right(plan):
    assert allowed(plan) and fault(plan) == ""


def wrap(owner, name, change):
    """A mutant: `change(original, self, *arguments)` in place of the method."""
    original = getattr(owner, name)
    return owner, name, lambda *args, **kwargs: change(original, *args, **kwargs)


def _limit(self):
    return (self.max_staleness + self._policy.version + 2) * self.batch_size


def _lose_one(original, self, *, unfinished, **state):
    return original(self, unfinished=unfinished[:-1], **state)


def _count_twice(original, self, outcome, rollouts, tokens):
    original(self, outcome, rollouts + (outcome == "filtered"), tokens)


async def _no_wait(original, self, index):
    return 0.0


MUTANTS = {
    "gate: one batch too many": (Gate, "limit", property(_limit)),
    "gate: C is not looked at": wrap(
        Gate, "capacity", lambda original, self: min(self._room(), self._last_slot - self.accepted - self.running)
    ),
    "gate: not restored": wrap(Gate, "restore", lambda original, self, **counters: None),
    "gate: the cap of the ship gate is not looked at": wrap(
        Gate, "_room_for_ship", lambda original, self: self.queue_size + self.max_concurrent - self.running
    ),
    "gate: not woken by the adaptive limit": wrap(AdaptiveAdmission, "on_change", lambda original, self, call: None),
    "order: the window holds nothing back": wrap(
        Admission, "__init__", lambda original, self, window: original(self, 10**6)
    ),
    "sink: no deadline is looked at": wrap(TrainSink, "_needs", lambda original, self, index: []),
    "sink: what a resume finds is under the bound of now": wrap(
        TrainSink, "_last_batches", lambda original, self, *args: {}
    ),
    "sink: the window is left out of what a resume finds": wrap(
        Admission, "most_before", lambda original, self, line, size, next_ticket: [i * size for i in range(len(line))]
    ),
    "sink: nothing expires": wrap(TrainSink, "_judge", lambda original, self, group, usable, oldest: "kept"),
    "ledger: a filtered group counts one more": wrap(Ledger, "settle", _count_twice),
    "dispatcher: the last unfinished group is lost": wrap(Dispatcher, "restore", _lose_one),
    "hold: nothing is held": wrap(ShipHold, "wait", _no_wait),
}


RARE = {  # where to begin, for those that are found late
    "gate: the cap of the ship gate is not looked at": 70,
    "gate: not woken by the adaptive limit": 240,
    "sink: no deadline is looked at": 80,
    "sink: nothing expires": 100,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_random_runs_find_a_planted_fault(name, monkeypatch):
    monkeypatch.setattr(*MUTANTS[name])
    found = next((seed for seed in range(RARE.get(name, 0), WITHIN) if fault(draw(seed))), None)
    assert found is not None
    print(f"found by seed {found}")


def test_a_failing_plan_is_made_smaller_and_still_fails(monkeypatch):
    monkeypatch.setattr(*MUTANTS["dispatcher: the last unfinished group is lost"])
    plan = next(plan for plan in map(draw, range(WITHIN)) if fault(plan))
    less = smaller(plan)
    assert fault(less) and len(less.stretches) == 2 and not (less.slow or less.failed or less.filtered)
    assert eval(literal(less)) == less and len(literal(less)) < 200
