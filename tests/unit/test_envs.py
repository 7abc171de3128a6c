import asyncio
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from spmd_rl import envs
from spmd_rl.demo import tiny_model
from spmd_rl.envs.arithmetic import Arithmetic
from spmd_rl.envs.calculator import Calculator
from spmd_rl.envs.echo import Echo
from spmd_rl.envs.environment import checked_tasks, drawn
from spmd_rl.envs.fraction import Fraction
from spmd_rl.envs.guess import Guess
from spmd_rl.envs.lookup import Lookup
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.types import NO_VERSION, Completion, Task
from tests.says import Says


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_model.write_tokenizer(folder)
    return Tokenizer(folder)


def play(env, data, policy, task_id="t"):
    return asyncio.run(env.rollout(Task(env="", task_id=task_id, data=data), policy))


def test_a_single_turn_is_prompt_reply_and_reward(tokenizer):
    env = SingleTurn(
        tokenizer=tokenizer, prompt=lambda data: f"{data['n']}:", reward=lambda data, reply: reply == "yes"
    )
    policy = Says(tokenizer, "yes<eos>")
    rollout = play(env, {"n": 7}, policy)
    assert policy.asked == [("<bos>7:", None)]
    assert tokenizer.decode(rollout.token_ids, special=True) == "<bos>7:yes<eos>"
    assert rollout.loss_mask.tolist() == [False] * 3 + [True] * 4
    assert rollout.versions.tolist() == [NO_VERSION] * 3 + [5] * 4
    assert rollout.behavior_logprobs.tolist() == [0.0] * 3 + [-0.5] * 4
    assert (rollout.reward, rollout.reward_parts, rollout.finish_reason) == (1.0, {"reward": 1.0}, "stop")
    assert (rollout.task_id, rollout.num_turns) == ("t", 1)


def test_parts_of_a_reward_are_weighed_and_kept_by_name(tokenizer):
    env = SingleTurn(
        tokenizer=tokenizer,
        prompt=lambda data: "k:",
        reward=lambda data, reply: {"right": 1.0, "format": 0.0, "code": None},
        weights={"right": 0.7, "format": 0.3, "code": 1.0},
    )
    rollout = play(env, {}, Says(tokenizer, "x", finish_reason="length"))
    assert rollout.reward == 0.7
    assert rollout.reward_parts == {"right": 1.0, "format": 0.0}
    assert rollout.finish_reason == "length"


