"""Evaluation rollouts in, one report per evaluation out: no advantages, no filter, no gate, no ledger.

`expect` announces the work of one evaluation; `add` takes its rollouts in any order, several evaluations at once, and
gives the report with the last of them.  A failed rollout was not measured: it is counted and in no mean.
Knows nothing of training, engines or weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmd_rl.metrics.eval_report import EnvReport, EvalReport, pass_at
from spmd_rl.types import NO_VERSION, Finish, GroupWork, Rollout


@dataclass(kw_only=True)
class _Open:
    missing: int
    samples: int
    works: dict[int, GroupWork]  # by group_id
    rollouts: dict[int, list[Rollout]]  # by group_id


class EvalSink:
    """See the module."""

    def __init__(self, *, solved_at: float = 1.0) -> None:
        self._solved_at = solved_at  # least reward of a solved task
        self._open: dict[str, _Open] = {}
        self._eval_of: dict[int, str] = {}  # group_id -> eval_id

    def expect(self, eval_id: str, works: Sequence[GroupWork]) -> None:
        """One work per task, all of the same size (the samples per task)."""
        clash = next((work for work in works if work.group_id in self._eval_of), None)
        if eval_id in self._open or clash or not works:
            raise RuntimeError(f"evaluation {eval_id!r} of {len(works)} tasks: empty, or its ids are taken ({clash})")
        self._open[eval_id] = _Open(
            missing=sum(work.size for work in works),
            samples=works[0].size,
            works={work.group_id: work for work in works},
            rollouts={work.group_id: [] for work in works},
        )
        self._eval_of.update((work.group_id, eval_id) for work in works)

    def add(self, rollout: Rollout) -> EvalReport | None:
        """The report, if this was the last rollout of its evaluation."""
        eval_id = self._eval_of.get(rollout.group_id)
        if eval_id is None:
            raise RuntimeError(f"rollout of group {rollout.group_id} belongs to no open evaluation")
        evaluation = self._open[eval_id]
        evaluation.rollouts[rollout.group_id].append(rollout)
        evaluation.missing -= 1
        if evaluation.missing:
            return None
        del self._open[eval_id]
        for group_id in evaluation.works:
            del self._eval_of[group_id]
        return EvalReport(eval_id=eval_id, envs=self._by_env(evaluation))

    def _by_env(self, evaluation: _Open) -> dict[str, EnvReport]:
        groups: dict[str, list[list[Rollout]]] = {}
        for group_id, rollouts in evaluation.rollouts.items():
            groups.setdefault(evaluation.works[group_id].task.env, []).append(rollouts)
        return {env: self._report(tasks, evaluation.samples) for env, tasks in groups.items()}

    def _report(self, tasks: list[list[Rollout]], samples: int) -> EnvReport:
        rollouts = [rollout for task in tasks for rollout in task]
        good = [rollout for rollout in rollouts if not rollout.failed]
        measured = [[r.reward for r in task if not r.failed] for task in tasks]
        solved = [(len(m), sum(reward >= self._solved_at for reward in m)) for m in measured]
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k < samples] + [samples]
        return EnvReport(
            num_tasks=len(tasks),
            samples=samples,
            reward=_mean([reward for m in measured for reward in m]),
            solved=_mean([c / n for n, c in solved if n]),
            pass_at={k: _mean([pass_at(k, n, c) for n, c in solved if n >= k]) for k in ks},
            length=_mean([r.num_trainable for r in good]),
            truncated=_mean([r.finish_reason == Finish.LENGTH for r in good]),
            num_failed=sum(r.failed and not r.skipped for r in rollouts),
            num_skipped=sum(r.skipped for r in rollouts),
            oldest_version=min((r.head for r in rollouts if r.head != NO_VERSION), default=NO_VERSION),
            newest_version=max((r.tail for r in rollouts), default=NO_VERSION),
        )


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
