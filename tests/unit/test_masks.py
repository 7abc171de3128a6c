"""What a token sees where only the mask says so: windows, chunks, sinks; the packed forward and the engine's decode."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    Cohere2Config,
    DeepseekV2Config,
    GptOssConfig,
    JetMoeConfig,
    Llama4TextConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    StableLmConfig,
)

from spmd_rl.engine.native import NativeEngine
from spmd_rl.model.causal_lm import build, head, hidden_states
from spmd_rl.types import Sampling
from tests.unit.families import SHAPE, VOCAB, expected_logprobs, load, prompt_of, save_config

EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=24)
PADDED = SHAPE | {"pad_token_id": 0}
WINDOWS = dict(use_sliding_window=True, sliding_window=7, max_window_layers=1)
SHAPES: dict[str, PretrainedConfig] = {
    "window in the mask only": Qwen2MoeConfig(
        **SHAPE, **EXPERTS, **WINDOWS, num_experts=4, shared_expert_intermediate_size=24
    ),
    "window longer than some prompts": Qwen2MoeConfig(
        **SHAPE, **EXPERTS, **(WINDOWS | {"sliding_window": 25}), num_experts=4, shared_expert_intermediate_size=24
    ),
    "windows off": Qwen2MoeConfig(
        **SHAPE,
        **EXPERTS,
        **(WINDOWS | {"use_sliding_window": False}),
        num_experts=4,
        shared_expert_intermediate_size=24,
    ),
    "window in every layer": MixtralConfig(**SHAPE, sliding_window=7, num_local_experts=4),
    "windows beside layers without positions": Cohere2Config(**PADDED, sliding_window=7, logit_scale=1.0, head_dim=8),
    "chunks": Llama4TextConfig(
        **(PADDED | {"num_hidden_layers": 4}),
        head_dim=8,
        attention_chunk_size=16,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=1,
    ),
    "sinks": GptOssConfig(**SHAPE, head_dim=8, sliding_window=7, num_local_experts=4, num_experts_per_tok=2),
    "keys wider than values": DeepseekV2Config(
        **(PADDED | {"num_key_value_heads": 4}),
        **EXPERTS,
        first_k_dense_replace=3,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
    ),
    "layers that pass no keywords on": StableLmConfig(**PADDED),
}
CU = [0, 1, 8, 41, 42, 72]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_packed_forward_and_its_gradients_equal_those_of_each_sequence(shape: str, tmp_path: Path) -> None:
    plain = load(save_config(SHAPES[shape], tmp_path), "eager")
    model = build(tmp_path, device="cpu", dtype=torch.float32, weights=True)
    tokens = torch.randint(0, VOCAB, (CU[-1],))
    packed = head(model).logits(hidden_states(model, tokens, CU)).log_softmax(-1)
    alone = torch.cat(
        [plain(input_ids=tokens[None, a:b], use_cache=False).logits[0].log_softmax(-1) for a, b in pairwise(CU)]
    )
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)
    pull = torch.randn_like(alone)
    for logprobs in (packed, alone):
        (logprobs * pull).sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_engine_samples_equals_a_plain_forward(shape: str, tmp_path: Path) -> None:
    """Rows of equal and of different lengths, prompts in chunks and shared, sequences that grow past what they see."""
    plain = load(save_config(SHAPES[shape], tmp_path), "eager")
    model = build(tmp_path, device="cpu", dtype=torch.float32, weights=False)
    engine = NativeEngine(model=model, device=torch.device("cpu"), max_seq_len=128, max_slots=4, prefill_budget=16)
    engine.load_weights({name: p.detach() for name, p in plain.named_parameters()}, 0)
    prompts = [prompt_of(length) for length in (11, 11, 1, 40, 5)]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=14 + 3 * i, seed=i))
    done = {}
    while engine.num_running or engine.num_waiting:
        done.update(engine.step())
    for i, prompt in enumerate(prompts):
        expected = expected_logprobs(plain, prompt, done[i].token_ids)
        np.testing.assert_allclose(done[i].logprobs, expected, atol=1e-5)


def test_keys_that_take_more_memory_than_the_config_says_end_a_bounded_run(tmp_path: Path) -> None:
    """JetMoE has keys of both experts of a token: 2 layers, keys and values, 4 heads of 8 floats of 4 bytes."""
    shape = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2, kv_channels=8)
    config = JetMoeConfig(vocab_size=VOCAB, **shape, num_local_experts=4, num_experts_per_tok=2)
    plain = load(save_config(config, tmp_path), "eager")
    for num_bytes in (0, 1 << 20):
        model = build(tmp_path, device="cpu", dtype=torch.float32, weights=False)
        engine = NativeEngine(model=model, device=torch.device("cpu"), max_seq_len=60, kv_cache_bytes=num_bytes)
        engine.load_weights({name: p.detach() for name, p in plain.named_parameters()}, 0)
        engine.submit(0, prompt_of(5), Sampling(max_tokens=2))
        if num_bytes:
            with pytest.raises(RuntimeError, match="a token take 512 bytes, 256 by config"):
                engine.step()
        else:
            engine.step()


def test_a_mask_that_no_window_or_chunk_describes_is_refused(tmp_path: Path) -> None:
    model = build(save_config(SHAPES["sinks"], tmp_path), device="cpu", dtype=torch.float32, weights=True)
    model.config.is_causal = False
    with pytest.raises(ValueError, match="gpt_oss: an attention mask that is not causal"):
        hidden_states(model, torch.zeros(3, dtype=torch.long), [0, 3])
