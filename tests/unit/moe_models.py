"""Tiny models of experts, saved as ordinary folders in either of the two forms that experts are stored in."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

VOCAB = 67  # of tiny_model, so that its tokenizer fits
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.15,  # far from uniform, so that a wrong expert shows
    bos_token_id=None,
    eos_token_id=None,
    tie_word_embeddings=False,
)
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**(SHAPE | dict(pad_token_id=0)), num_experts=4, num_experts_per_tok=2),
    "granitemoe": GraniteMoeConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Config(
        **(SHAPE | dict(num_key_value_heads=4)),
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
}


def save(name: str, folder: Path, seed: int = 0, *, original: bool = True) -> Path:
    """A random model of a family.  original=False: as it is in memory, experts in one tensor."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    model.save_pretrained(folder, save_original_format=original)
    return folder
