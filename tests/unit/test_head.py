"""Logits of families that scale, cap or shift them, against the model's own forward: values, gradients, samples."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    ModernBertDecoderConfig,
    PhiConfig,
    PretrainedConfig,
    RobertaConfig,
)

from spmd_rl.engine.native import NativeEngine
from spmd_rl.model.causal_lm import build, head, hidden_states
from spmd_rl.model.logprobs import Head, token_logprobs
from spmd_rl.types import Sampling
from tests.ranks import run_ranks
from tests.unit.families import SHAPE, VOCAB, expected_logprobs, prompt_of

PADDED = SHAPE | {"pad_token_id": 0}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 64}
FORMS: dict[
    str, tuple[PretrainedConfig, float, float | None]
] = {  # with scale and softcap as its modelling code has them
    "gemma2": (Gemma2Config(**PADDED, **GEMMA, final_logit_softcapping=3.0), 1.0, 3.0),
    "gemma3": (AutoConfig.for_model("gemma3_text", **PADDED, **GEMMA, final_logit_softcapping=5.0), 1.0, 5.0),
    "gemma2 without": (Gemma2Config(**PADDED, **GEMMA, final_logit_softcapping=None), 1.0, None),
    "vaultgemma": (AutoConfig.for_model("vaultgemma", **PADDED, **GEMMA, final_logit_softcapping=2.0), 1.0, 2.0),
    "nanochat": (AutoConfig.for_model("nanochat", **SHAPE, final_logit_softcapping=4.0), 1.0, 4.0),
    "granite": (GraniteConfig(**SHAPE, logits_scaling=8.0, residual_multiplier=0.5), 1 / 8, None),
    "granite of experts": (
        GraniteMoeConfig(**SHAPE, logits_scaling=0.25, num_local_experts=4, num_experts_per_tok=2),
        4.0,
        None,
    ),
    "hyperclovax multiplies": (AutoConfig.for_model("hyperclovax", **SHAPE, logits_scaling=0.25), 0.25, None),
    "cohere": (CohereConfig(**PADDED, logit_scale=0.25), 0.25, None),
    "cohere2": (Cohere2Config(**PADDED, logit_scale=3.0), 3.0, None),
    "phi, a bias": (PhiConfig(**PADDED), 1.0, None),
    "llama, named alike": (LlamaConfig(**SHAPE, logits_scaling=8.0, logit_scale=3.0), 1.0, None),
}


def save(config: PretrainedConfig, folder: Path) -> torch.nn.Module:
    """The plain model, its biases and norms random, in `folder` too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("family", FORMS)
def test_log_probs_and_gradients_are_those_of_the_models_own_logits(family: str, tmp_path: Path) -> None:
    config, scale, softcap = FORMS[family]
    plain = save(config, tmp_path)
    model = build(tmp_path, device="cpu", dtype=torch.float32, weights=True)
    assert head(model).scale == pytest.approx(scale) and head(model).softcap == softcap
    tokens = torch.randint(0, VOCAB, (20,))
    theirs = (plain(input_ids=tokens[None, :-1], use_cache=False).logits[0] / 0.7).log_softmax(-1)
    theirs_entropy = -(theirs.exp() * theirs).sum(-1)
    logprobs, entropy = token_logprobs(hidden_states(model, tokens[:-1], [0, 19]), head(model), tokens[1:], 0.7)
    torch.testing.assert_close(logprobs, theirs.gather(1, tokens[1:, None])[:, 0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, theirs_entropy, rtol=1e-5, atol=1e-5)
    pull = torch.randn(19)
    (logprobs * pull + entropy * pull.flip(0)).sum().backward()
    (theirs.gather(1, tokens[1:, None])[:, 0] * pull + theirs_entropy * pull.flip(0)).sum().backward()
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("family", ["gemma2", "granite", "hyperclovax multiplies", "cohere", "phi, a bias"])
def test_an_engine_samples_and_scores_by_the_models_own_logits(family: str, tmp_path: Path) -> None:
    plain = save(FORMS[family][0], tmp_path)
    empty = build(tmp_path, device="cpu", dtype=torch.float32, weights=False)
    engine = NativeEngine(model=empty, device=torch.device("cpu"), max_seq_len=64)
    engine.load_weights(dict(plain.named_parameters()), 0)
    prompt = prompt_of(9)
    engine.submit(0, prompt, Sampling(max_tokens=20, temperature=0.6))
    done = []
    while not done:
        done = engine.step()
    tokens, logprobs = done[0][1].token_ids, done[0][1].logprobs
    np.testing.assert_allclose(logprobs, expected_logprobs(plain, prompt, tokens, 0.6), atol=1e-5)
    scores = engine.score(np.concatenate([prompt, tokens]))[len(prompt) :]
    np.testing.assert_allclose(scores, expected_logprobs(plain, prompt, tokens), atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        BertConfig(**PADDED, is_decoder=True),
        RobertaConfig(**PADDED, is_decoder=True),
        ModernBertDecoderConfig(**PADDED | {"bos_token_id": 1, "eos_token_id": 2}),
    ],
    ids=lambda config: config.model_type,
)
def test_logits_of_another_form_are_refused(config: PretrainedConfig, tmp_path: Path) -> None:
    save(config, tmp_path)
    with pytest.raises(ValueError, match=r"its logits are no projection of the last hidden state[^\n]*$"):
        build(tmp_path, device="cpu", dtype=torch.float32, weights=False)


