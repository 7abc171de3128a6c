import itertools

import pytest

from spmd_rl import config, envs
from spmd_rl.ranks.build_tasks import MOST_REPETITIONS, eval_tasks
from spmd_rl.types import Task


class Repeats:
    """So many different tasks, over and over."""

    def __init__(self, num, repetitions=3):
        self.num, self.repetitions = num, repetitions

    def tasks(self, seed, split):
        for i in itertools.cycle(range(self.num)):
            for _ in range(self.repetitions):
                yield Task(env="", task_id=f"t{i % 5}", data={"i": i})


def chosen(env, num_tasks):
    tree = {"model": {"path": "m"}, "env": {"e": {"path": "a:b"}}, "eval": {"num_tasks": num_tasks}}
    return [task.data["i"] for task in eval_tasks(config.from_tree(tree), {"e": env})["e"]]


@pytest.mark.parametrize(
    ("num", "asked", "got"), [(40, 32, range(32)), (7, 32, range(7)), (1, 4, range(1)), (5, 5, range(5))]
)
def test_evaluation_tasks_are_all_different(num, asked, got):
    assert chosen(Repeats(num), asked) == list(got)


def test_an_environment_that_repeats_itself_for_ever_is_left():
    assert chosen(Repeats(2, repetitions=2 * MOST_REPETITIONS), 4) == [0]


def test_thirty_two_sums_that_are_evaluated_are_thirty_two_sums():
    env = envs.load("spmd_rl.envs.arithmetic:Arithmetic", tokenizer=None, args={"least": 1, "most": 20})
    tree = {"model": {"path": "m"}, "env": {"e": {"path": "a:b"}}, "eval": {"num_tasks": 48}}
    tasks = eval_tasks(config.from_tree(tree), {"e": env})["e"]
    assert len({task.data["question"] for task in tasks}) == 48
