import itertools

import pytest

from spmd_rl.orchestrator.eval_sink import EvalSink, pass_at
from tests import fakes


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
    assert sink.num_missing == 1
    report = sink.add(last)
    assert report.eval_id == "start" and set(report.envs) == {"sums", "echo"}
    first = report.envs["sums"]
    assert (first.reward, first.length, first.truncated, first.failed) == (0.25, 3.0, 0.25, 0.0)
    assert (first.oldest_version, first.newest_version) == (2, 5)
    assert first.pass_at == {1: 0.25, 2: 0.5, 4: 1.0}
    second = report.envs["echo"]
    assert (second.reward, second.failed, second.pass_at[1]) == (0.75, 0.25, 0.75)
    assert sink.pending() == {}


def test_two_evaluations_of_the_same_tasks_do_not_mix():
    sink = EvalSink()
    one, two = evaluation(1, size=1), evaluation(1, size=1, first=9)
    sink.expect("a", one)
    sink.expect("b", two)
    assert sink.add(fakes.rollout(two[0])).eval_id == "b"
    assert list(sink.pending()) == ["a"]
    assert sink.add(fakes.rollout(one[0])).eval_id == "a"


def test_a_rollout_that_nobody_expects_is_refused():
    with pytest.raises(RuntimeError, match="belongs to no open evaluation"):
        EvalSink().add(fakes.rollout(fakes.work(3)))


def test_an_evaluation_cannot_reuse_ids_that_are_open():
    sink = EvalSink()
    sink.expect("a", evaluation(2))
    with pytest.raises(RuntimeError, match="its ids are taken"):
        sink.expect("b", evaluation(1))


@pytest.mark.parametrize(("samples", "solved", "k"), list(itertools.product([5], range(6), range(1, 6))))
def test_pass_at_k_is_the_share_of_draws_with_a_solved_one(samples, solved, k):
    draws = list(itertools.combinations(range(samples), k))
    assert pass_at(k, samples, solved) == pytest.approx(sum(min(d) < solved for d in draws) / len(draws))
