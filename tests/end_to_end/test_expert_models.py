"""Models of experts in whole runs: they learn, and what they leave behind has the names that they came with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, PretrainedConfig, Qwen3MoeConfig

from spmd_rl import cli
from spmd_rl.demo.tiny_model import write_tokenizer
from tests.end_to_end.jobs import Job, run
from tests.end_to_end.shape import SMALL

SHAPE = SMALL | dict(intermediate_size=64, num_experts_per_tok=2, tie_word_embeddings=True, dtype="float32")
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, head_dim=16, num_experts=8, moe_intermediate_size=32),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=4),
}
SETTINGS = [
    "model.make=",
    "rollout.batch_size=24",
    "staleness.max_concurrent=72",
    "inference.max_slots=72",
    "trainer.learning_rate=5e-3",
    "eval.every=-1",
]


def write(family: str, folder: Path) -> Path:
    """Experts one by one, as published folders have them."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def learned(job: Job, steps: int) -> None:
    assert job.code == 0, job.output
    assert (job.summary["status"], job.summary["steps"]) == ("done", steps)
    assert job.summary["reward_first"] < 0.2 < 0.6 < job.summary["reward_last"]
    assert job.probe_difference < 1e-5
    first, *_, last = job.metrics("step")
    assert first["trainer/mismatch_kl"] < 1e-9  # every token of it was sampled by the version that is trained
    assert all(step["weights/verified_engines"] == 1 for step in (first, last))
    assert 1 <= first["trainer/expert_load_max"] <= 8 / 2 and 0 <= first["trainer/expert_dead_share"] < 1


@pytest.mark.full
def test_it_learns_fraction_and_exports_experts_one_by_one(tmp_path: Path) -> None:
    folder = write("qwen3_moe", tmp_path / "model")
    settings = [f"model.path={folder}", "run.steps=24", "checkpoint.every=24", "trainer.router_aux_coef=0.01"]
    job = run("tiny_cpu.toml", tmp_path / "run", *SETTINGS, *settings)
    learned(job, 24)
    assert all(step["trainer/router_loss"] >= 1.9 for step in job.metrics("step"))  # 2 where tokens are spread evenly
    source, made = (load_file(path / "model.safetensors") for path in (folder, job.folder / "model"))
    assert "model.layers.1.mlp.experts.7.up_proj.weight" in source
    assert {n: t.shape for n, t in made.items()} == {n: t.shape for n, t in source.items()}
    assert cli.main(["export", str(job.folder), "--dtype", "float32", str(tmp_path / "exported")]) == 0
    again = load_file(tmp_path / "exported" / "model.safetensors")
    assert made.keys() == again.keys() and all(torch.equal(made[name], again[name]) for name in made)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "num_trainers", "settings"),
    [
        ("mixtral", 1, ["weights.mode=disk"]),
        ("olmoe", 2, ["weights.mode=delta", "trainer.activation_checkpointing=true"]),
        ("qwen3_moe", 2, ["trainer.advantage=gae"]),
        ("mixtral", 2, ["lora.rank=8", "lora.sync=adapter", "rollout.temperature=0.2"]),
    ],
)
def test_every_way_of_weights_and_gradients_learns(
    family: str, num_trainers: int, settings: list[str], tmp_path: Path
) -> None:
    folder = write(family, tmp_path / "model")
    settings = [f"model.path={folder}", f"topology.trainer={num_trainers}", "checkpoint.every=16", *settings]
    for steps in (16, 32):  # the second goes on
        every = [*SETTINGS, *settings, f"run.steps={steps}"]
        job = run("tiny_cpu.toml", tmp_path / "run", *every, num_ranks=1 + num_trainers)
        assert job.code == 0, job.output
    learned(job, 32)
    made = [job.folder / "model", *(job.folder / "weights").glob("step_*")]
    assert len(made) >= 1 + 2 * ("weights.mode=disk" in settings)
    for one in made:
        assert load_file(one / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
