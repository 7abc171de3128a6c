"""What trainers, engines and heads compute in: `model.dtype` and `model.head_dtype` on both sides."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from spmd_rl import config
from spmd_rl.engine.body import Body, Modules
from spmd_rl.engine.llama import LlamaBody
from spmd_rl.engine.native import NativeEngine
from spmd_rl.model.causal_lm import build, engine_dtype, head_dtype
from spmd_rl.model.logprobs import Head, token_logprobs
from spmd_rl.ranks.build_trainer import make_trainer
from spmd_rl.trainer.models import Models
from spmd_rl.weights.low_rank import Lora
from tests.ranks import run_ranks
from tests.unit.families import load, prompt_of, save

CPU = torch.device("cpu")
TOKENS = prompt_of(60)
MIXED = {torch.bfloat16: (torch.bfloat16, torch.float32), torch.float32: (None, None)}  # computed in, reduced in
LORA = Lora(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("float32", "cuda", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_both_sides_compute_in_what_is_set(name: str, device: str, expected: torch.dtype) -> None:
    assert engine_dtype(name, torch.device(device)) == expected


@pytest.mark.parametrize(
    ("settings", "compute", "head"),
    [
        ([], torch.float32, torch.float32),
        (["model.dtype=float32"], torch.float32, torch.float32),
        (["model.dtype=bfloat16"], torch.bfloat16, torch.float32),
        (["model.dtype=bfloat16", "model.head_dtype=model"], torch.bfloat16, None),
    ],
)
def test_a_trainer_is_made_as_the_config_says(
    settings: list[str], compute: torch.dtype, head: torch.dtype | None, tmp_path: Path
) -> None:
    folder = save("qwen3", tmp_path)
    path = Path(__file__).parents[2] / "configs" / "tiny_cpu.toml"
    loaded = config.load(path, [f"model.path={folder}", *settings])
    trainer = make_trainer(loaded, device=CPU)
    assert (trainer.models.compute_dtype, trainer.models.policy.head_dtype) == (compute, head)
    assert {p.dtype for p in trainer.models.policy.parameters()} == {torch.float32}


def test_a_head_of_no_known_type_is_refused(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "configs" / "tiny_cpu.toml"
    with pytest.raises(ValueError, match=r"model.head_dtype = 'bfloat16': must be one of float32, model"):
        config.load(path, ["model.head_dtype=bfloat16"])


def sharded_scores(rank: int, folder: Path) -> list[tuple[object, ...]]:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp_replicate", "dp_shard"))
    return [sharded_score(folder, dtype, mesh) for dtype in MIXED]


def sharded_score(folder: Path, dtype: torch.dtype, mesh: DeviceMesh) -> tuple[object, ...]:
    models = Models(
        policy=build(folder, device=CPU, dtype=torch.float32, weights=True),
        mesh=mesh,
        device=CPU,
        compute_dtype=dtype,
        head_dtype=torch.float32,
    )
    states = [m._get_fsdp_state()._mp_policy for m in models.policy.modules() if isinstance(m, FSDPModule)]
    policies = {(state.param_dtype, state.reduce_dtype) for state in states}
    scores = models.score(torch.from_numpy(TOKENS).long(), 1.0)
    return scores.numpy().copy(), policies, {p.dtype for p in models.policy.parameters()}


def test_a_sharded_trainer_scores_as_an_engine_of_the_same_type(tmp_path: Path) -> None:
    """To the last bit or so, while bfloat16 and float32 are 1000 times further from each other."""
    folder = save("qwen3", tmp_path)
    theirs = {dtype: engine_score(folder, dtype) for dtype in MIXED}
    for found in run_ranks(sharded_scores, 2, folder):
        for (scores, policies, masters), (dtype, mixed) in zip(found, MIXED.items(), strict=True):
            assert policies == {mixed} and masters == {torch.float32}
            np.testing.assert_allclose(scores, theirs[dtype], atol=1e-5)
    assert np.abs(theirs[torch.bfloat16] - theirs[torch.float32]).max() > 1e-2


def engine_score(folder: Path, dtype: torch.dtype) -> np.ndarray:
    """By the modules themselves, log-probs of all tokens but the first."""
    model = build(folder, device=CPU, dtype=dtype, weights=False)
    engine = NativeEngine(model=model, device=CPU, max_seq_len=128, functional=False, head_dtype=head_dtype("float32"))
    engine.load_weights({name: p.detach().to(dtype) for name, p in load(folder).named_parameters()}, 0)
    return engine.score(TOKENS)[1:]


@pytest.mark.parametrize(
    "settings", [{}, {"lora": LORA}, {"activation_checkpointing": True}], ids=["", "lora", "saves"]
)
def test_a_trainer_alone_computes_as_a_sharded_one(settings: dict, tmp_path: Path) -> None:
    folder = save("qwen3_tied", tmp_path)
    models = Models(
        policy=build(folder, device=CPU, dtype=torch.float32, weights=True),
        mesh=None,
        device=CPU,
        compute_dtype=torch.bfloat16,
        head_dtype=torch.float32,
        **settings,
    )
    np.testing.assert_allclose(
        models.score(torch.from_numpy(TOKENS).long(), 1.0).numpy(), engine_score(folder, torch.bfloat16), atol=1e-5
    )
    ids = torch.from_numpy(TOKENS).long()
    logprobs, _, _ = models.policy(ids[:-1], [0, 59], torch.arange(59), ids[1:], 1.0)
    logprobs.sum().backward()
    trained = [p for p in models.policy.parameters() if p.requires_grad]
    assert {(p.dtype, p.grad.dtype) for p in trained} == {(torch.float32, torch.float32)}
    assert all(p.grad.isfinite().all() for p in trained) and any(p.grad.abs().max() > 0 for p in trained)


def exact_head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return hidden.double() @ weight.double().t()


@pytest.mark.parametrize("kind", ["modules", "llama", "one row"])
def test_an_engine_makes_logits_of_bfloat16_models_in_float32(kind: str, tmp_path: Path) -> None:
    folder = save("wide" if kind == "llama" else "smollm2", tmp_path)
    model = build(folder, device=CPU, dtype=torch.bfloat16, weights=False)
    tensors = {name: p.detach().bfloat16() for name, p in load(folder).named_parameters()}

    def made(dtype: torch.dtype | None) -> Body:
        if kind == "modules":
            body: Body = Modules(model, dtype)
        else:
            body = LlamaBody(model, 64, CPU, one_row=kind == "one row", head_dtype=dtype)
        body.load(body.prepare(tensors))
        return body

    weight = tensors["model.embed_tokens.weight"]
    hidden = torch.randn(5, weight.shape[1]).bfloat16() * 4
    logits = made(torch.float32).logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact_head(hidden, weight), rtol=1e-5, atol=1e-5)
    rounded = made(None).logits(hidden)
    assert rounded.dtype == torch.bfloat16 and (rounded.double() - exact_head(hidden, weight)).abs().max() > 1e-3


def test_log_probs_of_a_float32_head_are_exact_and_have_its_gradients() -> None:
    hidden, weight = (torch.randn(n, 64).bfloat16().requires_grad_() for n in (9, 300))
    targets = torch.arange(9)
    logprobs, entropy = token_logprobs(hidden, Head(weight=weight, dtype=torch.float32), targets, chunk=4)
    inputs = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    full = exact_head(*inputs).log_softmax(-1)
    expected, expected_entropy = full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    theirs = torch.autograd.grad((expected + expected_entropy).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b.bfloat16(), rtol=2**-7, atol=1e-5)
    rounded, _ = token_logprobs(hidden, Head(weight=weight), targets)
    assert (rounded.double() - expected).abs().max() > 1e-2
