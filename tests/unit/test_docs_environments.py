"""The examples of docs/environments.md, run as a user would have them."""

import asyncio
import importlib
import re
import sys
from pathlib import Path

import pytest

from spmd_rl import config, envs
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.types import Task
from tests.says import Says, trained_text, write_folder

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def my_envs(tmp_path, monkeypatch):
    """The file that the examples make together."""
    (tmp_path / "my_envs.py").write_text("\n\n".join(blocks("python")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    yield importlib.import_module("my_envs")
    del sys.modules["my_envs"]


def play(tmp_path, name, *replies):
    tokenizer = Tokenizer(write_folder(tmp_path))
    env = envs.load(f"my_envs:{name}", tokenizer=tokenizer, args={"words": ["cat"]})
    policy = Says(tokenizer, *(f"{reply}<|end|>" for reply in replies))

    async def main():
        rollout = await env.rollout(next(env.tasks(0, "train")), policy)
        if name == "Patient":
            await env.workers.close()
        return rollout

    return asyncio.run(main()), tokenizer


def test_the_config_of_the_example_is_one(tmp_path):
    (tmp_path / "my.toml").write_text(blocks("toml")[0])
    loaded = config.load(tmp_path / "my.toml")
    assert {name: env.weight for name, env in loaded.env.items()} == {"backwards": 2.0, "addition": 1.0}


def test_the_example_of_one_turn_is_about_ten_lines_and_works(my_envs, tmp_path):
    code = blocks("python")[0].split("class Backwards:")[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    assert play(tmp_path, "Backwards", "tac")[0].reward == 1.0
    assert play(tmp_path, "Backwards", "cat")[0].reward == 0.0
    assert isinstance(next(my_envs.Backwards(tokenizer=None, words=["cat"]).tasks(0, "eval")), Task)


def test_the_example_of_parts_leaves_out_what_does_not_apply(my_envs, tmp_path):
    assert play(tmp_path, "Shouted", "TAC")[0].reward == 1.0
    assert play(tmp_path, "Shouted", "tac")[0].reward == 0.7
    assert play(tmp_path, "Shouted", "CAT")[0].reward_parts == {"right": 0.0}


def test_the_example_of_a_slow_reward_runs_in_a_worker(my_envs, tmp_path):
    assert play(tmp_path, "Patient", "so: tac")[0].reward == 1.0


def test_the_example_of_two_turns_trains_only_what_was_sampled(my_envs, tmp_path):
    rollout, tokenizer = play(tmp_path, "Again", "cat", "tac")
    assert (rollout.reward, rollout.num_turns) == (0.5, 2)
    assert trained_text(tokenizer, rollout) == "cat<|end|>tac<|end|>"
    assert play(tmp_path, "Again", "tac")[0].num_turns == 1


def test_every_shipped_environment_can_be_imported():
    for path in re.findall(r"`(spmd_rl\.envs\.\w+:\w+)`", TEXT):
        assert path.partition(":")[2] in dir(importlib.import_module(path.partition(":")[0]))
