"""The whole loop, with real processes, on a model of 0.35M parameters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.packing import packing
from spmd_rl.storage import batch_log
from tests.end_to_end.jobs import ROOT, Job, run
from tests.recomputed import differences


def _assert_done(job: Job, steps: int) -> None:
    assert job.code == 0, job.output
    summary = job.summary
    assert (summary["status"], summary["steps"], summary["version"]) == ("done", steps, steps)
    ledger = summary["ledger"]
    assert ledger["admitted"] == sum(ledger["rollouts"].values())
    used = sum(ledger["tokens"].values())
    assert ledger["generated_tokens"] == used + ledger["wasted_tokens"] + ledger["waiting_tokens"]
    assert ledger["waiting_tokens"] == 0
    assert job.probe_difference <= 1e-5


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run("tiny_cpu.toml", tmp_path_factory.mktemp("async") / "run")


def test_it_learns_asynchronously_within_the_bound(asynchronous: Job) -> None:
    _assert_done(asynchronous, 80)
    summary = asynchronous.summary
    assert summary["reward_first"] < 0.2
    assert summary["reward_last"] > 0.7
    assert summary["age_max"] == summary["age_bound"] == 2
    assert summary["age_mean"] > 1
    steps = asynchronous.metrics("step")
    assert [step["version"] for step in steps] == list(range(1, 81))
    assert all(step["weights/verified_engines"] == 1 for step in steps)
    assert all(step["admission/per_step"] <= step["admission/bound"] for step in steps)


def test_everything_that_was_trained_is_on_disk(asynchronous: Job) -> None:
    tickets = []
    for index in range(80):
        packed = batch_log.read(asynchronous.folder / "batches", index)
        assert len(packed) == 64
        tickets += packed.ticket.tolist()
        sampled = packed.versions[packed.loss_mask]
        assert sampled.min() >= index - 2
        assert sampled.max() <= index
        words = json.loads((asynchronous.folder / "batches" / f"step_{index}.json").read_text())
        assert [rollout["ticket"] for rollout in words["rollouts"]] == packed.ticket.tolist()
    assert tickets == list(range(80 * 64))


def test_the_trained_model_loads_in_transformers_and_says_what_the_engine_said(asynchronous: Job) -> None:
    model = AutoModelForCausalLM.from_pretrained(asynchronous.folder / "model", dtype=torch.float32)
    tokenizer = Tokenizer(asynchronous.folder / "model")
    texts = json.loads((asynchronous.folder / "evals" / "eval_80.json").read_text())["rollouts"]
    for rollout in texts[:8]:
        prompt = torch.tensor(tokenizer.encode("<bos>" + rollout["text"][:2])[None].astype(np.int64))
        reply = model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
        assert tokenizer.decode(reply) == rollout["text"]


def test_its_numbers_are_what_batches_and_evaluations_say(asynchronous: Job) -> None:
    assert differences(asynchronous.folder) == []


def test_every_metric_is_documented(asynchronous: Job) -> None:
    documented = set(re.findall(r"`([a-z_@/0-9]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    for kind in ("step", "interval", "probe"):
        names = {re.sub(r"^(reward|eval|failures)/.*", r"\1/ENV/", name) for name in asynchronous.metrics(kind)[-1]}
        missing = {name for name in names if not name.endswith("/ENV/")} - documented
        assert not missing, f"docs/metrics.md does not tell {sorted(missing)} of kind {kind}"


def test_taken_in_turns_every_age_is_zero_and_two_runs_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    jobs = [
        run("tiny_cpu_sync.toml", tmp_path / name, "run.steps=8", "inference.deterministic=true") for name in ("a", "b")
    ]
    for job in jobs:
        _assert_done(job, 8)
        assert job.summary["age_max"] == 0
    one, other = ([(s["trainer/loss"], s["trainer/grad_norm"]) for s in job.metrics("step")] for job in jobs)
    assert one == other
    for index in range(8):
        first, second = (batch_log.read(job.folder / "batches", index) for job in jobs)
        for name in (*packing.PER_TOKEN, "ticket", "reward", "advantage"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    first, second = (load_file(job.folder / "model" / "model.safetensors") for job in jobs)
    assert all(np.array_equal(first[name], second[name]) for name in first)


@pytest.mark.full
def test_it_learns_taken_in_turns(tmp_path: Path) -> None:
    job = run("tiny_cpu_sync.toml", tmp_path / "run")
    _assert_done(job, 60)
    assert job.summary["reward_first"] < 0.2
    assert job.summary["reward_last"] > 0.8
    assert job.summary["age_max"] == 0


@pytest.mark.parametrize(("inference", "trainers"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_other_splits_of_the_ranks_run_too(tmp_path: Path, inference: int, trainers: int) -> None:
    split = (f"topology.inference={inference}", f"topology.trainer={trainers}")
    job = run("tiny_cpu.toml", tmp_path / "run", "run.steps=6", *split, num_ranks=3)
    _assert_done(job, 6)
    assert all(step["weights/verified_engines"] == inference for step in job.metrics("step"))


def test_a_world_of_the_wrong_size_is_refused_in_one_line(tmp_path: Path) -> None:
    job = run("tiny_cpu.toml", tmp_path / "run", "topology.trainer=2")
    assert job.code != 0
    said = [line for line in job.output.splitlines() if line.startswith("error: ")]
    assert said == [
        "error: WORLD_SIZE is 2, but topology asks for 1 inference + 2 trainer = 3 ranks: start 3 processes or change "
        "[topology]"
    ]
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_two_and_two_ranks_learn(tmp_path: Path) -> None:
    job = run("tiny_cpu.toml", tmp_path / "run", "topology.inference=2", "topology.trainer=2", num_ranks=4)
    _assert_done(job, 80)
    assert job.summary["reward_last"] > 0.7
    assert job.summary["age_max"] <= 2
    engines, ended = job.summary["engines"], job.summary["ledger"]["admitted"] + 2 * 10  # two evaluations of ten digits
    assert engines.keys() == {"rank0", "rank1"} and sum(e["rollouts"] for e in engines.values()) == ended
    assert all(engine["updates"] == 81 and engine["mean_pause_s"] > 0 for engine in engines.values())
    names = (
        "tokens_per_s",
        "idle",
        "recompute",
        "rollouts",
        "running",
        "waiting",
        "kv_waiting",
        "kv_used",
        "version",
        "pause_s",
    )
    last = job.metrics("step")[-1]
    assert {f"engine/rank{rank}/{name}" for rank in (0, 1) for name in names} <= last.keys()
    assert last["engine/rank1/version"] >= 78 and last["engine/rank1/pause_s"] > 0


@pytest.mark.full
def test_it_learns_from_sequences_during_which_weights_were_swapped(tmp_path: Path) -> None:
    few_slots = ("inference.max_slots=16", "rollout.max_tokens=24", "env.fraction.args.length=24")  # never idle
    job = run("tiny_cpu.toml", tmp_path / "run", "run.steps=60", *few_slots)
    _assert_done(job, 60)
    packed = [batch_log.read(job.folder / "batches", index) for index in range(60)]
    rollouts = [rollout for batch in packed for rollout in packing.unpack(batch)]
    swapped = [np.ptp(rollout.versions[rollout.loss_mask]) > 0 for rollout in rollouts]
    assert np.mean(swapped) > 0.05
    assert job.summary["reward_first"] < 0.2
    assert job.summary["reward_last"] > 0.7


@pytest.mark.full
def test_samples_are_not_mixed_up_with_prompts(tmp_path: Path) -> None:
    job = run("tiny_echo_cpu.toml", tmp_path / "run")
    _assert_done(job, 200)
    assert job.summary["reward_first"] < 0.1
    assert job.summary["reward_last"] > 0.6


@pytest.mark.full
def test_two_turns_with_a_tool_are_learned(tmp_path: Path) -> None:
    job = run("tiny_lookup_cpu.toml", tmp_path / "run")
    _assert_done(job, 80)
    assert 0.3 < job.summary["reward_first"] < 0.75
    assert job.summary["reward_last"] > 0.85
    packed = batch_log.read(job.folder / "batches", 79)
    assert packed.num_turns.max() == 2
    assert (packed.versions[~packed.loss_mask] == -1).all()


@pytest.mark.full
@pytest.mark.parametrize(
    ("setting", "most"), [("trainer.learning_rate=0.0", 0.2), ("trainer.advantage_scale=-1.0", 0.1)]
)
def test_what_must_not_learn_does_not(tmp_path: Path, setting: str, most: float) -> None:
    job = run("tiny_cpu.toml", tmp_path / "run", "run.steps=60", "trainer.max_empty_batches=100", setting)
    _assert_done(job, 60)
    assert job.summary["reward_last"] < most