def test_a_reward_that_nobody_measured_is_an_error(tokenizer):
    env = SingleTurn(tokenizer=tokenizer, prompt=lambda data: "k:", reward=lambda data, reply: float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        play(env, {}, Says(tokenizer, "x"))


def test_sampled_ids_are_kept_as_they_came(tokenizer):
    split = np.array([20, 17, 24, 24, 27], np.int32)  # ids that encoding their text might have merged

    async def generate(token_ids, max_tokens=None):
        return Completion(token_ids=split, logprobs=np.zeros(5), versions=np.zeros(5), finish_reason="stop")

    env = SingleTurn(tokenizer=tokenizer, prompt=lambda data: "k:", reward=lambda data, reply: 0.0)
    assert play(env, {}, generate).token_ids[-5:].tolist() == split.tolist()


@pytest.mark.parametrize("cls", [Arithmetic, Fraction, Echo, Lookup])
def test_seed_and_split_alone_decide_the_tasks(tokenizer, cls):
    def first(seed, split):
        return [(t.task_id, dict(t.data)) for t in islice(cls(tokenizer=tokenizer).tasks(seed, split), 40)]

    assert first(0, "train") == first(0, "train")
    assert first(0, "train") != first(1, "train")
    assert first(0, "train") != first(0, "eval")


def test_one_task_id_is_one_task(tokenizer):
    data = {}
    for split in ("train", "eval"):
        for task in islice(Arithmetic(tokenizer=tokenizer).tasks(0, split), 2000):
            assert data.setdefault(task.task_id, task.data) == task.data
    assert len(data) == 100


@pytest.mark.parametrize(
    ("cls", "args"),
    [(Arithmetic, {}), (Arithmetic, {"operation": "-"}), (Guess, {}), (Calculator, {"digits": 1, "terms": 2})],
)
def test_what_is_evaluated_is_never_trained_on_whatever_the_seeds(tokenizer, cls, args):
    env = cls(tokenizer=tokenizer, **args)
    trained, evaluated = (
        {task.task_id for seed in range(3) for task in islice(env.tasks(seed, split), 2000)}
        for split in ("train", "eval")
    )
    assert not trained & evaluated
    assert 0.1 < len(evaluated) / len(trained | evaluated) < 0.3


def test_a_sum_is_not_held_out_by_turning_it_around(tokenizer):
    tasks = islice(Arithmetic(tokenizer=tokenizer).tasks(0, "train"), 2000)
    trained = {task.task_id for task in tasks}
    assert all(" + ".join(reversed(question.split(" + "))) in trained for question in trained)


def test_too_few_tasks_to_hold_some_out_are_refused():
    with pytest.raises(ValueError, match="among 10000: there are too few different ones"):
        for split in ("train", "eval"):
            next(drawn(0, split, lambda rng: Task(env="", task_id="7"), key=lambda task: task.task_id))


@pytest.mark.parametrize(
    ("operation", "least", "most"), [("+", 0, 9), ("*", 0, 9), ("-", 0, 9), ("+", 10, 99), ("+", 1, 20)]
)
def test_arithmetic_draws_numbers_of_a_range(tokenizer, operation, least, most):
    env = Arithmetic(tokenizer=tokenizer, operation=operation, least=least, most=most)
    tasks = list(islice(env.tasks(0, "train"), 2000))
    assert all(t.data["answer"] == eval(t.data["question"]) for t in tasks)
    numbers = {int(n) for t in tasks for n in t.data["question"].split(f" {operation} ")}
    assert numbers == set(range(least, most + 1))


def test_arithmetic_asks_with_a_system_prompt_and_judges_the_last_number(tokenizer):
    env = Arithmetic(tokenizer=tokenizer)
    data = {"question": "3 + 8", "answer": 11}
    assert [m["content"] for m in env.prompt(data)] == ["Reply with only the number.", "What is 3 + 8?"]
    assert play(env, data, Says(tokenizer, "3 + 8 is 11.<eos>")).reward == 1.0
    assert play(env, data, Says(tokenizer, "11 or 12<eos>")).reward == 0.0


def test_fraction_counts_vowels_among_eight(tokenizer):
    policy = Says(tokenizer, "aexxxxxx")
    assert play(Fraction(tokenizer=tokenizer), {"digit": "7"}, policy).reward == 0.25
    assert policy.asked == [("<bos>7:", 8)]
    assert play(Fraction(tokenizer=tokenizer), {"digit": "7"}, Says(tokenizer, "aa<eos>")).reward == 0.25


def test_echo_counts_the_letter_of_the_prompt(tokenizer):
    policy = Says(tokenizer, "cccccccd")
    assert play(Echo(tokenizer=tokenizer), {"letter": "c"}, policy).reward == 0.875
    assert policy.asked == [("<bos>c:", 8)]


def test_lookup_reads_what_its_tool_inserts(tokenizer):
    policy = Says(tokenizer, "?", "7", finish_reason="length")
    rollout = play(Lookup(tokenizer=tokenizer), {"digit": "7"}, policy)
    assert policy.asked == [("<bos>k:", 1), ("<bos>k:?=7;", 1)]
    assert tokenizer.decode(rollout.token_ids) == "k:?=7;7"
    assert rollout.loss_mask.tolist() == [False] * 3 + [True] + [False] * 3 + [True]
    assert rollout.versions.tolist() == [NO_VERSION] * 3 + [5] + [NO_VERSION] * 3 + [5]
    assert (rollout.reward, rollout.finish_reason, rollout.num_turns) == (1.0, "env", 2)


def test_lookup_pays_for_the_call_and_ends_without_it(tokenizer):
    wrong = play(Lookup(tokenizer=tokenizer), {"digit": "7"}, Says(tokenizer, "?", "8"))
    assert (wrong.reward, wrong.reward_parts) == (0.2, {"call": 1.0, "answer": 0.0})
    silent = play(Lookup(tokenizer=tokenizer), {"digit": "7"}, Says(tokenizer, "7"))
    assert (silent.reward, silent.reward_parts, silent.num_turns) == (0.0, {"call": 0.0}, 1)


def test_environments_are_loaded_by_import_path(tokenizer):
    env = envs.load("spmd_rl.envs.arithmetic:Arithmetic", tokenizer=tokenizer, args={"operation": "*"})
    assert next(env.tasks(0, "train")).data["question"].count("*") == 1


@pytest.mark.parametrize(
    ("path", "args", "message"),
    [
        ("spmd_rl.envs.arithmetics:Arithmetic", {}, "No module named"),
        ("spmd_rl.envs.arithmetic:Arithmetics", {}, "no attribute 'Arithmetics'"),
        ("spmd_rl.envs.arithmetic:Arithmetic", {"digit": 2}, "'digit'; its settings: operation, least, most, system"),
        ("spmd_rl.envs.arithmetic:Arithmetic", {"operation": "/"}, r"operation = '/': must be one of \+ - \*"),
        ("spmd_rl.envs.arithmetic:Arithmetic", {"least": 9}, "least = 9, most = 9: 0 <= least < most"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said(tokenizer, path, args, message):
    with pytest.raises(ValueError, match=message):
        envs.load(path, tokenizer=tokenizer, args=args)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(env="", task_id="1", data={"n": np.int64(4)}), r"task '1': data\['n'\] is not JSON.*int64"),
        (Task(env="", task_id=1, data={}), "task_id = 1 is <class 'int'>, not a string"),
        (Task(env="", task_id="1", data=["n"]), "environment sums: AttributeError"),
    ],
)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_data_that_a_checkpoint_could_not_hold_are_refused_before_the_run(task, message, split):
    env = SimpleNamespace(tasks=lambda seed, split: iter([task]))
    with pytest.raises(ValueError, match=message) as refused:
        checked_tasks("sums", env, seed=0, split=split)
    assert "\n" not in str(refused.value)
