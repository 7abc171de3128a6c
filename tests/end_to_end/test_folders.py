"""Folders that hold more than parameters of a text model, through whole runs: router buffers and multimodal models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from spmd_rl.demo.tiny_model import write_tokenizer
from tests.end_to_end.jobs import Job, run
from tests.end_to_end.shape import SMALL

pytestmark = pytest.mark.full

SHAPE = SMALL | dict(intermediate_size=96, head_dim=16, initializer_range=0.1)
EXPERTS = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, n_group=2, topk_group=1)
VISION = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)


def trained(folder: Path, to: Path, *settings: str, num_ranks: int = 2) -> Job:
    job = run(
        "tiny_cpu.toml",
        to,
        f"model.path={folder}",
        "model.make=",
        "run.steps=3",
        "run.probe_every=1",
        "eval.every=-1",
        *settings,
        num_ranks=num_ranks,
    )
    assert job.code == 0, job.output
    return job


@pytest.mark.parametrize(
    ("settings", "num_ranks", "most"),
    [
        (["weights.mode=delta", "topology.trainer=2"], 3, 1e-3),
        (["weights.mode=delta", "weights.receive=in_place", "model.dtype=bfloat16"], 2, 0.1),
        (["weights.mode=disk", "model.dtype=bfloat16"], 2, 0.1),
        (["lora.rank=4", "lora.sync=adapter", 'lora.targets=["q_proj", "v_proj"]'], 2, 1e-3),
    ],
    ids=["delta", "in place", "disk", "adapter"],
)
def test_correction_biases_of_routers_reach_engines(
    settings: list[str], num_ranks: int, most: float, tmp_path: Path
) -> None:
    folder, name = tmp_path / "model", "model.layers.1.mlp.gate.e_score_correction_bias"
    folder.mkdir()
    write_tokenizer(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model("glm4_moe", **SHAPE, **EXPERTS, first_k_dense_replace=1, n_shared_experts=1)
    model = AutoModelForCausalLM.from_config(config)
    model.state_dict()[name].add_(torch.randn(8) * 0.3)
    model.save_pretrained(folder)
    job = trained(folder, tmp_path / "run", *settings, num_ranks=num_ranks)
    assert job.probe_difference < most
    before, after = (load_file(path / "model.safetensors") for path in (folder, job.folder / "model"))
    assert before.keys() == after.keys() and torch.equal(before[name], after[name])
    AutoModelForCausalLM.from_pretrained(job.folder / "model")


@pytest.mark.parametrize("settings", [["weights.mode=disk"], ["lora.rank=4"]], ids=["disk", "lora"])
def test_the_text_part_of_a_multimodal_folder_is_trained_and_the_whole_loads_again(
    settings: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_tokenizer(folder)
    torch.manual_seed(0)
    text = SHAPE | dict(sliding_window=64, query_pre_attn_scalar=16)
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=VISION, mm_tokens_per_image=4)
    model = AutoModelForImageTextToText.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    job = trained(folder, tmp_path / "run", *settings)
    assert job.probe_difference < 1e-3
    before, after = (load_file(path / "model.safetensors") for path in (folder, job.folder / "model"))
    rest = {name for name in before if "language_model" not in name}
    assert before.keys() == after.keys() and rest
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in rest)
    again = AutoModelForImageTextToText.from_pretrained(job.folder / "model")
    assert type(again) is type(model)
