"""What a token sees where only the mask says so: windows, chunks, sinks; the packed forward and the engine's decode."""

from transformers import (
    Cohere2Config,
    DeepseekV2Config,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
)

from tests.unit.families import SHAPE

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
    "windows without positions elsewhere": Cohere2Config(**PADDED, sliding_window=7, logit_scale=1.0, head_dim=8),
    "sinks": GptOssConfig(**SHAPE, head_dim=8, sliding_window=7, num_local_experts=4, num_experts_per_tok=2),
    "keys wider than values": DeepseekV2Config(
        **(PADDED | {"num_key_value_heads": 4}),
        first_k_dense_replace=3,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        **EXPERTS,
    ),
}
CU = [0, 1, 8, 41, 42, 72]
