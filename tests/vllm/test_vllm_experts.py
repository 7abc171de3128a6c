"""Models of experts on vLLM: every version that is loaded into it, beside plain transformers; and its reading of an
export.

A reload leaves the packed copies that the CPU build multiplies by, and Mixtral's loader knows experts one by one alone.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from spmd_rl.demo.tiny_model import VOCAB, write_tokenizer
from spmd_rl.engine.vllm import VllmEngine
from spmd_rl.model.causal_lm import build
from spmd_rl.model.stored_names import original_names
from spmd_rl.trainer.hf_folder import export
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.types import Sampling
from spmd_rl.weights.layout import manifest, weights_of
from tests.vllm.loop import STEPS, torchrun

TOLERANCE = 1e-4
CPU = torch.device("cpu")
SHAPE = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # vLLM takes no 16 on CPUs
    num_experts_per_tok=2,
    max_position_embeddings=256,
    initializer_range=0.15,
    bos_token_id=None,
    eos_token_id=None,
)
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=32),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "glm4_moe": Glm4MoeConfig(  # with a correction bias in its router, a buffer
        **SHAPE, n_routed_experts=8, moe_intermediate_size=32, n_group=2, topk_group=1, first_k_dense_replace=1
    ),
}


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def random_model(name: str, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    for name, buffer in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.4)
    return model


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in weights_of(model).items()}


def expected(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:  # [T - 1]
    ids = torch.from_numpy(ids).long()
    with torch.no_grad():
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[1:, None])[:, 0].numpy()


class Loading(VllmEngine):
    """Starts on the weights in its folder, as vLLM does elsewhere."""

    def _start(self, **settings: object) -> object:
        return super()._start(**(settings | {"load_format": "auto"}))


def make_engine(folder: Path, group: dist.ProcessGroup, kind: type[VllmEngine] = VllmEngine) -> VllmEngine:
    model = build(folder, device=CPU, dtype=torch.float32, weights=False)
    return kind(
        folder=folder,
        config=model.config,
        specs=manifest(model),
        group=group,
        device=CPU,
        dtype=torch.float32,
        max_slots=4,
        max_seq_len=255,
        original=partial(original_names, model),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_of_every_version_are_those_that_were_sent(name: str, group: dist.ProcessGroup, tmp_path: Path) -> None:
    random_model(name, 0).save_pretrained(tmp_path)
    with closing(make_engine(tmp_path, group)) as engine:
        for version in range(3):
            model = random_model(name, version)
            engine.load_weights(weights(model), version)
            prompt = np.random.default_rng(version).integers(0, 97, 40).astype(np.int32)
            np.testing.assert_allclose(engine.score(prompt)[1:], expected(model, prompt), rtol=0, atol=TOLERANCE)
            engine.submit(0, prompt, Sampling(max_tokens=16, seed=3))
            while not (done := dict(engine.step())):
                pass
            whole = np.concatenate([prompt, done[0].token_ids])
            np.testing.assert_allclose(done[0].logprobs, expected(model, whole)[-16:], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", CONFIGS)
def test_vllm_reads_an_exported_folder(name: str, group: dist.ProcessGroup, tmp_path: Path) -> None:
    random_model(name, 0).save_pretrained(tmp_path / "source")
    trained, ranks = random_model(name, 1), TrainerRanks(group=None, device=CPU)
    export(weights(trained), ranks, folder=tmp_path / "model", source=tmp_path / "source", dtypes=None)
    ids = np.arange(5, 45, dtype=np.int32)
    with closing(make_engine(tmp_path / "model", group, Loading)) as engine:
        np.testing.assert_allclose(engine.score(ids)[1:], expected(trained, ids), rtol=0, atol=TOLERANCE)


def write_mixtral(folder: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(**(SHAPE | dict(vocab_size=len(VOCAB), initializer_range=0.02)), num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder)


@pytest.mark.parametrize("mode", ["full", "disk"])
def test_a_run_sends_experts_to_vllm_and_exports_them_one_by_one(mode: str, tmp_path: Path) -> None:
    run = torchrun("spmd_rl", tmp_path, f"weights.mode={mode}", "trainer.router_aux_coef=0.01", model=write_mixtral)
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["version"]) == ("done", STEPS)
    lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    probes = [line for line in lines if line["kind"] == "probe"]
    assert probes and all(probe["probe/sampled_max"] < TOLERANCE for probe in probes)
    source, made = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", tmp_path / "run/model"))
    assert source.keys() == made.keys()
