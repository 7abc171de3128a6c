"""Buffers that forwards read (a router's correction bias) are in trainer, engine, checkpoint and folder."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from spmd_rl.engine.native import NativeEngine
from spmd_rl.model.causal_lm import build, head, hidden_states
from spmd_rl.model.logprobs import token_logprobs
from spmd_rl.model.stored_names import StoredNames
from spmd_rl.trainer.hf_folder import export
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.types import Sampling
from spmd_rl.weights.layout import manifest, weights_of
from spmd_rl.weights.low_rank import Lora
from tests.ranks import run_ranks
from tests.unit.families import SHAPE, expected_logprobs, load, prompt_of

CPU = torch.device("cpu")
TOKENS = prompt_of(50)
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
ROUTER = "model.layers.1.mlp.gate.weight"
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24)
ROUTED = dict(**EXPERTS, n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)
PADDED = SHAPE | {"pad_token_id": 0}
CONFIGS: dict[str, PretrainedConfig] = {
    "glm4_moe": AutoConfig.for_model("glm4_moe", **SHAPE, **ROUTED, head_dim=8),
    "solar_open": AutoConfig.for_model("solar_open", **PADDED, **ROUTED, head_dim=8),
    "exaone_moe": AutoConfig.for_model("exaone_moe", **PADDED, **EXPERTS, num_experts=8, first_k_dense_replace=1),
    "minimax_m2": AutoConfig.for_model(
        "minimax_m2", **PADDED, num_experts_per_tok=2, num_local_experts=8, head_dim=8, rotary_dim=4
    ),
    "apertus": AutoConfig.for_model("apertus", **PADDED),  # numbers of its activation, without a dimension
}


def save(family: str, folder: Path) -> torch.nn.Module:
    """A plain model whose buffers change what it says, in `folder` too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation="eager")
    with torch.no_grad():
        for tensor in buffers(model).values():
            tensor.add_(torch.randn_like(tensor) * 0.4)
    model.save_pretrained(folder)
    return model.eval()


def buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def engine_of(folder: Path, weights: Mapping[str, torch.Tensor], functional: bool = True) -> NativeEngine:
    model = build(folder, device=CPU, dtype=torch.float32, weights=False)
    engine = NativeEngine(model=model, device=CPU, max_seq_len=128, functional=functional)
    engine.load_weights(weights, 0)
    return engine


@pytest.mark.parametrize("family", CONFIGS)
def test_log_probs_and_gradients_equal_those_of_plain_transformers(family: str, tmp_path: Path) -> None:
    plain = save(family, tmp_path)
    assert buffers(plain)
    model = build(tmp_path, device=CPU, dtype=torch.float32, weights=True)
    assert list(weights_of(model)) == [n for n in plain.state_dict() if n in weights_of(plain)]
    tokens = torch.from_numpy(TOKENS).long()
    logprobs, _ = token_logprobs(hidden_states(model, tokens[:-1], [0, 20, 49]), head(model), tokens[1:])
    parts = [plain(input_ids=tokens[None, a:b], use_cache=False).logits[0] for a, b in ((0, 20), (20, 49))]
    expected = torch.cat(parts).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    logprobs.sum().backward()
    expected.sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", CONFIGS)
def test_an_engine_computes_with_the_buffers_of_an_update(family: str, tmp_path: Path) -> None:
    plain = save(family, tmp_path)
    engine, prompt = engine_of(tmp_path, weights_of(plain)), prompt_of(9)
    engine.submit(0, prompt, Sampling(max_tokens=20, seed=3))
    done = []
    while not done:
        done = engine.step()
    (_, got) = done[0]
    np.testing.assert_allclose(got.logprobs, expected_logprobs(plain, prompt, got.token_ids), atol=1e-5)
    scores = engine.score(TOKENS)
    stale = {name: torch.zeros_like(t) if name in buffers(plain) else t for name, t in weights_of(plain).items()}
    engine.load_weights(stale, 1)
    assert np.abs(engine.score(TOKENS) - scores).max() > 1e-2  # planted: buffers that are not the model's
    engine.load_weights(weights_of(plain), 2)
    np.testing.assert_array_equal(engine.score(TOKENS), scores)


