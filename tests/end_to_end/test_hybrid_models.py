"""Models with layers that carry state from token to token learn: the whole loop, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, PretrainedConfig, Qwen3_5TextConfig

from spmd_rl.demo.tiny_model import write_model, write_tokenizer
from tests.end_to_end.jobs import run
from tests.end_to_end.shape import SMALL

SHAPE = SMALL | dict(intermediate_size=128, tie_word_embeddings=True, dtype="float32")
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3_5": Qwen3_5TextConfig(
        **SHAPE,
        head_dim=16,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"], block_multiple_of=32),
}
STEPS = 24


@pytest.mark.parametrize("family", FAMILIES)
def test_it_learns_fraction_and_engine_and_trainer_agree(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, folder = AutoModelForCausalLM.from_config(FAMILIES[family]), tmp_path / "model"
    folder.mkdir()
    model.config.architectures = [type(model).__name__]
    write_tokenizer(folder)
    write_model(folder, model)
    job = run(
        "tiny_cpu.toml",
        tmp_path / "run",
        f"model.path={folder}",
        "model.make=",
        f"run.steps={STEPS}",
        "rollout.batch_size=24",
        "staleness.max_concurrent=72",
        "inference.max_slots=72",
        "trainer.learning_rate=5e-3",
    )
    assert job.code == 0, job.output
    assert (job.summary["status"], job.summary["steps"]) == ("done", STEPS)
    assert job.summary["reward_first"] < 0.2 < 0.6 < job.summary["reward_last"]
    assert job.probe_difference < 1e-5
    sampled = [probe["probe/sampled_max"] for probe in job.metrics("probe") if "probe/sampled_max" in probe]
    assert sampled and max(sampled) < 1e-4  # what engines sampled, as trainers score it
    first = job.metrics("step")[0]  # every token of it was sampled by the version that is trained
    assert first["trainer/mismatch_kl"] < 1e-9
    assert first["trainer/num_microbatches"] == 24  # one sequence a forward
