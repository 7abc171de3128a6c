"""What the staleness settings promise about the age of what is trained, proved in a few lines.

Letters: S max_staleness, B batch_size, G group_size (divides B), C max_concurrent, w window, M max_age, Q queue_size.
Age = index of the batch - oldest version of the rollout, and that version is never below its admission version v.

Admission gate: right after an admission at version v at most (S+v+1)·B slots were ever accepted or run, so a group of G
has at most (S+v+1)·B - G slots before it.  In ticket order with look-ahead w at most w - G later ones overtake it (they
lie in the window that its first ticket holds back).  Its position is at most (S+v+1)·B - G + max(0, w-G), whose batch
is S + v + ceil(max(0, w-G) / B).  In other orders nothing limits how many overtake it.  At S = 0 the bound is 0 in any
order: no slot is admitted for a later batch before this one is consumed.  Both hold for what is admitted after a
resume, whatever that found: the premise is asserted at each admission.  What a resume finds has bounds of its own, see
`TrainSink.restore` and docs/staleness.md.

Ship gate: at most S+1 batches are shipped and untrained, one is parked, Q + C slots wait or run; so the position,
counted from batch v, is at most (S+2)·B + Q + C - 1 + max(0, w-G).

Cap by waiting: batches are formed so that for every version d the slots due by d fit into the batches up to d.  That
can always be kept up if all slots in the system, L, fit into M + 1 batches: (S+1)·B ≤ (M+1)·B for the admission gate.

Given: plain numbers.  Knows nothing of gates, sinks or configs.
"""

from __future__ import annotations

from dataclasses import dataclass

PREFETCH = 1  # batches shipped ahead of the one that is trained; the ship gate's S takes its place


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """`age` is asserted at every consumption; None = nothing to assert."""

    age: int | None
    line: str  # what is printed at start
    cap: int | None  # M where the sink must enforce it, None where the order alone keeps it or there is none
    next_batch_only: bool = False  # S = 0: nothing is admitted that does not fit into the next batch

    def __str__(self) -> str:
        return self.line


def batches_ahead(*, gate: str, max_staleness: int) -> int:
    """Batches that are shipped before the version of the first of them is live."""
    return max_staleness if gate == "ship" else PREFETCH


def age_bound(
    *,
    gate: str,  # "admission" | "ship"
    order: str,  # "completion" | "oldest" | "admission"
    max_staleness: int,
    batch_size: int,
    group_size: int = 1,
    max_concurrent: int = 0,  # read by the ship gate only
    window: int = 1,
    queue_size: int = 0,  # read by the ship gate only
    max_age: int | None = None,
    over_age: str = "wait",  # "wait" | "drop"
) -> Bound:
    """The bound in force, for any completion times.  ValueError for settings that cannot be kept."""
    if max_age is not None and max_age < max_staleness:
        raise ValueError(f"max_age = {max_age} is below max_staleness = {max_staleness}")
    ahead = max(0, window - group_size)
    age: int | None
    if gate == "ship":
        system = (max_staleness + 2) * batch_size + queue_size + max_concurrent
        age, formula = (system - 1 + ahead) // batch_size, "floor(((S+2)·B + Q + C - 1 + max(0, w-G)) / B)"
        least_cap = (system - 1) // batch_size
    else:
        age, formula = max_staleness - (-ahead // batch_size), "S" + (" + ceil((w-G)/B)" if ahead else "")
        least_cap = max_staleness
    synchronous = gate == "admission" and max_staleness == 0
    if synchronous:
        age, formula = 0, "S: at S = 0 no order can age anything"
    elif order != "admission":
        age = None
    if max_age is not None and (age is None or max_age < age):
        if over_age == "wait" and max_age < least_cap:
            raise ValueError(
                f"max_age = {max_age} cannot be kept by waiting under gate = ship: the system may hold "
                f"(S+2)·B + Q + C = {system} slots, so max_age must be at least {least_cap}; or over_age = drop"
            )
        line = f"age ≤ {max_age} = max_age, kept by {'waiting' if over_age == 'wait' else 'dropping'}"
        return Bound(age=max_age, line=f"{line} ({order} order)", cap=max_age)
    if age is None:
        return Bound(age=None, line=f"no bound: {order} order; expect p99 above S = {max_staleness}", cap=None)
    cap = max_age if over_age == "drop" else None  # for what a resume finds; of its own admissions none is ever over it
    return Bound(age=age, line=f"age ≤ {age} = {formula}", cap=cap, next_batch_only=synchronous)
