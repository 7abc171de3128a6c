"""Whole runs on vLLM under torchrun: engines of one rank and of two, every token against the version that it bears."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.demo.tiny_model import make
from spmd_rl.storage import checkpoint
from tests import qwen3
from tests.end_to_end.jobs import CONFIGS, run
from tests.end_to_end.live_jobs import LiveJob, assert_whole, summary
from tests.vllm.loop import CAPTURED, ENVIRONMENT, ROOT, STEPS, compared, torchrun


@pytest.mark.parametrize(("name", "overrides"), [("engines", []), ("tensor parallel", ["inference.tensor_parallel=2"])])
def test_every_token_of_a_run_was_sampled_by_the_version_that_it_bears(tmp_path, name, overrides):
    errors, others, seen = compared(tmp_path, *overrides)
    assert len(errors) > 300 and len(seen) >= 2
    assert max(errors) <= 1e-4
    assert not list(Path("/dev/shm").glob("spmd_rl-*"))  # of this run or of one that was killed
    assert len(others) == STEPS * len(seen)
    assert min(np.mean(differences) for differences in others.values()) > 0.01


def test_an_engine_that_fails_ends_the_run_by_name(tmp_path):
    run = torchrun("tests.vllm.broken_engine", tmp_path, "inference.tensor_parallel=2")
    assert run.returncode != 0
    assert "run failed: rank 0 (inference) failed: Traceback" in run.stderr, run.stderr
    assert "RuntimeError: the device is on fire" in run.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "failed" and "on fire" in summary["error"]


def test_a_run_goes_from_one_engine_to_the_other_and_a_signal_stops_an_engine_of_two_ranks(tmp_path):
    settings = ("eval.every=-1", "rollout.max_tokens=24", "checkpoint.every=3", "trainer.learning_rate=3e-3")
    with LiveJob(tmp_path, *settings, "run.steps=2", start=subprocess.Popen) as job:
        assert job.wait() == 0, job.output
    two = ("inference.engine=vllm", "topology.inference=2", "inference.tensor_parallel=2", "weights.mode=disk")
    with LiveJob(tmp_path, *settings, *two, "run.steps=1000", ranks=3, start=subprocess.Popen) as job:
        assert "step_2" in job.wait_for("resuming from", limit_s=240)
        job.wait_for(r"step +4/", limit_s=240)
        job.send(signal.SIGTERM)  # to torchrun, which passes it on to the engine's second rank too
        job.wait(limit_s=60)
        assert "run failed" not in job.output and "ending at once" not in job.output
    assert not list(Path("/dev/shm").glob("spmd_rl-*"))
    version, folder = checkpoint.newest(tmp_path / "checkpoints")
    checkpoint.verify(folder)
    assert summary(tmp_path)["status"] == "stopped" and summary(tmp_path)["version"] == version >= 4
    with LiveJob(tmp_path, *settings, f"run.steps={version + 2}", start=subprocess.Popen) as job:
        assert job.wait() == 0, job.output
    assert_whole(tmp_path, num_steps=version + 2)


def test_an_evaluation_by_itself_uses_the_engine_of_the_config(tmp_path):
    make(tmp_path / "model")
    texts = []
    for engine in ("native", "vllm"):
        out = tmp_path / f"{engine}.json"
        command = [sys.executable, "-m", "spmd_rl", "eval", "configs/tiny_cpu.toml", "--out", str(out)]
        settings = (f"model.path={tmp_path}/model", f"inference.engine={engine}", "eval.num_tasks=4")
        cut = ("eval.temperature=0.7", "eval.top_k=1", "eval.top_p=0.5")  # what vLLM may not do in training
        done = subprocess.run([*command, *settings, *cut], cwd=ROOT, env=ENVIRONMENT, check=False, **CAPTURED)
        assert done.returncode == 0, done.stdout + done.stderr
        texts.append(json.loads(out.read_text())["rollouts"])
    assert texts[0] == texts[1] and len(texts[0]) == 4


def test_a_config_for_qwen3_trains_with_the_engine_that_it_names(tmp_path):
    model, data = qwen3.write(tmp_path / "model"), qwen3.data(CONFIGS / "qwen3_1gpu.toml", tmp_path)
    job = run("qwen3_1gpu.toml", tmp_path / "run", f"model.path={model}", *qwen3.SMALLER, *data, start=subprocess.Popen)
    assert job.code == 0, job.output
    assert (job.summary["status"], job.summary["version"]) == ("done", 2)
    assert 'engine = "vllm"' in job.output and job.probe_difference <= 1e-5
