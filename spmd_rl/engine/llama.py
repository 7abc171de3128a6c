"""The forward of the Llama family as a function of the weights of an update, without the modules' overhead.

For Llama, Qwen2, Qwen3, Mistral and SmolLM2 (a Llama): RMSNorm, rope, optional query and key norms, grouped attention,
SwiGLU.  Equals the modules' forward up to rounding.  Query, key and value weights (and gate and up) are multiplied as
one matrix.  Knows nothing of caches: attention is the `Attend` it is called with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from spmd_rl.engine.matrix import Matrix
from spmd_rl.engine.states import States
from spmd_rl.model.attention import Attend, Rule
from spmd_rl.model.causal_lm import head, kv_shape
from spmd_rl.model.logprobs import Head
from spmd_rl.model.parts import decoder_layers

ARCHITECTURES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # the table does not depend on the sequence
MATRICES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    matrices: dict[str, Matrix]  # by name in MATRICES
    vectors: dict[str, Tensor]  # norms and biases, by the rest of their names


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Weights:
    """Of one version."""

    layers: list[_Layer]
    embedding: Tensor  # [V, d]
    norm: Tensor
    products: Matrix  # with the head's weight
    head: Head


class LlamaBody:
    """A `Body`."""

    def __init__(
        self,
        model: PreTrainedModel,
        max_seq_len: int,
        device: torch.device,
        *,
        one_row: bool,  # most forwards are of one token
        head_dtype: torch.dtype | None = None,  # of logits and the products that they are made of; None: the weights'
    ) -> None:
        config, self._one_row, self._head = model.config, one_row, head(model, head_dtype)
        self._eps = config.rms_norm_eps
        self._root_eps = torch.tensor(self._eps**0.5, device=device)
        self._heads = config.num_attention_heads
        _, self._kv_heads, self._dim = kv_shape(config)
        like = torch.empty(0, dtype=model.dtype, device=device)
        rotary = model.base_model.rotary_emb
        assert isinstance(rotary, nn.Module)
        cos, sin = rotary(like, torch.arange(max_seq_len, device=device)[None])
        half = self._dim // 2
        # rotate_half(x) * sin = roll(x, D/2) * [-sin, sin]
        self._cos, self._sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        windowed = [config if config.model_type == "mistral" else layer.self_attn for layer in decoder_layers(model)]
        windows = [getattr(owner, "sliding_window", None) for owner in windowed]
        self._rules = [Rule(scale=self._dim**-0.5, window=window) for window in windows]

    @staticmethod
    def fits(model: PreTrainedModel) -> bool:
        config = model.config
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
        plain = type(model).__name__ in ARCHITECTURES and config.hidden_act == "silu"
        return plain and rope in STATIC_ROPE and not getattr(config, "mlp_bias", False)

    def prepare(self, tensors: Mapping[str, Tensor]) -> _Weights:
        weight = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        return _Weights(
            layers=[_layer(tensors, f"model.layers.{i}.", self._one_row) for i in range(len(self._rules))],
            embedding=tensors["model.embed_tokens.weight"],
            norm=tensors["model.norm.weight"],
            products=Matrix([self._head.cast(weight)], one_row=self._one_row),
            head=replace(self._head, weight=weight),
        )

    def load(self, weights: _Weights) -> None:
        self._weights = weights

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend, states: States | None = None) -> Tensor:
        weights, x = self._weights, F.embedding(token_ids, self._weights.embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        num = len(x)
        parts = [self._heads, self._kv_heads, self._kv_heads]
        for index, (layer, rule) in enumerate(zip(weights.layers, self._rules, strict=True)):
            matrices, vectors = layer.matrices, layer.vectors
            qkv = matrices["qkv"](self._normed(x, vectors["input_layernorm"]), vectors.get("qkv"))
            qkv = qkv.view(1, num, -1, self._dim).transpose(1, 2)
            rotated = qk = qkv[:, : parts[0] + parts[1]]
            if "self_attn.q_norm" in vectors:
                q, k = qk.split(parts[:2], 1)
                q, k = self._normed(q, vectors["self_attn.q_norm"]), self._normed(k, vectors["self_attn.k_norm"])
                qk = torch.cat([q, k], 1)
            torch.addcmul(qk * cos, qk.roll(self._dim // 2, -1), sin, out=rotated)
            q, k, v = qkv.split(parts, 1)
            a = attend(index, q, k, v, rule)
            x += matrices["out"](a.reshape(num, -1), vectors.get("out"))
            gate, up = matrices["gate_up"](self._normed(x, vectors["post_attention_layernorm"])).chunk(2, -1)
            x += matrices["down"](F.silu(gate).mul_(up))
        return self._normed(x, weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head.finish(self._weights.products(self._head.cast(hidden)))

    @property
    def head(self) -> Head:
        return self._weights.head

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.is_cuda or x.dtype != torch.float32:
            return F.rms_norm(x, weight.shape, weight, self._eps)
        # x / sqrt(|x|² / d + eps) * weight, in fewer passes than torch makes of it on the CPU
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, norm.mul_(x.shape[-1] ** -0.5).hypot_(self._root_eps)).mul_(weight)


def _layer(tensors: Mapping[str, Tensor], prefix: str, one_row: bool) -> _Layer:
    matrices, vectors = {}, {}
    for name, parts in MATRICES.items():
        matrices[name] = Matrix([tensors[f"{prefix}{part}.weight"] for part in parts], one_row=one_row)
        biases = [tensors[bias] for part in parts if (bias := f"{prefix}{part}.bias") in tensors]
        if biases:
            vectors[name] = torch.cat(biases)
    for norm in NORMS:
        if (weight := f"{prefix}{norm}.weight") in tensors:
            vectors[norm] = tensors[weight]
    return _Layer(matrices=matrices, vectors=vectors)