def test_an_update_without_its_buffers_is_refused(tmp_path: Path) -> None:
    plain = save("glm4_moe", tmp_path)
    with pytest.raises(ValueError, match=r"update without \['model.layers.1.mlp.gate.e_score_correction_bias'"):
        engine_of(tmp_path, dict(plain.named_parameters()))


def test_a_folder_without_its_buffers_is_refused(tmp_path: Path) -> None:
    plain = save("glm4_moe", tmp_path)
    state = {name: t for name, t in plain.state_dict().items() if name != BIAS}
    plain.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=rf"has no tensor {BIAS}, which config.json needs"):
        build(tmp_path, device=CPU, dtype=torch.float32, weights=True)


@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=4.0, targets=("q_proj",))], ids=["whole", "lora"])
@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2", "apertus"])
def test_checkpoints_and_folders_hold_them(family: str, lora: Lora | None, tmp_path: Path) -> None:
    plain = save(family, tmp_path)

    def made() -> Models:
        return Models(
            policy=build(tmp_path, device=CPU, dtype=torch.float32, weights=True), lora=lora, mesh=None, device=CPU
        )

    models = made()
    models.refresh()
    sent = models.named_parameters()
    assert manifest(sent) == manifest(plain)
    assert all(torch.equal(sent[name], tensor) for name, tensor in buffers(plain).items())
    trained = {name for name, _ in models.named_trained()}
    assert not any(f"policy.model.{name}" in trained for name in buffers(plain))
    if lora is None:
        for tensor in buffers(models.model).values():
            tensor.add_(1.0)
        after = made()
        after.load_state_dict(models.state_dict())
        assert all(torch.equal(t, sent[name]) for name, t in buffers(after.model).items())
    export(sent, TrainerRanks(group=None, device=CPU), folder=tmp_path / "out", source=tmp_path, dtypes=None)
    assert all(torch.equal(t, sent[name]) for name, t in buffers(load(tmp_path / "out")).items())


def sharded(rank: int, folder: Path) -> list[tuple[object, ...]]:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_replicate", "dp_shard"))
    found, tokens = [], torch.from_numpy(TOKENS).long()
    for dtype in (torch.float32, torch.bfloat16):
        policy = build(folder, device=CPU, dtype=torch.float32, weights=True)
        models = Models(policy=policy, mesh=mesh, device=CPU, compute_dtype=dtype, reshard_after_forward=True)
        sent = {name: t.numpy().copy() for name, t in models.named_parameters().items() if name == BIAS}
        scores = models.score(tokens, 1.0).numpy().copy()
        logprobs, _, _ = models.policy(tokens, [0, 50], torch.tensor([3]), torch.tensor([1]), 1.0)
        logprobs.sum().backward()
        found.append((scores, sent, dict(policy.named_parameters())[ROUTER].grad.full_tensor().numpy().copy()))
    return found


def test_sharded_trainers_have_them_and_keep_routers_in_float32(tmp_path: Path) -> None:
    plain = save("glm4_moe", tmp_path)
    theirs = expected_logprobs(plain, TOKENS[:1], TOKENS[1:])
    rounded = score_in_bfloat16(tmp_path, weights_of(plain))
    for (scores, sent, grad), (scores_of_bfloat16, _, grad_of_bfloat16) in run_ranks(sharded, 2, tmp_path):
        np.testing.assert_allclose(scores, theirs, atol=1e-5)
        np.testing.assert_array_equal(sent[BIAS], weights_of(plain)[BIAS])
        np.testing.assert_allclose(scores_of_bfloat16, rounded, atol=1e-5)
        assert np.abs(grad).max() > 1e-3
        np.testing.assert_allclose(grad_of_bfloat16, grad, atol=0.1 * np.abs(grad).max())
    coarse = {name: t.bfloat16().float() if name == ROUTER else t for name, t in weights_of(plain).items()}
    assert np.abs(rounded - score_in_bfloat16(tmp_path, coarse)).max() > 1e-3  # planted: its router in bfloat16


