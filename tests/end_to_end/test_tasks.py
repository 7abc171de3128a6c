"""Tasks in real jobs: data that ends, prompts that do not fit, rewards that hang, turns, evaluations by one version."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spmd_rl.packing import packing
from spmd_rl.storage import batch_log
from spmd_rl.types import Rollout
from tests import forks
from tests.end_to_end.jobs import ROOT, Job, environment, run
from tests.recomputed import differences

CONFIG = """
[run]
steps = {steps}
[model]
path = "models/tiny"
make = "spmd_rl.demo.tiny_model:make"
{envs}
[rollout]
batch_size = 16
group_size = 4
max_tokens = 8
[staleness]
max_staleness = 2
max_concurrent = 48
[inference]
max_slots = 48
max_seq_len = 40
[trainer]
learning_rate = 1e-3
filter_zero_spread = false
max_empty_batches = 20
[eval]
every = -1
"""
QUESTIONS = """
[env.sums]
path = "spmd_rl.envs.questions:Questions"
args = {{ path = "{path}", max_epochs = 1 }}
"""


def job(folder: Path, envs: str, *settings: str, steps: int = 50, num_ranks: int = 2) -> Job:
    config = folder / "job.toml"
    config.write_text(CONFIG.format(envs=envs, steps=steps))
    return run(str(config), folder / "run", *settings, num_ranks=num_ranks)


def questions(folder: Path, *texts: str) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": text, "answer": "#### 7"}) + "\n" for text in texts))
    return QUESTIONS.format(path=path)


def trained_rollouts(done: Job) -> list[Rollout]:
    indices = range(done.summary["version"])
    return [r for i in indices for r in packing.unpack(batch_log.read(done.folder / "batches", i))]


def test_a_run_ends_well_with_its_data(tmp_path):
    done = job(tmp_path, questions(tmp_path, *(f"{i}+1=" for i in range(10))))
    assert done.code == 0, done.output
    assert "the tasks have ended: 2 full batches, 2 groups left over" in done.output
    summary = done.summary
    assert (summary["status"], summary["steps"], summary["version"]) == ("done", 2, 2)
    rollouts = summary["ledger"]["rollouts"]
    assert (rollouts["trained"], rollouts["left_over"], summary["ledger"]["admitted"]) == (32, 8, 40)
    assert (done.folder / "model" / "model.safetensors").exists()
    assert len({r.task_id for r in trained_rollouts(done)}) == 8  # each row once


def test_prompts_that_do_not_fit_are_skipped_and_counted(tmp_path):
    envs = questions(tmp_path, *(f"{i}+1=" for i in range(4)), "7" * 50)
    done = job(tmp_path, envs, steps=1)
    assert done.code == 0, done.output
    assert (done.summary["failures"], done.summary["ledger"]["rollouts"]["skipped"]) == ({}, 4)
    assert "sums, task 4: PromptTooLong: 51 tokens leave no room for a reply in 40: skipped" in done.output


@pytest.mark.full
def test_prompts_that_do_not_fit_end_the_run_by_option(tmp_path):
    envs = questions(tmp_path, *(f"{i}+1=" for i in range(4)), "7" * 50)
    done = job(tmp_path, envs, "rollout.long_prompts=refuse", steps=9)
    assert done.code == 1
    assert "PromptTooLong: 51 tokens leave no room for a reply in 40; rollout.long_prompts = 'refuse'" in done.output


def test_data_that_are_missing_are_refused_before_anything_is_built(tmp_path):
    refused = job(tmp_path, QUESTIONS.format(path=tmp_path / "gone.jsonl"))
    assert refused.code != 0 and not (refused.folder / "metrics.jsonl").exists()
    assert f"error: data {tmp_path}/gone.jsonl: no such file" in refused.output
    assert "exitcode  : 2" in refused.output


@pytest.fixture(scope="module")
def misbehaving(tmp_path_factory: pytest.TempPathFactory) -> Job:
    envs = """