class Shifted(Gemma2ForCausalLM):
    def forward(self, **inputs):
        out = super().forward(**inputs)
        out.logits = out.logits + torch.arange(VOCAB)
        return out


class Fewer(Gemma2ForCausalLM):
    def forward(self, **inputs):
        out = super().forward(**inputs)
        out.logits = out.logits[..., :-2]
        return out


class Squared(Gemma2ForCausalLM):
    def forward(self, **inputs):
        out = super().forward(**inputs)
        out.logits = out.logits * out.logits.abs()
        return out


@pytest.mark.parametrize("kind", [Shifted, Fewer, Squared])
def test_logits_that_are_something_else_beside_are_seen(kind: type[Gemma2ForCausalLM]) -> None:
    with pytest.raises(ValueError, match=f"^{kind.__name__}: it"):
        head(kind(FORMS["gemma2 without"][0]))


HEADS = {
    "scale": dict(scale=0.3),
    "softcap": dict(softcap=2.0),
    "both": dict(scale=1.7, softcap=3.0),
    "bias": dict(bias=torch.linspace(-2, 2, 29, dtype=torch.float64)),
    "all": dict(scale=0.5, softcap=3.0, bias=torch.linspace(-2, 2, 29, dtype=torch.float64)),
}


def _example() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(n, m, dtype=torch.float64, generator=generator) * 2 for n, m in ((11, 8), (29, 8), (2, 11))]
    return *made, torch.randint(0, 29, (11,), generator=generator)


def _expected(form: dict, temperature: float) -> list[torch.Tensor]:
    """Log-probs, entropies and their gradients by hidden, weight and bias, written out in full."""
    hidden, weight, pulls, targets = _example()
    bias = form.get("bias", torch.zeros(29, dtype=torch.float64))
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    y = form.get("scale", 1.0) * (inputs[0] @ inputs[1].t() + inputs[2])
    if "softcap" in form:
        y = form["softcap"] * torch.tanh(y / form["softcap"])
    full = (y / temperature).log_softmax(-1)
    logprobs, entropy = full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(-1)
    return [logprobs, entropy, *torch.autograd.grad((logprobs * pulls[0] + entropy * pulls[1]).sum(), inputs)]


@pytest.mark.parametrize("temperature", [0.5, 1.3])
@pytest.mark.parametrize("form", HEADS)
def test_log_probs_of_every_form_have_exact_gradients(form: str, temperature: float) -> None:
    hidden, weight, pulls, targets = _example()
    bias = HEADS[form].get("bias")
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    made = Head(**HEADS[form] | {"weight": inputs[1], "bias": inputs[2] if bias is not None else None})
    logprobs, entropy = token_logprobs(inputs[0], made, targets, temperature, chunk=4)
    found = [logprobs, entropy, *torch.autograd.grad((logprobs * pulls[0] + entropy * pulls[1]).sum(), inputs)]
    for mine, theirs in zip(found, _expected(HEADS[form], temperature), strict=False):
        torch.testing.assert_close(mine, theirs)
    alone, _ = token_logprobs(inputs[0], made, targets, temperature, chunk=3)
    torch.testing.assert_close(
        torch.autograd.grad((alone * pulls[0]).sum(), inputs[0])[0],
        torch.autograd.grad((_full(inputs, HEADS[form], targets, temperature) * pulls[0]).sum(), inputs[0])[0],
    )


def _full(inputs: list[torch.Tensor], form: dict, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    made = Head(**form | {"weight": inputs[1], "bias": inputs[2] if len(inputs) > 2 else None})
    return (made.logits(inputs[0]) / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def split_heads(rank: int) -> list[list[np.ndarray]]:
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for form in HEADS.values():
        hidden, weight, pulls, targets = _example()
        hidden.requires_grad_()
        parts = [
            distribute_tensor(tensor, mesh, [Shard(0)]).requires_grad_()
            for tensor in (weight, form.get("bias"))
            if tensor is not None
        ]
        made = Head(**form | {"weight": parts[0], "bias": parts[1] if len(parts) > 1 else None})
        logprobs, entropy = token_logprobs(hidden, made, targets, 0.8, chunk=4)
        grads = torch.autograd.grad((logprobs * pulls[0] + entropy * pulls[1]).sum(), [hidden, *parts])
        whole = [logprobs.detach(), entropy.detach(), grads[0], *(grad.full_tensor() for grad in grads[1:])]
        found.append([tensor.numpy().copy() for tensor in whole])
    return found


def test_a_head_split_over_ranks_gives_the_same() -> None:
    for found in run_ranks(split_heads, 2):
        for form, mine in zip(HEADS.values(), found, strict=True):
            for ours, theirs in zip(mine, _expected(form, 0.8), strict=False):
                torch.testing.assert_close(torch.from_numpy(ours), theirs.detach())