def score_in_bfloat16(folder: Path, weights: Mapping[str, torch.Tensor]) -> np.ndarray:
    """By a native engine, log-probs of all tokens but the first."""
    empty = build(folder, device=CPU, dtype=torch.bfloat16, weights=False)
    engine = NativeEngine(model=empty, device=CPU, max_seq_len=128)
    types = {spec.name: spec.dtype for spec in manifest(empty)}
    engine.load_weights({name: tensor.detach().to(types[name]) for name, tensor in weights.items()}, 0)
    return engine.score(TOKENS)[1:]


@pytest.mark.parametrize(("family", "near"), [("glm4_moe", 1e-5), ("apertus", 1e-5), ("exaone_moe", 1e-5)])
def test_a_trainer_alone_keeps_in_float32_what_the_engine_does(family: str, near: float, tmp_path: Path) -> None:
    plain = save(family, tmp_path)
    policy = build(tmp_path, device=CPU, dtype=torch.float32, weights=True)
    models = Models(policy=policy, mesh=None, device=CPU, compute_dtype=torch.bfloat16)
    scores = models.score(torch.from_numpy(TOKENS).long(), 1.0)
    np.testing.assert_allclose(scores, score_in_bfloat16(tmp_path, weights_of(plain)), atol=near)


def test_types_on_the_wire_are_those_of_the_engine(tmp_path: Path) -> None:
    """In bfloat16 transformers keeps GLM-4's router in float32, and not MiniMax's."""
    for family, kept in (("glm4_moe", {BIAS, "model.layers.1.mlp.gate.weight"}), ("minimax_m2", set())):
        save(family, tmp_path / family)
        policy = build(tmp_path / family, device=CPU, dtype=torch.float32, weights=True)
        models = Models(policy=policy, mesh=None, device=CPU)
        wire = manifest(models.named_parameters(), dtype=models.dtypes(torch.bfloat16))
        empty = build(tmp_path / family, device=CPU, dtype=torch.bfloat16, weights=False)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.bfloat16)
        assert wire == manifest(empty) == manifest(plain)
        assert {spec.name for spec in wire if spec.dtype == torch.float32 and ".layers.1." in spec.name} == kept


@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2", "apertus"])
def test_a_folder_of_a_version_gives_engines_their_names_and_types(family: str, tmp_path: Path) -> None:
    """Experts one by one in the file, and a router in float32 beside bfloat16."""
    save(family, tmp_path / "source")
    models = Models(
        policy=build(tmp_path / "source", device=CPU, dtype=torch.float32, weights=True), mesh=None, device=CPU
    )
    sent, dtypes = models.named_parameters(), models.dtypes(torch.bfloat16)
    ranks = TrainerRanks(group=None, device=CPU)
    export(sent, ranks, folder=tmp_path / "version", source=tmp_path / "source", dtypes=dtypes)
    stored = load_file(tmp_path / "version" / "model.safetensors")
    ends = {name.rpartition(".")[2] for name in buffers(models.model)}
    assert sum(name.rpartition(".")[2] in ends for name in stored) == len(buffers(models.model))
    loaded = StoredNames(tmp_path / "source", torch.bfloat16).loaded(stored)
    empty = build(tmp_path / "source", device=CPU, dtype=torch.bfloat16, weights=False)
    assert {n: t.dtype for n, t in loaded.items()} == {spec.name: spec.dtype for spec in manifest(empty)}
    assert all(torch.equal(tensor, sent[name].to(tensor.dtype)) for name, tensor in loaded.items())