[env.hangs]
path = "tests.end_to_end.environments:HangsOnce"
[env.forgets]
path = "tests.end_to_end.environments:Forgets"
"""
    pinned = ("eval.every=2", "eval.pin=true", "eval.num_tasks=8", "checkpoint.every=2")
    return job(tmp_path_factory.mktemp("misbehaving"), envs, *pinned, steps=6)


def test_a_reward_that_hangs_is_counted_and_the_run_goes_on(misbehaving):
    assert misbehaving.code == 0, misbehaving.output
    assert misbehaving.summary["failures"] == {"TimedOut": 1}
    rollouts = [r for r in trained_rollouts(misbehaving) if r.env == "hangs" and not r.failed]
    assert rollouts and all(r.reward > 0 for r in rollouts if r.num_trainable > 1)


def test_turns_in_segments_are_trained(misbehaving):
    rollouts = [r for r in trained_rollouts(misbehaving) if r.env == "forgets"]
    assert rollouts and all(len(r.segments) == 1 and r.num_turns == 2 for r in rollouts)
    steps = [step for step in misbehaving.metrics("step") if step["trainer/mismatch_tokens"]]
    assert steps and max(step["trainer/mismatch_kl"] for step in steps) < 1e-6
    assert misbehaving.probe_difference <= 1e-5


def test_numbers_of_several_environments_are_what_batches_and_evaluations_say(misbehaving):
    assert differences(misbehaving.folder) == []


def test_a_pinned_evaluation_is_of_one_version(misbehaving):
    records = misbehaving.metrics("eval")
    first, second, third, last = (record["version"] for record in records)
    assert (first, second, last) == (0, 2, 6) and third in (4, 5)  # it waits for the second, if that still runs
    for record in records:
        assert record["eval/forgets/oldest_version"] == record["eval/forgets/newest_version"] == record["version"]
    assert ["eval/pin_stall_s" in record for record in records] == [True] * 4


def command(*arguments: object) -> subprocess.CompletedProcess:
    words, pipe = ["spmd_rl", *map(str, arguments)], subprocess.PIPE
    with forks.Popen(words, cwd=ROOT, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
        output, errors = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


@pytest.mark.full
def test_a_checkpoint_is_exported_as_the_folder_that_the_run_itself_wrote(misbehaving, tmp_path):
    run_dir = misbehaving.folder
    done = command("export", run_dir, "--step", 6, tmp_path / "six", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "six", run_dir / "model"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert command("export", run_dir, "--step", 4, tmp_path / "four").returncode == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "four")
    assert model.dtype == torch.bfloat16 and not torch.equal(
        model.lm_head.weight.float(), ours["model.embed_tokens.weight"]
    )
    for arguments, message in (
        ((run_dir, "--step", 3, tmp_path / "x"), "no complete checkpoint of version 3"),
        ((run_dir, tmp_path / "six"), "exists already"),
        ((tmp_path, tmp_path / "x"), "is no run directory"),
    ):
        failed = command("export", *arguments)
        assert failed.returncode == 2 and message in failed.stderr


@pytest.mark.full
def test_an_evaluation_alone_gives_the_numbers_of_the_run(misbehaving, tmp_path):
    config, out = misbehaving.folder.parent / "job.toml", tmp_path / "eval.json"
    settings = ("eval.num_tasks=8", "--model", misbehaving.folder / "model", "--out", out)
    done = command("eval", config, *settings)
    assert done.returncode == 0, done.stderr
    alone, own = json.loads(out.read_text()), misbehaving.metrics("eval")[-1]
    assert done.stdout.startswith("forgets: reward ") or "\nforgets: reward " in done.stdout
    for name in ("reward", "length", "avg@1", "pass@1", "truncated"):
        assert alone[f"eval/forgets/{name}"] == pytest.approx(own[f"eval/forgets/{name}"])
    assert alone["eval/hangs/failed"] == 1 / 8  # its first reward hangs here too
    assert len(alone["rollouts"]) == 16
    assert command("eval", config, "--model", tmp_path / "none").returncode == 2


@pytest.mark.full
def test_samples_of_a_prompt_differ_and_the_same_run_gives_the_same_text(tmp_path):
    texts = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        envs = '[env.fraction]\npath = "spmd_rl.envs.fraction:Fraction"\n'
        settings = ("topology.inference=2", "rollout.group_size=8", "inference.deterministic=true")
        done = job(tmp_path / name, envs, *settings, steps=1, num_ranks=3)
        assert done.code == 0, done.output
        texts.append([r.token_ids.tolist() for r in trained_rollouts(done)])
        for group in np.split(np.arange(16), 2):
            assert len({tuple(texts[-1][i]) for i in group}) == 8
    assert texts[0] == texts[1]
