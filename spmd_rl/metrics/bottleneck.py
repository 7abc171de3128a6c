"""Which side of a run is the bottleneck, and the one setting to change: a table, read from the top.

Given shares that were measured over a run, and the settings that it had.  Promises: the first rule that holds speaks.
Knows nothing of how the shares are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

IDLE = 0.1  # share of its time from which on a side is said to wait
FEW = 0.25  # of the engines' slots: with fewer in use, more sequences at once cost little
MOST = 0.5
USUAL_STALENESS = 8  # up to which losses are said to absorb the age


@dataclass(frozen=True, kw_only=True)
class Signals:
    """Shares between 0 and 1, over the run."""

    trainer_idle: float | None  # of its time, from its first batch on
    engine_idle: float | None  # of their time: without any work at all
    slots_used: float  # of the engines' slots, on average
    requests_wait: float  # requests that found no slot or no room for keys and values, on average: no share
    kv_wait: float  # of those, requests that had a slot and no room: no share
    closed_by_concurrency: float  # of the time that the gate was closed: C alone closed it
    held_back: float  # of the trainer's waiting: B finished rollouts lay there, and the order or max_age said no
    parked: float  # of the time from the first admission to the last step: a complete batch was held
    trainable: float | None  # of what was sampled: trained with an advantage; None: no batch was trained
    dropped: float  # of what was sampled: given up for its age
    moved: float  # of the steps: weights changed, as engines hold them
    reward: float | None  # mean over the last batches


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The settings of the same names."""

    max_staleness: int
    batch_size: int
    max_concurrent: int
    gate: str
    order: str
    window: int
    max_age: int
    kv_cache_mib: int
    solved_at: float


def diagnose(signals: Signals, knobs: Knobs) -> tuple[str, str]:
    """(stage, advice)."""
    timed = signals.trainer_idle is not None and signals.engine_idle is not None
    for stage, holds, advice in RULES if timed else TRAINED:
        if holds(signals, knobs):
            return stage, advice(signals, knobs)
    if not timed:
        return "unknown", "too few steps to tell"
    raise AssertionError("the last rule always holds")


def _trainer_waits(s: Signals) -> bool:
    assert s.trainer_idle is not None  # or only TRAINED is asked
    return s.trainer_idle >= IDLE


def _engines_have_room(s: Signals) -> bool:
    """More sequences at once would find a place, and time."""
    assert s.engine_idle is not None
    return s.requests_wait < 1 and (s.engine_idle >= IDLE or s.slots_used < FEW)


def _trainable(s: Signals) -> float:
    assert s.trainable is not None  # or the first rule has spoken
    return s.trainable


