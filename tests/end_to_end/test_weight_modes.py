"""The ways of new weights to the engines, in whole runs."""

import subprocess

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.end_to_end.jobs import Job, run

STEPS = 5
SHORT = [f"run.steps={STEPS}", "rollout.batch_size=16", "staleness.max_concurrent=48", "eval.every=-1"]


def done(job: Job) -> list[dict]:
    """The steps of a run in which engines and trainer always agreed."""
    assert job.code == 0, job.output
    assert job.summary["version"] == STEPS
    assert job.probe_difference <= 1e-5
    return job.metrics("step")


@pytest.mark.full
def test_two_trainers_send_deltas_where_little_changes(tmp_path):
    settings = ["weights.mode=delta", "weights.anchor_every=4", "model.dtype=bfloat16", "trainer.learning_rate=1e-6"]
    job = run("tiny_cpu.toml", tmp_path / "run", *SHORT, *settings, "topology.trainer=2", num_ranks=3)
    assert job.code == 0, job.output
    sent = [step["weights/sent_bytes"] for step in job.metrics("step")]
    whole = sent[3]  # version 4
    assert all(num < whole / 3 for version, num in enumerate(sent, 1) if version != 4)
    assert all(step["weights/update_norm"] > 0 for step in job.metrics("step"))


@pytest.mark.full
def test_engines_receive_in_place_while_they_pause(tmp_path):
    settings = ["weights.receive=in_place", "topology.trainer=2", "topology.inference=2", "staleness.max_staleness=2"]
    steps = done(run("tiny_cpu.toml", tmp_path / "run", *SHORT, *settings, num_ranks=4))
    assert all(step["weights/update_norm"] > 0 for step in steps)


@pytest.mark.full
def test_weights_by_disk_are_folders_that_others_can_read(tmp_path):
    job = run("tiny_cpu.toml", tmp_path / "run", *SHORT, "weights.mode=disk", "topology.trainer=2", num_ranks=3)
    assert all(step["weights/update_norm"] > 0 for step in done(job))
    folders = sorted((job.folder / "weights").iterdir())
    assert [folder.name for folder in folders] == [f"step_{STEPS - n}" for n in (2, 1, 0)]  # older ones are gone
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folders[-1], check=True)
    newest = load_file(folders[-1] / "model.safetensors")
    for name, parameter in AutoModelForCausalLM.from_pretrained(job.folder / "model").named_parameters():
        assert torch.equal(newest[name], parameter), name


@pytest.mark.full
def test_weights_by_disk_wait_for_engines_however_far_the_trainers_are_ahead(tmp_path):
    """A pinned evaluation holds the engines while the trainers go on up to S + 1 versions."""
    far = ["staleness.gate=ship", "staleness.max_staleness=4", "staleness.queue_size=96", "rollout.batch_size=16"]
    pin = ["eval.every=2", "eval.pin=true", "eval.num_tasks=96", "eval.max_concurrent=1"]
    job = run("tiny_cpu.toml", tmp_path / "run", "run.steps=12", *far, *pin, "weights.mode=disk")
    assert job.code == 0, job.output
    assert job.summary["version"] == 12


@pytest.mark.full
def test_additions_of_lora_travel_alone_and_leave_what_merged_weights_leave(tmp_path):
    """Of two trainers; the rows of each are merged at the engine as they are merged at the trainer."""
    lora = ["lora.rank=4", "staleness.max_staleness=0", "inference.deterministic=true", "topology.trainer=2"]
    merged, adapter = (
        done(run("tiny_cpu.toml", tmp_path / sync, *SHORT, *lora, f"lora.sync={sync}", num_ranks=3))
        for sync in ("merged", "adapter")
    )
    for name in ("trainer/loss", "trainer/grad_norm", "weights/update_norm", "reward"):
        assert [step[name] for step in adapter] == [step[name] for step in merged], name
    assert all(a["weights/sent_bytes"] < m["weights/sent_bytes"] / 10 for a, m in zip(adapter, merged, strict=True))


def test_a_step_that_changes_nothing_is_an_error(tmp_path):
    job = run("tiny_cpu.toml", tmp_path / "run", *SHORT, "trainer.learning_rate=1e-30")
    assert job.code != 0
    assert "frozen policy: the step to version 1 had gradient norm" in job.output


@pytest.mark.full
def test_a_learning_rate_of_zero_is_meant(tmp_path):
    steps = done(run("tiny_cpu.toml", tmp_path / "run", *SHORT, "trainer.learning_rate=0"))
    assert [step["weights/update_norm"] for step in steps] == [0.0] * STEPS
