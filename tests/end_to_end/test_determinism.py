"""A run repeated on the same machine, with latencies and orders of hashes that are different each time."""

import subprocess

import numpy as np
import pytest

from spmd_rl.storage import batch_log
from tests.end_to_end.jobs import Job, run

STEPS = 8
FIXED = "staleness.on_update=drain"
TIMES = {"generation_s"}  # of a rollout
JITTERED = [
    *("env.fraction.path=tests.end_to_end.jittered:Jittered", "topology.inference=2", "eval.every=-1"),
    *(f"run.steps={STEPS}", "rollout.batch_size=16", "staleness.max_concurrent=48", "inference.deterministic=true"),
]


def trained(job: Job) -> list[dict[str, np.ndarray]]:
    """Everything of every batch but its times: tokens, versions, log-probs, rewards, advantages, tickets, …"""
    assert job.code == 0, job.output
    batches = [batch_log.read(job.folder / "batches", index).arrays() for index in range(STEPS)]
    return [{name: array for name, array in batch.items() if name not in TIMES} for batch in batches]


def losses(job: Job) -> list[tuple[float, float]]:
    return [(step["trainer/loss"], step["trainer/grad_norm"]) for step in job.metrics("step")]


def test_an_asynchronous_run_is_repeated_to_the_bit(tmp_path):
    settings = (*JITTERED, FIXED)
    first, second = (
        run("tiny_cpu.toml", tmp_path / name, *settings, num_ranks=3, start=subprocess.Popen) for name in "ab"
    )
    assert losses(first) == losses(second) and len(losses(first)) == STEPS
    for index, (one, two) in enumerate(zip(trained(first), trained(second), strict=True)):
        assert one.keys() == two.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], two[name], err_msg=f"{name} of batch {index}")
        sampled = one["versions"][one["loss_mask"]]
        assert set(sampled) == {max(0, index - 2)}  # S = 2: asynchronous all the same
    models = [(job.folder / "model/model.safetensors").read_bytes() for job in (first, second)]
    assert models[0] == models[1]


@pytest.mark.full
def test_without_fixed_updates_the_latencies_show(tmp_path):
    job = run("tiny_cpu.toml", tmp_path / "run", *JITTERED, num_ranks=3)
    versions = [set(batch["versions"][batch["loss_mask"]].tolist()) for batch in trained(job)]
    assert versions != [{max(0, index - 2)} for index in range(STEPS)]
    assert "the run as a whole is not" in job.output
