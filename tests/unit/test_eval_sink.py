import itertools

import pytest

from spmd_rl.commands.evaluate import table
from spmd_rl.config.age_bound import Bound
from spmd_rl.metrics.eval_report import pass_at
from spmd_rl.metrics.report import Report, eval_values
from spmd_rl.orchestrator.eval_sink import EvalSink
from spmd_rl.orchestrator.train_sink import _Barren
from tests import fakes

BOUND = Bound(age=2, line="", cap=None)


def evaluation(num: int, *, size: int = 4, first: int = 0, env: str = "sums"):
    return [fakes.work(first + i, size=size, env=env, purpose="eval") for i in range(num)]


def test_the_report_comes_with_the_last_rollout_and_covers_each_environment():
    sink = EvalSink()
    works = [*evaluation(1), *evaluation(1, first=1, env="echo")]
    sink.expect("start", works)
    sums = [fakes.rollout(works[0], i, versions=[2 + i] * 3, reward=float(i < 1)) for i in range(4)]
    sums[3].finish_reason = "length"
    echo = [fakes.rollout(works[1], i, reward=1.0, failed=i == 0) for i in range(4)]
    *early, last = [r for pair in zip(sums, echo, strict=True) for r in pair]
    assert all(sink.add(rollout) is None for rollout in early)
    report = sink.add(last)
    assert report.eval_id == "start" and set(report.envs) == {"sums", "echo"}
    first = report.envs["sums"]
    assert (first.reward, first.length, first.truncated, first.failed) == (0.25, 3.0, 0.25, 0.0)
    assert (first.oldest_version, first.newest_version) == (2, 5)
    assert first.pass_at == {1: 0.25, 2: 0.5, 4: 1.0}
    second = report.envs["echo"]
    assert (second.reward, second.failed, second.pass_at) == (1.0, 0.25, {1: 1.0, 2: 1.0, 4: None})


def test_two_evaluations_of_the_same_tasks_do_not_mix():
    sink = EvalSink()
    one, two = evaluation(1, size=1), evaluation(1, size=1, first=9)
    sink.expect("a", one)
    sink.expect("b", two)
    assert sink.add(fakes.rollout(two[0])).eval_id == "b"
    assert sink.add(fakes.rollout(one[0])).eval_id == "a"


def test_a_rollout_that_nobody_expects_is_refused():
    with pytest.raises(RuntimeError, match="belongs to no open evaluation"):
        EvalSink().add(fakes.rollout(fakes.work(3)))


def test_an_evaluation_cannot_reuse_ids_that_are_open():
    sink = EvalSink()
    sink.expect("a", evaluation(2))
    with pytest.raises(RuntimeError, match="its ids are taken"):
        sink.expect("b", evaluation(1))


def test_pass_at_k_of_ten_samples_with_three_right():
    assert pass_at(1, 10, 3) == pytest.approx(0.3)
    assert round(pass_at(5, 10, 3), 4) == 0.9167


def test_avg_at_k_weighs_tasks_alike_and_a_failed_rollout_is_in_no_mean():
    sink = EvalSink(solved_at=0.5)
    works = evaluation(2, size=3)
    sink.expect("e", works)
    rewards = {0: [1.0, 0.4, 0.4], 1: [0.5, None, None]}
    for number, work in enumerate(works):
        for i, reward in enumerate(rewards[number]):
            report = sink.add(fakes.rollout(work, i, reward=reward or 0.0, failed=reward is None))
    result = report.envs["sums"]
    assert result.reward == pytest.approx((1.0 + 0.4 + 0.4 + 0.5) / 4)
    assert result.solved == pytest.approx((1 / 3 + 1) / 2)
    assert result.pass_at == {1: pytest.approx(2 / 3), 2: pytest.approx(2 / 3), 3: 1.0}
    assert result.failed == pytest.approx(1 / 3)


def test_where_nothing_was_measured_there_is_no_mean():
    sink = EvalSink()
    works = evaluation(2, size=1)
    sink.expect("e", works)
    ended = [fakes.rollout(work, failed=True) for work in works]
    ended[1].finish_reason = "skipped"
    _, report = [sink.add(rollout) for rollout in ended]
    result = report.envs["sums"]
    assert (result.reward, result.solved, result.pass_at, result.length, result.truncated) == (
        None,
        None,
        {1: None},
        None,
        None,
    )
    assert (result.failed, result.unmeasured) == (0.5, "failed 1 of 2, skipped 1 of 2")
    values = eval_values(report)
    assert values["eval/sums/reward"] is None and values["eval/sums/failed"] == values["eval/sums/skipped"] == 0.5
    (line,) = table(report)
    assert line.startswith("sums: reward -  avg@1 -  pass@1 -  length -  truncated -  failed 1 of 2, skipped 1 of 2")
    said = []
    shown = Report(steps=1, knobs=fakes.knobs(), slots=1, bound=BOUND, decode=str, say=said.append)
    shown.evaluated(3, report, values, ended)
    assert said == ["eval at version 3: sums reward - over 2 tasks, failed 1 of 2, skipped 1 of 2"]


def test_what_ends_a_run_for_want_of_anything_to_train_has_no_reward_of_what_failed():
    barren = _Barren()
    barren.add(fakes.group(fakes.work(0, size=2), failed=(0, 1)), "failed", 1.0)
    assert "2 rollouts in groups 1 failed; no reward; last error: ValueError" in str(barren)
    barren.add(fakes.group(fakes.work(1, size=2), [0.0, 0.5], failed=(0,)), "failed", 1.0)
    assert "reward mean 0.5, spread 0;" in str(barren)


def test_with_some_failed_the_mean_is_of_those_that_were_judged():
    sink = EvalSink()
    (work,) = evaluation(1, size=4)
    sink.expect("e", [work])
    for sample, reward in enumerate((1.0, 0.5, 0.0, 0.0)):
        report = sink.add(fakes.rollout(work, sample, reward=reward, failed=sample > 1))
    assert (report.envs["sums"].reward, report.envs["sums"].unmeasured) == (0.75, "failed 2 of 4")


@pytest.mark.parametrize(("samples", "solved", "k"), list(itertools.product([5], range(6), range(1, 6))))
def test_pass_at_k_is_the_share_of_draws_with_a_solved_one(samples, solved, k):
    draws = list(itertools.combinations(range(samples), k))
    assert pass_at(k, samples, solved) == pytest.approx(sum(min(d) < solved for d in draws) / len(draws))
