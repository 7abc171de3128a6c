"""The adapter of `verifiers`, with a fake of the package always and with the package itself where it is installed."""

import asyncio
import importlib.util
import json
import os
from itertools import islice
from pathlib import Path

import pytest

from spmd_rl import envs
from spmd_rl.envs import verifiers_child
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.processes.workers import TimedOut, Workers
from tests.says import CHATML, Says, trained_text, write_folder

FAKE = Path(__file__).parent / "verifiers_fake"
WITH_TOOLS = "{% if tools %}{{ tools[0].function.name }}: {% endif %}" + CHATML
CALL = 'hm <tool_call>{"name": "look",  "arguments": {"number": 4}}</tool_call>'  # two blanks, which no template writes


def environment(tmp_path, **args):
    tokenizer = Tokenizer(write_folder(tmp_path, template=WITH_TOOLS))
    args = {"name": "fake_words", "num_processes": 1, "timeout_s": 60.0} | args
    return envs.load("spmd_rl.envs.verifiers:Verifiers", tokenizer=tokenizer, args=args), tokenizer


@pytest.fixture
def make(tmp_path, monkeypatch):
    """An environment of the fake package."""
    monkeypatch.setenv("PYTHONPATH", f"{FAKE}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}")
    return lambda **args: environment(tmp_path, **args)


def play(env, task, policy):
    async def main():
        try:
            return await env.rollout(task, policy)
        finally:
            await env.close()

    return asyncio.run(main())


def test_an_environment_with_a_tool_runs_unchanged_and_its_tokens_are_recorded(make):
    env, tokenizer = make()
    task = next(task for task in env.tasks(0, "train") if task.task_id == "train 4")
    policy = Says(tokenizer, CALL + "<|end|>", "w4<|end|>")
    rollout = play(env, json_again(task), policy)
    start = "look: <|start|>user\nword 4?<|end|>\n<|start|>assistant\n"
    assert policy.asked[0][0] == start
    assert policy.asked[1][0] == f"{start}{CALL}<|end|>\n<|start|>tool\nw4<|end|>\n<|start|>assistant\n"
    assert (rollout.segments, rollout.num_turns) == ([], 2)
    assert trained_text(tokenizer, rollout) == f"{CALL}<|end|>w4<|end|>"
    assert rollout.behavior_logprobs[rollout.loss_mask].tolist() == [-0.5] * rollout.num_trainable
    assert (rollout.reward, rollout.reward_parts) == (0.5, {"right": 1.0, "calls": 1.0, "reward": 0.5})


def json_again(task):
    """As it comes to another rank."""
    return type(task)(env=task.env, task_id=task.task_id, data=json.loads(json.dumps(task.data)))


def test_a_reply_of_nothing_is_scored_and_an_error_is_no_reward(make):
    env, tokenizer = make()
    task = next(env.tasks(0, "train"))
    assert play(env, task, Says(tokenizer, "<|end|>")).reward == 0.0
    for reply, message in (("!", "Mine -> broken"), ("?", "Error calling reward function right: oh")):
        with pytest.raises(RuntimeError, match=message):
            play(make()[0], task, Says(tokenizer, f"{reply}<|end|>"))


def test_an_episode_that_hangs_is_killed(make):
    env, tokenizer = make(settings={"hang": True}, timeout_s=1.0)
    with pytest.raises(TimedOut):
        play(env, next(env.tasks(0, "train")), Says(tokenizer))


def test_rows_are_shuffled_by_the_seed_and_held_out(make):
    env, _ = make(holdout=2, max_epochs=2)
    ids = [task.task_id for task in env.tasks(0, "train")]
    assert sorted(ids) == sorted([f"train {i}" for i in range(4)] * 2)
    assert ids == [task.task_id for task in env.tasks(0, "train")] != [task.task_id for task in env.tasks(1, "train")]
    assert [task.data["row"]["answer"] for task in env.tasks(0, "eval")] == ["w4", "w5"]


