"""Ropes that change with the length of a sequence: exact up to the limit, packed and sampled, and refused above it."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config, PretrainedConfig, Qwen3Config

from spmd_rl import config
from spmd_rl.engine.native import NativeEngine
from spmd_rl.model.causal_lm import build, head, hidden_states, rope_limit
from spmd_rl.ranks.build_trainer import check_model
from spmd_rl.types import Sampling
from tests.unit.families import SHAPE, VOCAB, expected_logprobs, load, prompt_of, save_config

LIMIT = 64
SHORT, LONG = [1.0, 1.1, 1.3, 1.4], [2.0, 4.0, 6.0, 8.0]  # of the four pairs of a head
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=1e4,
    short_factor=SHORT,
    long_factor=LONG,
    original_max_position_embeddings=LIMIT,
    factor=8.0,
)
ROPES: dict[str, PretrainedConfig] = {
    "phi3, longrope": Phi3Config(
        **(SHAPE | {"pad_token_id": 0}), original_max_position_embeddings=LIMIT, rope_parameters=LONGROPE
    ),
    "llama, longrope": LlamaConfig(**SHAPE, rope_parameters=LONGROPE),
    "qwen3, longrope": Qwen3Config(**SHAPE, head_dim=8, rope_parameters=LONGROPE),
    "llama, dynamic": LlamaConfig(
        **(SHAPE | {"max_position_embeddings": LIMIT}),
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=4.0),
    ),
}


@pytest.mark.parametrize("rope", ROPES)
def test_sequences_up_to_the_limit_are_packed_and_sampled_as_a_plain_forward_has_them(
    rope: str, tmp_path: Path
) -> None:
    plain = load(save_config(ROPES[rope], tmp_path), "eager")
    model = build(tmp_path, device="cpu", dtype=torch.float32, weights=True)
    assert rope_limit(model.config) == LIMIT
    tokens, cu = torch.randint(0, VOCAB, (9 + LIMIT + 30,)), [0, 9, 9 + LIMIT, 9 + LIMIT + 30]
    with torch.no_grad():
        logits = head(model).logits(hidden_states(model, tokens, cu))
        for a, b in pairwise(cu):
            alone = plain(input_ids=tokens[None, a:b], use_cache=False).logits[0]
            assert (logits[a:b].log_softmax(-1) - alone.log_softmax(-1)).abs().max() < 1e-5
    empty = build(tmp_path, device="cpu", dtype=torch.float32, weights=False)
    engine = NativeEngine(model=empty, device=torch.device("cpu"), max_seq_len=LIMIT)
    engine.load_weights({name: p.detach() for name, p in plain.named_parameters()}, 0)
    for i, length in enumerate((5, 20)):
        engine.submit(i, prompt_of(length), Sampling(max_tokens=LIMIT - length, seed=i))
    done = {}
    while engine.num_running or engine.num_waiting:
        done.update(engine.step())
    for i, length in enumerate((5, 20)):
        expected = expected_logprobs(plain, prompt_of(length), done[i].token_ids)
        np.testing.assert_allclose(done[i].logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("rope", ROPES)
def test_a_longer_sequence_is_computed_by_its_own_length_and_never_beside_others(rope: str, tmp_path: Path) -> None:
    plain = load(save_config(ROPES[rope], tmp_path), "eager")
    model = build(tmp_path, device="cpu", dtype=torch.float32, weights=True)
    tokens = torch.randint(0, VOCAB, (LIMIT + 21,))
    for num in (LIMIT + 1, 20, LIMIT + 1):
        with torch.no_grad():
            logits = head(model).logits(hidden_states(model, tokens[:num], [0, num]))
            alone = plain(input_ids=tokens[None, :num], use_cache=False).logits[0]
        assert (logits.log_softmax(-1) - alone.log_softmax(-1)).abs().max() < 1e-5
    with pytest.raises(ValueError, match=rf"a sequence of {LIMIT + 1} tokens beside others: .* above {LIMIT}"):
        hidden_states(model, tokens, [0, LIMIT + 1, LIMIT + 21])


@pytest.mark.parametrize("rope", ["phi3, longrope", "llama, dynamic"])
def test_runs_with_longer_sequences_are_refused_before_they_begin(rope: str, tmp_path: Path) -> None:
    save_config(ROPES[rope], tmp_path)
    settings = config.load(Path(__file__).parents[2] / "configs" / "tiny_cpu.toml", [f"model.path={tmp_path}"])
    assert not check_model(replace(settings, inference=replace(settings.inference, max_seq_len=LIMIT))).refusal
    with pytest.raises(ValueError, match=rf"inference.max_seq_len = {LIMIT + 1}: .* lower it to {LIMIT}"):
        check_model(replace(settings, inference=replace(settings.inference, max_seq_len=LIMIT + 1)))
