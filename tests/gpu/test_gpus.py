"""On GPUs: what the other tests do on the CPU and over gloo, here on one device and over NCCL."""

import subprocess
from statistics import median

import numpy as np
import pytest
import torch

from spmd_rl.engine.native import NativeEngine
from spmd_rl.model.causal_lm import build
from spmd_rl.types import Sampling
from tests.end_to_end.jobs import run
from tests.multirank.test_weight_sync import sends_deltas, trains_and_decodes
from tests.ranks import run_worlds
from tests.unit.families import expected_logprobs, load, prompt_of, save
from tests.vllm.loop import compared

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()


def on(num: int, *values: object) -> object:
    """A case for machines with so many GPUs."""
    return pytest.param(*values, marks=pytest.mark.skipif(num > GPUS, reason=f"needs {num} GPUs, torch sees {GPUS}"))


@pytest.mark.parametrize("device", [on(1, "cuda:0")])
@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("family", ["smollm2", "qwen3", "gemma3"])
def test_the_native_engine_equals_a_plain_forward_of_the_version_that_it_names(tmp_path, family, functional, device):
    plain = [load(save(family, tmp_path / str(seed), seed)) for seed in (0, 1)]
    model = build(tmp_path / "0", device=device, dtype=torch.float32, weights=False)
    settings = dict(functional=functional, max_seq_len=256, prefill_budget=16)
    engine = NativeEngine(model=model, device=torch.device(device), **settings)
    for number in range(6):
        engine.submit(number, prompt_of(1 + 13 * number), Sampling(max_tokens=40, seed=number))
    done = {}
    for version, weights in enumerate(plain):
        engine.load_weights({name: p.detach().to(device) for name, p in weights.named_parameters()}, version)
        for number in range(6, 9):
            engine.submit(number + 10 * version, prompt_of(20), Sampling(max_tokens=15, seed=number))
        while engine.num_running or engine.num_waiting:
            done |= engine.step()
    assert len(done) == 12
    for number, completion in done.items():
        (version,) = set(completion.versions.tolist())
        prompt = prompt_of(1 + 13 * number if number < 6 else 20)
        theirs = expected_logprobs(plain[version], prompt, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, theirs, atol=1e-4)


@pytest.mark.parametrize("num_gpus", [on(1, 1)])
def test_a_run_on_one_gpu_learns(tmp_path, num_gpus):
    job = run("tiny_cpu.toml", tmp_path / "run", start=subprocess.Popen)
    assert job.code == 0, job.output
    assert job.summary["reward_first"] < 0.2 and job.summary["reward_last"] > 0.7
    assert job.summary["age_max"] <= job.summary["age_bound"]
    steps = job.metrics("step")[5:]
    for name in ("engine/tokens_per_s", "trainer/tokens_per_s", "trainer/step_s", "weights/pause_s", "trainer/hold_s"):
        print(f"{name}: {median(step[name] for step in steps):.4g}")  # pytest -rP shows them


@pytest.mark.parametrize(("side", "in_place"), [on(2, 1, False), on(2, 1, True), on(4, 2, False), on(4, 2, True)])
def test_engines_get_every_version_to_the_bit_over_nccl(side, in_place):
    run_worlds(trains_and_decodes, side, side, torch.bfloat16, 5, in_place, "nccl", gpus=True)


@pytest.mark.parametrize("side", [on(2, 1), on(4, 2)])
def test_deltas_leave_every_version_to_the_bit_over_nccl(side):
    run_worlds(sends_deltas, side, side, torch.bfloat16, False, "nccl", gpus=True)


@pytest.mark.parametrize(
    ("side", "backend"), [on(1, 1, "gloo through pinned host memory"), on(2, 1, "nccl"), on(4, 2, "nccl")]
)
def test_a_run_takes_nccl_where_every_rank_has_a_gpu(tmp_path, side, backend):
    if side == 1 and backend != "nccl" and GPUS > 1:
        pytest.skip("with one GPU only do two ranks share it")
    topology = [f"topology.inference={side}", f"topology.trainer={side}"]
    job = run(
        "tiny_cpu.toml",
        tmp_path / "run",
        *topology,
        "run.steps=4",
        "eval.every=-1",
        num_ranks=2 * side,
        start=subprocess.Popen,
    )
    assert job.code == 0, job.output
    assert f"weights {backend}" in job.output
    assert job.summary["version"] == 4 and job.summary["probe_kl_max"] < 1e-2  # bfloat16 on both sides


@pytest.mark.parametrize("side", [on(2, 1), on(4, 2)])
@pytest.mark.parametrize("mode", ["full", "disk"])
def test_a_run_with_shards_in_host_memory_sends_and_exports_them(tmp_path, side, mode):
    topology = [f"topology.inference={side}", f"topology.trainer={side}"]
    settings = ["trainer.cpu_offload=true", f"weights.mode={mode}", "run.steps=2", "eval.every=-1"]
    job = run("tiny_cpu.toml", tmp_path / "run", *topology, *settings, num_ranks=2 * side, start=subprocess.Popen)
    assert job.code == 0, job.output
    assert job.summary["version"] == 2 and (tmp_path / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("num_gpus", [on(2, 2)])
def test_an_engine_of_vllm_on_two_gpus_samples_from_the_version_that_it_names(tmp_path, num_gpus):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    errors, others, seen = compared(tmp_path, "inference.tensor_parallel=2")
    assert len(errors) > 300 and len(seen) >= 2
    assert np.mean(errors) < 0.1 * np.mean([x for differences in others.values() for x in differences])
