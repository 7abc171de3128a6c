"""A run on vLLM, and every token of it under the trainer's models: for the tests of vLLM here and on GPUs."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM

from spmd_rl.demo.tiny_model import make
from spmd_rl.packing import packing
from spmd_rl.storage import batch_log
from spmd_rl.types import Rollout

ROOT = Path(__file__).parents[2]
STEPS = 4
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
CAPTURED = {"capture_output": True, "text": True, "timeout": 240}
SETTINGS = [
    *("run.steps=4", "run.metrics_interval_s=0.5", "inference.engine=vllm", "topology.inference=2", "eval.every=-1"),
    *("rollout.batch_size=16", "rollout.max_tokens=24", "staleness.max_concurrent=48", "inference.max_slots=12"),
    *("checkpoint.every=1", "checkpoint.keep_last=99", "trainer.learning_rate=3e-3"),
]


def torchrun(
    module: str, folder: Path, *overrides: str, model: Callable[[Path], object] = make
) -> subprocess.CompletedProcess[str]:
    """`model` writes the folder that is trained."""
    model(folder / "model")
    settings = [f"model.path={folder}/model", f"run.dir={folder}/run", *SETTINGS, *overrides]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m"]
    return subprocess.run(
        [*launch, module, "configs/tiny_cpu.toml", *settings],
        cwd=ROOT,
        env=ENVIRONMENT,
        check=False,
        **CAPTURED,
    )


def model_of(folder: Path, version: int) -> torch.nn.Module:
    """The trainer's weights at a version, from its checkpoint, in a plain transformers model."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    if version:
        state = {"model": dict(model.named_parameters())}
        dcp.load(state, checkpoint_id=folder / f"run/checkpoints/step_{version}/trainer", no_dist=True)
    return model


def logprobs_of(model: torch.nn.Module, rollout: Rollout) -> np.ndarray:
    """[T] of each token given those before it; the first has none."""
    ids = torch.from_numpy(rollout.token_ids).long()
    with torch.no_grad():
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return np.concatenate([[0.0], logprobs.gather(1, ids[1:, None])[:, 0].numpy()])


def compared(tmp_path: Path, *overrides: str) -> tuple[list[float], dict[tuple[int, int], list[float]], set[int]]:
    """|difference| of each sampled token's log-prob to the version it bears; to each other, by both; versions seen."""
    run = torchrun("spmd_rl", tmp_path, *overrides)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "done" and summary["version"] == STEPS
    models = [model_of(tmp_path, version) for version in range(STEPS + 1)]
    errors, others, seen = [], defaultdict(list), set()
    for index in range(STEPS):
        for rollout in packing.unpack(batch_log.read(tmp_path / "run/batches", index)):
            mask = rollout.loss_mask
            by_version = np.stack([logprobs_of(model, rollout)[mask] for model in models])
            versions, columns = rollout.versions[mask], np.arange(mask.sum())
            difference = np.abs(by_version - rollout.behavior_logprobs[mask])  # [versions, tokens]
            errors += difference[versions, columns].tolist()
            for version in set(versions.tolist()):
                for other in {*range(STEPS + 1)} - {version}:
                    others[version, other] += difference[other, versions == version].tolist()
            seen |= set(versions.tolist())
    return errors, others, seen
