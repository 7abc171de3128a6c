"""Tiny random models of every family, saved as ordinary folders."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

VOCAB = 97
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.15,  # far from uniform, so that a wrong position or mask shows
    bos_token_id=None,
    eos_token_id=None,
)
ROPE = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, rope_parameters=ROPE),
    "smollm2": LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_theta=1e5),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
    "qwen3_tied": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, sliding_window=7),
    "gemma3": Gemma3TextConfig(
        **(SHAPE | dict(pad_token_id=0)),
        head_dim=8,
        sliding_window=7,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
OTHERS = {  # that nothing here was written for
    "phi3": Phi3Config(**(SHAPE | dict(pad_token_id=0))),
    "gemma2": Gemma2Config(
        **(SHAPE | dict(pad_token_id=0)),
        head_dim=8,
        sliding_window=7,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=5.0,
    ),
    "olmo2": Olmo2Config(**(SHAPE | dict(pad_token_id=0))),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "nemotron": NemotronConfig(**(SHAPE | dict(pad_token_id=0))),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=512, bos_token_id=None),
    "opt": OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
    ),
    "gpt_neox": GPTNeoXConfig(**{name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}),
}
LINEAR = dict(  # of gated delta rule layers
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_expand=2, mamba_chunk_size=16)
MIXED = ["linear_attention", "full_attention", "linear_attention"]
HYBRIDS: dict[str, PretrainedConfig] = {  # layers that carry state from token to token
    "qwen3_5": Qwen3_5TextConfig(**SHAPE, head_dim=16, **LINEAR),
    "qwen3_next": Qwen3NextConfig(
        **SHAPE,
        head_dim=16,
        **LINEAR,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    "lfm2": Lfm2Config(**SHAPE, layer_types=["conv", "full_attention", "conv"], block_multiple_of=8),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **SHAPE, **MAMBA, layer_types=MIXED, num_local_experts=4, shared_intermediate_size=24
    ),
    "nemotron_h": NemotronHConfig(
        **{name: value for name, value in (SHAPE | {"pad_token_id": 0}).items() if name != "num_hidden_layers"},
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        head_dim=8,
        ssm_state_size=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        n_groups=2,
        chunk_size=16,
    ),
    "jamba": JambaConfig(
        **(SHAPE | {"pad_token_id": 0}),
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "bamba": BambaConfig(**(SHAPE | {"pad_token_id": 0}), **MAMBA, attn_layer_indices=[1]),
    "falcon_h1": FalconH1Config(**(SHAPE | {"pad_token_id": 0}), **MAMBA, mamba_d_ssm=64),
    "zamba2": Zamba2Config(
        **(SHAPE | {"pad_token_id": 0}),
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=8,
        mamba_headdim=8,
        n_mamba_heads=8,
        mamba_ngroups=1,
        chunk_size=16,
        num_mem_blocks=1,
        adapter_rank=4,
    ),
    "mamba2": Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=16,
        initializer_range=0.15,
    ),
}
WIDE = {  # engines lay its matrices out for the processor
    "wide": LlamaConfig(
        **(SHAPE | dict(hidden_size=512, intermediate_size=768, num_hidden_layers=2, initializer_range=0.04)),
        tie_word_embeddings=True,
    )
}


def save(name: str, folder: Path, seed: int = 0) -> Path:
    """A random model of a family in `folder`, biases and norms random too."""
    return save_config((CONFIGS | OTHERS | HYBRIDS | WIDE)[name], folder, seed)


def save_config(config: PretrainedConfig, folder: Path, seed: int = 0) -> Path:
    """The same of any config."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, attention: str = "sdpa") -> torch.nn.Module:
    """The model as plain transformers runs it."""
    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, attn_implementation=attention).eval()


def prompt_of(length: int) -> np.ndarray:
    """[length] int32, the same for the same length."""
    return np.random.default_rng(length).integers(0, VOCAB, length).astype(np.int32)


def expected_logprobs(
    plain: torch.nn.Module, prompt: np.ndarray, tokens: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """[N]: of each sampled token, by a plain forward over prompt and completion."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
    with torch.no_grad():
        logprobs = (plain(input_ids=ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
    at = torch.arange(len(prompt) - 1, len(ids) - 1)
    return logprobs[at, ids[len(prompt) :]].numpy()