def test_an_evaluation_set_is_the_environments_own_or_made_by_other_settings(make):
    assert [t.task_id for t in make(settings={"own_eval": True})[0].tasks(0, "eval")] == ["eval 0"]
    assert len(list(make(eval_settings={"num": 3})[0].tasks(0, "eval"))) == 3
    with pytest.raises(ValueError, match=r"give eval_settings or holdout to evaluate, or set eval\.every = -1"):
        next(make()[0].tasks(0, "eval"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"name": "gone"}, "verifiers gone: ModuleNotFoundError: No module named 'gone'"),
        ({"settings": {"nam": 1}}, "unexpected keyword argument 'nam'"),
        ({"settings": {"by_group": True}}, "it scores the rollouts of a group together"),
        ({"settings": {"leave": 0}}, "verifiers fake_words: SystemExit: 0"),
        ({"settings": {"killed": True}}, "verifiers fake_words: the process that lists the rows ended with code -9"),
        ({"holdout": -1}, "holdout = -1 and max_epochs = 0 must be at least 0"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said(make, args, message):
    with pytest.raises(ValueError, match=message):
        next(make(**args)[0].tasks(0, "train"))


NOT_READY = """
from types import SimpleNamespace

class NotReady:
    async def __aenter__(self):
        raise OSError("not ready")

def resolve_env_config(config):
    return config

def load_environment(config):
    return SimpleNamespace(serving=NotReady)
"""


def test_what_an_environment_needs_is_started_again_after_it_has_failed(tmp_path, monkeypatch):
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").touch()
    (tmp_path / "verifiers" / "v1.py").write_text(NOT_READY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}")

    async def main():
        workers = Workers(num=1, timeout_s=60.0)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="OSError: not ready"):
                await workers.call(verifiers_child.play, "any", "{}", {}, "http://127.0.0.1:9/v1")
        await workers.close()

    asyncio.run(main())


CLASSIC = """
import verifiers as vf
from datasets import Dataset

def said(completion):
    return float(int(completion[-1]["content"]) == 4)

def look(number: int) -> str:
    '''Look it up.'''
    return str(number)

def load_environment(num):
    rows = Dataset.from_list([{"question": "2+2=", "answer": "4"}] * num)
    return vf.ToolEnv(tools=[look], dataset=rows, rubric=vf.Rubric(funcs=[said], weights=[0.5]), max_turns=3)
"""
TASKSET = """
import verifiers.v1 as vf
__all__ = ["Sums"]

class Sum(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.5)
    async def said(self, trace: vf.Trace) -> float:
        return float(int(trace.branches[0].messages[-1].content) == 4)

class Config(vf.TasksetConfig):
    num: int = 0

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        return [Sum(vf.TaskData(prompt="2+2="), self.config.task) for _ in range(self.config.num)]
"""


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")
def test_the_package_itself_plays_with_the_policy(tmp_path, monkeypatch):
    classic = hasattr(pytest.importorskip("verifiers"), "load_environment")
    (tmp_path / "two_and_two.py").write_text(CLASSIC if classic else TASKSET)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}")
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    settings = {"num": 3} if classic else {"taskset": {"num": 3}, "agent": agent}
    env, tokenizer = environment(tmp_path, name="two-and-two", settings=settings, holdout=1, timeout_s=300.0)
    assert len(list(islice(env.tasks(0, "eval"), 9))) == 1
    turns = [CALL + "<|end|>", "4<|end|>"] if classic else ["4<|end|>"]
    rollout = play(env, json_again(next(env.tasks(0, "train"))), Says(tokenizer, *turns))
    assert (rollout.reward, rollout.reward_parts["said"], rollout.segments) == (0.5, 1.0, [])
    assert trained_text(tokenizer, rollout) == "".join(turns)
    other, _ = environment(tmp_path, name="two-and-two", settings=settings, timeout_s=300.0)
    with pytest.raises(RuntimeError, match="invalid literal for int"):
        play(other, next(other.tasks(0, "train")), Says(tokenizer, "four<|end|>"))


ENDLESS = """
import verifiers.v1 as vf
__all__ = ["Sums"]

class Sums(vf.Taskset[vf.Task, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        i = 0
        while True:
            yield vf.Task(vf.TaskData(prompt=f"{i % 50}+1="), self.config.task)
            i += 1
"""


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers 0.3 or later is not installed")
def test_tasks_without_end_are_held_out_by_what_they_ask(tmp_path, monkeypatch):
    if hasattr(pytest.importorskip("verifiers"), "load_environment"):
        pytest.skip("a verifiers before 0.3")
    (tmp_path / "endless_sums.py").write_text(ENDLESS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parents[2]}")
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env, _ = environment(tmp_path, name="endless-sums", settings={"agent": agent})
    train, evaluated = (
        {task.data["row"]["prompt"] for task in islice(env.tasks(0, split), num)}
        for split, num in (("train", 120), ("eval", 30))
    )
    assert len(train) > 30 and len(evaluated) > 3 and not train & evaluated
