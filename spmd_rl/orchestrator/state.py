"""The orchestrator's half of a checkpoint as JSON and rollouts, and back.

Rollouts of kept groups and of formed batches lie in one list, groups first, each in its recorded composition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from spmd_rl.orchestrator.train_path import PathState
from spmd_rl.types import Batch, Group, GroupWork, Rollout, Task


def to_json(state: PathState) -> tuple[dict[str, object], list[Rollout]]:
    """What `from_json` takes."""
    words = {
        "version": state.version,
        "next_ticket": state.next_ticket,
        "next_group": state.next_group,
        "unfinished": [asdict(work) for work in state.unfinished],
        "groups": [
            {
                "group_id": group.group_id,
                "first_ticket": group.first_ticket,
                "admission_version": group.admission_version,
                "advantages": _advantages(group),
            }
            for group in state.groups
        ],
        "batches": [{"index": batch.index, "advantages": batch.advantages.tolist()} for batch in state.batches],
        "ledger": state.ledger,
    }
    holders: list[Group | Batch] = [*state.groups, *state.batches]
    return words, [rollout for holder in holders for rollout in holder.rollouts]


def _advantages(group: Group) -> list[float]:
    assert group.advantages is not None  # the sink has judged it, or would not keep it
    advantages: list[float] = group.advantages.tolist()
    return advantages


def from_json(words: Mapping[str, Any], rollouts: Sequence[Rollout]) -> PathState:
    """ValueError when the two do not fit together."""
    left = iter(rollouts)

    def take(advantages: list[float]) -> tuple[list[Rollout], np.ndarray]:
        values = np.array(advantages, np.float64)
        if not (np.abs(values) <= np.finfo(np.float32).max).all():
            raise ValueError(f"advantages are {advantages}")
        return [next(left) for _ in advantages], values.astype(np.float32)

    try:
        groups = []
        for entry in words["groups"]:
            members, advantages = take(entry["advantages"])
            groups.append(Group(**{**entry, "rollouts": members, "advantages": advantages}))
        batches = []
        for entry in words["batches"]:
            members, advantages = take(entry["advantages"])
            batches.append(Batch(index=entry["index"], rollouts=members, advantages=advantages))
        unfinished = [GroupWork(**{**entry, "task": Task(**entry["task"])}) for entry in words["unfinished"]]
        if next(left, None) is not None:
            raise ValueError("more rollouts than groups and batches hold")
        return PathState(
            version=words["version"],
            next_ticket=words["next_ticket"],
            next_group=words["next_group"],
            unfinished=unfinished,
            groups=groups,
            batches=batches,
            ledger=words["ledger"],
        )
    except (KeyError, TypeError, StopIteration, RuntimeError) as error:
        raise ValueError(f"it does not fit together: {error!r}") from error