Rule = tuple[str, Callable[[Signals, Knobs], bool], Callable[[Signals, Knobs], str]]
TRAINED: tuple[Rule, ...] = (  # those that ask for no time: was anything trained at all?
    ("nothing trained", lambda s, k: not s.trainable or not s.moved, lambda s, k: _why_nothing(s, k)),
    (
        "dropping",
        lambda s, k: _trainable(s) < MOST and s.dropped >= MOST * (1 - _trainable(s)),
        lambda s, k: (
            f"{_share(s.dropped)} of what is sampled is dropped for its age: raise staleness.max_age above {k.max_age}"
        ),
    ),
    (
        "rewards",
        lambda s, k: _trainable(s) < MOST,
        lambda s, k: (
            f"only {_share(_trainable(s))} of what is sampled has anything to teach: look at the reward, and draw "
            "tasks that are neither solved nor hopeless (data.min_solve_rate, data.max_solve_rate)"
        ),
    ),
)
RULES: tuple[Rule, ...] = (
    *TRAINED,
    (
        "trainer",
        lambda s, k: not _trainer_waits(s) and (_engines_have_room(s) or s.parked >= MOST),
        lambda s, k: (
            "the trainer works all the time and generation is ahead of it: give it more ranks (topology.trainer); "
            "more in flight would only age the data"
        ),
    ),
    (
        "none",
        lambda s, k: not _trainer_waits(s),
        lambda s, k: "both sides are busy: only more ranks on both make it faster",
    ),
    (
        "taking turns",
        lambda s, k: k.max_staleness == 0 and k.gate == "admission" and _engines_have_room(s),
        lambda s, k: "each side waits for the other: raise staleness.max_staleness to 1",
    ),
    (
        "KV cache",
        lambda s, k: s.kv_wait >= 1 and s.kv_wait >= MOST * s.requests_wait,
        lambda s, k: (
            f"the trainer waits while {s.kv_wait:.0f} requests with a free slot wait for room in the KV cache: raise "
            f"inference.kv_cache_mib above {k.kv_cache_mib}, or shorten rollout.max_tokens"
        ),
    ),
    (
        "stragglers",
        lambda s, k: s.held_back >= MOST and k.order == "admission",
        lambda s, k: (
            "the trainer waits for slow rollouts while a batch of later ones lies finished: raise staleness.window "
            f"above {k.window}, or allow staleness.order = 'completion'"
        ),
    ),
    (
        "stragglers",
        lambda s, k: s.held_back >= MOST,
        lambda s, k: (
            "the trainer waits for slow rollouts, so that none grows too old, while a batch of others lies finished: "
            f"raise staleness.max_age above {k.max_age}, or let staleness.over_age = 'drop'"
        ),
    ),
    (
        "concurrency",
        lambda s, k: _engines_have_room(s) and s.closed_by_concurrency >= MOST,
        lambda s, k: (
            "the trainer waits and engines have room, but no more rollouts may run: raise staleness.max_concurrent "
            f"above {k.max_concurrent}"
        ),
    ),
    (
        "queue",
        lambda s, k: _engines_have_room(s) and k.gate == "ship",
        lambda s, k: "the trainer waits and engines have room, but the queue is full: raise staleness.queue_size",
    ),
    (
        "staleness",
        lambda s, k: _engines_have_room(s) and k.max_staleness < USUAL_STALENESS,
        lambda s, k: (
            "the trainer waits and engines have room, but all that the bound allows is under way: raise "
            f"staleness.max_staleness above {k.max_staleness}{_with_room(k)}"
        ),
    ),
    (
        "batch size",
        lambda s, k: _engines_have_room(s),
        lambda s, k: (
            f"the trainer waits and engines have room, but all that the bound allows is under way, and S = "
            f"{k.max_staleness} is as old as data should be: raise rollout.batch_size above {k.batch_size}"
        ),
    ),
    (
        "generation",
        lambda s, k: True,
        lambda s, k: (
            f"the trainer waits and engines work all the time, in {_share(s.slots_used)} of their slots: give them "
            "more ranks (topology.inference), or shorten rollout.max_tokens; a higher S would only age the data"
        ),
    ),
)


def _why_nothing(s: Signals, k: Knobs) -> str:
    if s.trainable is None:
        return "no batch was trained"
    if s.trainable:
        return (
            f"no step changed a weight as engines hold it, though {_share(s.trainable)} of what was sampled had an "
            "advantage: look at trainer.learning_rate and trainer/grad_norm"
        )
    said = "no rollout had an advantage"
    if s.dropped >= MOST:
        return f"{said}, {_share(s.dropped)} was dropped for its age: raise staleness.max_age above {k.max_age}"
    if s.reward is not None and s.reward >= k.solved_at:
        return f"{said}, and all is solved: the mean reward is {s.reward:.3g}; draw harder tasks"
    return (
        f"{said}; the mean reward of the last batches is {s.reward or 0.0:.3g}: look at the reward, and draw tasks "
        "that are neither solved nor hopeless (data.min_solve_rate, data.max_solve_rate)"
    )


def _with_room(k: Knobs) -> str:
    """C has to grow too where it would bind next."""
    needed = (k.max_staleness + 2) * k.batch_size
    return f", and staleness.max_concurrent to {needed}" if k.max_concurrent < needed else ""


def _share(value: float) -> str:
    return f"{100 * value:.0f}%"
