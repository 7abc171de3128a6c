"""The summary of a run that was resumed is that of the run, not of its last process."""

import json

import numpy as np
import pytest

from spmd_rl.config.age_bound import Bound
from spmd_rl.metrics.eval_report import EvalReport
from spmd_rl.metrics.report import Report, batch_metrics
from spmd_rl.types import Batch
from tests import fakes

OF_A_PROCESS = {"trainer_idle", "signals", "steps_per_minute", "wall_s", "resumed_at"}
OPEN = {"concurrency": 0.0, "bound": 0.0}  # for how long the gate was closed
AGES = [0, 0, 2, 0, 1, 0, 1, 0]  # of the batch that makes version 1, 2, …


def report() -> Report:
    bound = Bound(age=2, line="", cap=None)
    knobs = fakes.knobs(batch_size=2)
    return Report(steps=8, knobs=knobs, slots=4, bound=bound, decode=str, say=lambda line: None, clock=lambda: 0.0)


def step(version: int) -> dict[str, object]:
    index, age = version - 1, AGES[version - 1]
    rollouts = [fakes.rollout(fakes.work(i), versions=[index - age] * (i + 1)) for i in range(2)]
    for rollout in rollouts:
        rollout.finished_version = index
    batch = Batch(index=index, rollouts=rollouts, advantages=np.ones(2, np.float32))
    values = batch_metrics(batch, given_up={"filtered": [], "dropped": []}, usable=lambda _: True)
    values |= {"reward": version / 8, "trainer/wait_s": float(version), "trainer/step_s": 1.0}
    values |= {"trainer/tokens": 3, "trainer/tokens_per_s": 3.0, "time/parked_s": 0.25, "time/held_back_s": 0.0}
    values |= {"weights/update_norm": 1.0} | ({"trainer/mismatch_kl": 1e-9 * version} if version < 4 else {})
    return values


def train(of: Report, lines: list[dict], versions: range) -> None:
    """As the orchestrator does it, with what it records."""
    for version in versions:
        failed = fakes.rollout(fakes.work(), failed=True)
        of.failed(failed)
        values = step(version) | of.failures()
        lines.append({"kind": "step", "version": version, **values})
        of.step(version, values)
        if version % 2:
            probe = {
                "probe/kl": 1e-6 / version,
                "probe/sampled_kl": 1e-7 * version,
                "probe/sampled_max": 1e-4 / version,
            }
            lines.append({"kind": "probe", "version": version, **probe, "probe/cost_s": 0.0})
            of.probed(version, probe | {"probe/cost_s": 0.0})
        scored = {"eval/fake/reward": version / 10}
        lines.append({"kind": "eval", "version": version, **scored})
        of.evaluated(version, EvalReport(eval_id="", envs={}), scored, [failed])


def test_a_resume_goes_on_from_what_was_recorded_and_its_times_are_its_own():
    whole, first, lines = report(), report(), []
    train(whole, [], range(1, 9))
    train(first, lines, range(1, 6))
    resumed = report()
    resumed.restore(json.loads(json.dumps(lines)))
    train(resumed, [], range(6, 9))
    expected, summary = ({"status": "done", **of.summary({}, {}, OPEN)} for of in (whole, resumed))
    assert {n: v for n, v in summary.items() if n not in OF_A_PROCESS} == {
        n: v for n, v in expected.items() if n not in OF_A_PROCESS
    }
    assert (summary["steps"], summary["age_max"], summary["tokens_trained"], summary["resumed_at"]) == (8, 2, 24, 5)
    assert (summary["reward_first"], summary["reward_last"]) == (3 / 8, 6 / 8)  # versions 1 … 5 and 4 … 8
    assert (summary["eval_first"], summary["failures"]) == ({"eval/fake/reward": 0.1}, {"ValueError": 8})
    assert (summary["probe_kl_max"], summary["sampled_max"], summary["sampled_kl_max"]) == (1e-6, 1e-4, 7e-7)
    assert summary["mismatch_kl_max"] == 7e-7  # of the probe at version 7: the batch after it has none of its own
    assert summary["trainer_idle"] == (7 + 8) / (7 + 8 + 3)  # the first batch is waited for anyway
    assert "\n  steps                     3 in 0s, version 8\n" in resumed.table(summary, paths={})


def said(task_id: str, reward: float, *, failed: bool = False):
    rollout = fakes.rollout(fakes.work(), failed=failed)
    rollout.task_id, rollout.reward = task_id, reward
    rollout.token_ids = np.array([int(task_id), int(10 * reward)], np.int32)
    return rollout


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ([said("1", 1.0), said("2", 0.0)], [said("2", 1.0), said("1", 1.0)], ["[2 0]", "[ 2 10]"]),
        ([said("1", 0.5), said("2", 0.4)], [said("1", 0.6), said("2", 0.9)], ["[2 4]", "[2 9]"]),
        ([said("1", 1.0), said("2", 1.0)], [said("1", 1.0), said("2", 0.0)], ["[ 1 10]", "[ 1 10]"]),
        ([said("1", 0.0, failed=True), said("2", 0.5)], [said("1", 1.0), said("2", 0.5)], ["[2 5]", "[2 5]"]),
        ([said("1", 0.0, failed=True)], [said("1", 1.0)], ["[ 1 10]"]),
        ([said("1", 0.0)], [said("1", 0.0, failed=True)], []),
    ],
)
def test_the_example_is_the_task_whose_reward_rose_most(before, after, shown):
    of = report()
    lines: list[dict] = []
    train(of, lines, range(1, 2))
    of._evals.clear()
    for version, rollouts in ((0, before), (8, after)):
        of.evaluated(version, EvalReport(eval_id="", envs={}), {"eval/fake/reward": 0.0}, rollouts)
    table = of.table({"status": "done", **of.summary({}, {}, OPEN)}, paths={})
    assert [line.strip() for line in table.splitlines() if line.startswith("    ")] == shown
