"""The packed forward against plain transformers, and log-probs against log_softmax."""

import weakref
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GraniteConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen3Config,
)

from spmd_rl import config
from spmd_rl.model.causal_lm import build, head, hidden_states, packs
from spmd_rl.model.logprobs import Head, token_logprobs
from spmd_rl.ranks.build_trainer import check_model
from spmd_rl.trainer.sharding import LogProbs, recompute_layers
from tests.unit.families import CONFIGS, HYBRIDS, OTHERS, SHAPE, VOCAB, load, save

NEOX = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
CU = [0, 1, 8, 21, 22]


@pytest.mark.parametrize("family", CONFIGS)
def test_packed_forward_equals_each_sequence_alone(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    model, plain = build(tmp_path, device="cpu", dtype=torch.float32, weights=True), load(tmp_path)
    tokens = torch.randint(0, VOCAB, (CU[-1],))
    with torch.no_grad():
        logits = head(model).logits(hidden_states(model, tokens, CU))
        for a, b in pairwise(CU):
            alone = plain(input_ids=tokens[None, a:b], use_cache=False).logits[0]
            assert (logits[a:b].log_softmax(-1) - alone.log_softmax(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_that_carries_state_computes_one_sequence_a_forward(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    model, plain = build(tmp_path, device="cpu", dtype=torch.float32, weights=True), load(tmp_path, "eager")
    assert not packs(model)
    tokens = torch.randint(0, VOCAB, (41,))
    with torch.no_grad():
        logits = head(model).logits(hidden_states(model, tokens, [0, 41]))
        alone = plain(input_ids=tokens[None], use_cache=False).logits[0]
    assert (logits.log_softmax(-1) - alone.log_softmax(-1)).abs().max() < 1e-5
    with pytest.raises(ValueError, match=r"2 sequences in one forward: .* carries state"):
        hidden_states(model, tokens, [0, 20, 41])


@pytest.mark.parametrize("family", CONFIGS | OTHERS)
def test_a_model_of_attention_alone_packs(family: str) -> None:
    with torch.device("meta"):
        assert packs(AutoModelForCausalLM.from_config((CONFIGS | OTHERS)[family]))


@pytest.mark.parametrize(
    ("section", "setting"), [("trainer", {"share_prefix": True}), ("topology", {"context_parallel": 2})]
)
def test_what_needs_packing_is_refused_for_a_model_that_carries_state(
    section: str, setting: dict[str, Any], tmp_path: Path
) -> None:
    save("lfm2", tmp_path)
    settings = config.load(Path(__file__).parents[2] / "configs" / "tiny_cpu.toml", [f"model.path={tmp_path}"])
    settings = replace(settings, **{section: replace(getattr(settings, section), **setting)})
    with pytest.raises(ValueError, match=rf"{section}.{next(iter(setting))} = .*: Lfm2ForCausalLM carries state"):
        check_model(settings)


@pytest.mark.parametrize("family", CONFIGS)
def test_build_without_weights_has_the_same_shapes_and_buffers(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    full = build(tmp_path, device="cpu", dtype=torch.float32, weights=True)
    empty = build(tmp_path, device="cpu", dtype=torch.float32, weights=False)
    for (name, a), (other, b) in zip(full.named_parameters(), empty.named_parameters(), strict=True):
        assert (name, a.shape, a.dtype) == (other, b.shape, b.dtype) and b.is_meta
    for (name, a), (other, b) in zip(full.named_buffers(), empty.named_buffers(), strict=True):
        assert name == other and torch.equal(a, b)


def test_weights_in_several_files_are_the_same_model(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    whole = build(tmp_path, device="cpu", dtype=torch.float32, weights=True)
    load(tmp_path).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    parts = build(tmp_path / "shards", device="cpu", dtype=torch.float32, weights=True)
    for (name, a), (other, b) in zip(whole.named_parameters(), parts.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b)


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "mistral"])
def test_log_probs_and_gradients_of_a_packed_batch_equal_those_of_its_sequences(family: str, tmp_path: Path) -> None:
    """Among them one of a single token and one of the model's greatest length."""
    save(family, tmp_path)
    model = build(tmp_path, device="cpu", dtype=torch.float32, weights=True)
    longest = model.config.max_position_embeddings
    cu_seqlens = [0, 1, 8, 8 + longest, 21 + longest]
    tokens = torch.randint(0, VOCAB, (cu_seqlens[-1] + 1,))

    def run(pieces: list[tuple[int, int]], cu_seqlens: list[list[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        found = []
        for (a, b), cu in zip(pieces, cu_seqlens, strict=True):
            hidden = hidden_states(model, tokens[a:b], cu)
            logprobs, _ = token_logprobs(hidden, head(model), tokens[a + 1 : b + 1])
            (logprobs.sum() / len(tokens)).backward()
            found.append(logprobs.detach())
        return torch.cat(found), [p.grad.clone() for p in model.parameters()]

    together = run([(0, cu_seqlens[-1])], [cu_seqlens])
    alone = run(list(pairwise(cu_seqlens)), [[0, b - a] for a, b in pairwise(cu_seqlens)])
    recompute_layers(model)  # the backward calls the attention again
    _, checkpointed = run([(0, cu_seqlens[-1])], [cu_seqlens])
    assert (together[0] - alone[0]).abs().max() < 1e-5
    for a, b, c in zip(together[1], alone[1], checkpointed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert torch.equal(a, c)


@pytest.mark.parametrize("family", CONFIGS)
def test_sequences_that_share_their_start_equal_each_alone(family: str, tmp_path: Path) -> None:
    """A start of 9 tokens with 5, 0 and 12 after it, a sequence of its own, and a start of 1 token with 3 and 1."""
    save(family, tmp_path)
    model = build(tmp_path, device="cpu", dtype=torch.float32, weights=True)
    own, parents = [9, 5, 0, 12, 7, 1, 3, 1], [0, 0, 0, 0, 4, 5, 5, 5]
    cu_seqlens = [0, *accumulate(own)]
    tokens = torch.randint(0, VOCAB, (cu_seqlens[-1],))
    segments = [torch.arange(a, b) for a, b in pairwise(cu_seqlens)]
    whole = [torch.cat([segments[p], segments[j]]) if p != j else segments[j] for j, p in enumerate(parents)]
    pull = torch.randn(len(tokens), model.config.hidden_size)

    def gradients() -> list[torch.Tensor]:
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return found

    shared = hidden_states(model, tokens, cu_seqlens, parents)
    (shared * pull).sum().backward()
    together = gradients()
    for j, places in enumerate(whole):
        alone = hidden_states(model, tokens[places], [0, len(places)])
        mine = len(places) - own[j]  # the last own[j] tokens are this segment's
        torch.testing.assert_close(alone[mine:], shared[segments[j]], rtol=1e-5, atol=1e-5)
        (alone[mine:] * pull[segments[j]]).sum().backward()
    for a, b in zip(together, gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_a_forward_without_segments_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path)
    model = build(tmp_path, device="cpu", dtype=torch.float32, weights=True)
    with pytest.raises(ValueError, match="forward of a model alone"):
        model(input_ids=torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SHAPE, attention_dropout=0.4),
        GraniteConfig(**SHAPE, attention_dropout=0.4),
        PhiConfig(**(SHAPE | {"pad_token_id": 0}), attention_dropout=0.4, resid_pdrop=0.4, embd_pdrop=0.4),
        GPTNeoXConfig(**NEOX, attention_dropout=0.4, hidden_dropout=0.4),
    ],
    ids=lambda config: config.model_type,
)
def test_dropout_of_a_config_is_applied_nowhere(config: PretrainedConfig, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, plain = build(tmp_path, device="cpu", dtype=torch.float32, weights=True), load(tmp_path)
    policy, tokens = LogProbs(model), torch.randint(0, VOCAB, (22,))
    rows = torch.arange(21)
    logprobs, _, _ = policy(tokens[:-1], [0, 21], rows, tokens[1:], 1.0)
    expected = plain(input_ids=tokens[None, :-1], use_cache=False).logits[0].log_softmax(-1)[rows, tokens[1:]]
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)
    model.train()
    with pytest.raises(AssertionError, match="dropout"):
        policy(tokens[:-1], [0, 21], rows, tokens[1:], 1.0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_log_probs_and_their_gradients_equal_log_softmax(temperature: float) -> None:
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(29, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 29, (11,))
    pull, pull_entropy = torch.randn(2, 11, dtype=torch.float64)
    logprobs, entropy = token_logprobs(hidden, Head(weight=weight), targets, temperature, chunk=4)
    ours = torch.autograd.grad((logprobs * pull + entropy * pull_entropy).sum(), (hidden, weight))
    full = (hidden @ weight.t() / temperature).log_softmax(-1)
    expected = full.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(full.exp() * full).sum(-1)
    theirs = torch.autograd.grad((expected * pull + expected_entropy * pull_entropy).sum(), (hidden, weight))
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_log_probs_alone_or_hidden_alone_may_need_gradients() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    logprobs, entropy = token_logprobs(hidden, Head(weight=weight), torch.tensor([0, 4, 2]))
    (only,) = torch.autograd.grad(logprobs.sum(), hidden, retain_graph=True)
    expected = torch.autograd.grad((hidden @ weight.t()).log_softmax(-1)[[0, 1, 2], [0, 4, 2]].sum(), hidden)[0]
    torch.testing.assert_close(only, expected)
    assert torch.autograd.grad(entropy.sum(), hidden)[0].isfinite().all()


def test_bfloat16_accumulates_log_probs_in_float32() -> None:
    hidden, weight = torch.randn(7, 16).bfloat16().requires_grad_(), torch.randn(300, 16).bfloat16().requires_grad_()
    logprobs, _ = token_logprobs(hidden, Head(weight=weight), torch.arange(7), chunk=3)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32 and hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


class Memory(TorchDispatchMode):
    """The most floats that tensors made under it held at any one time."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.held = self.most = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in self._seen:
                self._hold(storage, storage.data_ptr(), storage.nbytes() // 4)
        return out

    def _hold(self, storage: torch.UntypedStorage, at: int, num: int) -> None:
        self._seen.add(at)
        self.held += num
        self.most = max(self.most, self.held)
        weakref.finalize(storage, self._drop, at, num)

    def _drop(self, at: int, num: int) -> None:
        self._seen.discard(at)
        self.held -= num


@pytest.mark.parametrize("chunk", [8, 16])
def test_log_probs_hold_two_blocks_of_logits_at_most(chunk: int) -> None:
    num, width, vocab = 64, 4, 1000
    hidden, weight = torch.randn(num, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    targets = torch.arange(num)
    with Memory(hidden, weight, targets) as memory:
        logprobs, entropy = token_logprobs(hidden, Head(weight=weight), targets, 0.7, chunk=chunk)
        forward = memory.most
        (logprobs.sum() + entropy.sum()).backward()
    assert 2 * chunk * vocab <= forward <= 2 * chunk * vocab + 8 * num
    assert memory.most <= 2 * chunk * vocab + 8 * num + (num + vocab) * width


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 0.9475), (0.5, 0.4554), (1.5, 1.1526)])
def test_entropy_of_four_logits_by_hand(temperature: float, expected: float) -> None:
    weight = torch.tensor([[2.0], [1.0], [0.0], [-1.0]])
    _, entropy = token_logprobs(torch.ones(1, 1), Head(weight=weight), torch.tensor([0]), temperature)
    assert entropy.item() == pytest.approx(expected, abs=1e-4)


def test_no_rows_give_no_log_probs() -> None:
    weight = torch.randn(5, 4, requires_grad=True)
    logprobs, entropy = token_logprobs(torch.empty(0, 4), Head(weight=weight), torch.empty(0, dtype=torch.long))
    (logprobs.sum() + entropy.sum()).backward()
    assert len(logprobs) == 0 and weight.grad.abs().sum() == 0
