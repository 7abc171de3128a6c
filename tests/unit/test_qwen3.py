"""Qwen3's conventions and the configs for its models, as far as they can be tried without its weights."""

import asyncio
from pathlib import Path

import pytest
import torch

from spmd_rl import cli, config, envs
from spmd_rl.envs.chat import Chat
from spmd_rl.envs.environment import checked_tasks
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.ranks.build_engine import memory_warnings
from spmd_rl.types import Task
from tests import qwen3
from tests.says import Says, trained_text

SLOTS = ["inference.max_slots=64", "inference.max_seq_len=2048"]
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("qwen3_*.toml"))
THOUGHT = "<think>\nhm\n</think>\n\n"
OFF = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3.write(tmp_path_factory.mktemp("qwen3"))


def converse(tokenizer, replies, *others):
    """A question, then after each reply but the last what the others say: (role, text) each, several at once."""
    policy = Says(tokenizer, *(f"{reply}<|im_end|>" for reply in replies))
    start = [{"role": "user", "content": "go"}]
    chat = Chat(tokenizer=tokenizer, task=Task(env="", task_id="t"), generate=policy, messages=start)

    async def play():
        await chat.reply()
        for messages in others:
            for role, content in messages:
                chat.add(role, content)
            await chat.reply()

    asyncio.run(play())
    return chat.rollout, policy


def test_a_reply_may_stop_at_either_of_its_ends(folder):
    tokenizer = Tokenizer(folder)
    assert {tokenizer.decode([i], special=True) for i in tokenizer.stop_ids} == {"<|im_end|>", "<|endoftext|>"}
    assert tokenizer.eos_id != tokenizer.pad_id


def test_thinking_is_switched_off_for_all_conversations(folder):
    ask = [{"role": "user", "content": "go"}]
    on, off = Tokenizer(folder), Tokenizer(folder, {"enable_thinking": False})
    assert off.render_text(ask) == on.render_text(ask) + OFF
    rollout, policy = converse(off, ["a", "b"], [("user", "on")])
    assert policy.asked[0][0].endswith("assistant\n" + OFF) and trained_text(off, rollout) == "a<|im_end|>b<|im_end|>"
    assert len(rollout.segments) == 1  # the template leaves the empty thought out of the past


def test_a_thought_before_the_last_question_is_forgotten_in_a_new_segment(folder):
    tokenizer = Tokenizer(folder)
    rollout, policy = converse(tokenizer, [THOUGHT + "7", THOUGHT + "8"], [("user", "no")])
    assert len(rollout.segments) == 1 and "hm" not in policy.asked[1][0]
    assert trained_text(tokenizer, rollout) == f"{THOUGHT}7<|im_end|>{THOUGHT}8<|im_end|>"


def test_a_thought_before_a_tool_call_stays_and_two_tool_replies_are_one_turn(folder):
    tokenizer = Tokenizer(folder)
    call = THOUGHT + '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    rollout, policy = converse(tokenizer, [call, "7"], [("tool", "a"), ("tool", "b")])
    assert rollout.segments == []
    replies = "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
    assert policy.asked[1][0].endswith(f"{call}<|im_end|>\n{replies}<|im_start|>assistant\n")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_config_is_one_and_its_task_reads_its_columns(folder, path, tmp_path, capsys):
    rows = qwen3.data(path, tmp_path)
    assert cli.main(["check", str(path), *rows, f"model.path={folder}"]) == 0
    said = capsys.readouterr().out
    assert "age bound: age ≤ " in said and "disk: " in said
    loaded = config.load(path, [*rows, f"model.path={folder}"])
    ((name, env),) = loaded.env.items()
    tokenizer = Tokenizer(folder, loaded.model.template)
    made = envs.load(env.path, tokenizer=tokenizer, args=env.args)
    checked_tasks(name, made, seed=0, split="eval")
    task, policy = next(checked_tasks(name, made, seed=0, split="train")), Says(tokenizer, "7<|im_end|>")
    if env.args.get("judge") != "math":
        assert asyncio.run(made.rollout(task, policy)).reward_parts["answer"] == 1.0
    assert (OFF in tokenizer.render_text(made.prompt(task.data))) == (path.stem == "qwen3_1gpu")


@pytest.mark.parametrize(
    ("settings", "num_bytes", "warns"),
    [
        ([], 67_108_863, True),  # 64 rows of 2,048 tokens, 512 bytes each
        ([], 67_108_864, False),
        (["inference.max_seq_len=2049"], 134_217_727, True),  # rows are powers of two
        (["inference.kv_cache_mib=32"], 67_108_863, False),
        (["inference.kv_cache_mib=65"], 67_108_863, True),
        (["inference.engine=vllm"], 1, False),  # takes all it may need when it starts
        ([], 0, False),  # no device of its own
    ],
)
def test_keys_and_values_that_outgrow_a_device_are_warned_of(folder, settings, num_bytes, warns):
    loaded = config.load(CONFIGS[0].parent / "tiny_cpu.toml", [f"model.path={folder}", *SLOTS, *settings])
    said = memory_warnings(loaded, torch.device("cuda", 0), num_bytes)
    assert len(said) == warns
    assert not said or "cuda:0 has" in said[0]
