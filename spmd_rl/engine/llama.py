"""The forward of the Llama family as a function of the same parameters, without the modules' overhead.

For Llama, Qwen2, Qwen3, Mistral and SmolLM2 (a Llama): RMSNorm, rope, optional query and key norms, grouped attention,
SwiGLU.  Equals the modules' forward up to rounding.  Query, key and value weights (and gate and up) are multiplied as
one matrix: a view where an update left them side by side in memory, a copy where they are small.  Knows nothing of
caches: attention is the `Attend` it is called with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmd_rl.model import Attend

ARCHITECTURES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # the table does not depend on the sequence
COPY_BELOW_BYTES = 4 << 20  # weights that are not neighbours are copied side by side up to this size


@dataclass(slots=True)
class _Layer:
    norm_in: Tensor
    qkv: list[Tensor]  # one matrix, or three
    qkv_bias: list[Tensor | None]
    norm_heads: tuple[Tensor, Tensor] | None  # query and key norms [D]
    out: Tensor  # transposed
    out_bias: Tensor | None
    norm_mlp: Tensor
    gate_up: list[Tensor]
    down: Tensor  # transposed
    window: int | None


class LlamaBody:
    """Call it like `model.run_body`: (token ids [T], positions [T], attend) -> hidden states [T, d]."""

    def __init__(self, model: nn.Module, max_seq_len: int, device: torch.device) -> None:
        config = model.config
        self._model = model.base_model
        self._eps = config.rms_norm_eps
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = next(model.parameters()).dtype
        positions = torch.arange(max_seq_len, device=device)
        cos, sin = self._model.rotary_emb(torch.empty(0, dtype=dtype, device=device), positions[None])
        half = self._dim // 2
        # rotate_half(x) * sin = roll(x, D/2) * [-sin, sin]
        self._cos, self._sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], -1)
        self._layers: list[_Layer] = []

    @staticmethod
    def fits(model: nn.Module) -> bool:
        config = model.config
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
        plain = type(model).__name__ in ARCHITECTURES and config.hidden_act == "silu"
        return plain and rope in STATIC_ROPE and not getattr(config, "mlp_bias", False)

    def bind(self) -> None:
        """Take the parameters that the modules have now."""
        self._layers = [self._bind_layer(layer) for layer in self._model.layers]

    def _bind_layer(self, layer: nn.Module) -> _Layer:
        attn, mlp = layer.self_attn, layer.mlp
        projections = (attn.q_proj, attn.k_proj, attn.v_proj)
        biases = [p.bias for p in projections]
        qkv = _side_by_side([p.weight for p in projections])
        if len(qkv) == 1 and biases[0] is not None:
            biases = [torch.cat([b.detach() for b in biases])]
        window = getattr(attn, "sliding_window", None)
        if attn.config.model_type == "mistral":
            window = attn.config.sliding_window
        return _Layer(
            norm_in=layer.input_layernorm.weight,
            qkv=qkv,
            qkv_bias=biases,
            norm_heads=(attn.q_norm.weight, attn.k_norm.weight) if hasattr(attn, "q_norm") else None,
            out=attn.o_proj.weight.t(),
            out_bias=attn.o_proj.bias,
            norm_mlp=layer.post_attention_layernorm.weight,
            gate_up=_side_by_side([mlp.gate_proj.weight, mlp.up_proj.weight]),
            down=mlp.down_proj.weight.t(),
            window=window,
        )

    def __call__(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = F.embedding(token_ids, self._model.embed_tokens.weight)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        num, width = x.shape
        num_rotated = self._heads + self._kv_heads
        scale = self._dim**-0.5
        for index, layer in enumerate(self._layers):
            h = F.rms_norm(x, (width,), layer.norm_in, self._eps)
            qkv = _multiply(h, layer.qkv, layer.qkv_bias).view(num, -1, self._dim)
            qk = qkv[:, :num_rotated]
            if layer.norm_heads is not None:
                q, k = qk[:, : self._heads], qk[:, self._heads :]
                q, k = (
                    F.rms_norm(y, (self._dim,), w, self._eps) for y, w in zip((q, k), layer.norm_heads, strict=True)
                )
                qk = torch.cat([q, k], 1)
            qk = torch.addcmul(qk * cos, qk.roll(self._dim // 2, -1), sin)
            q, k, v = (
                y.transpose(0, 1)[None] for y in (*qk.split([self._heads, self._kv_heads], 1), qkv[:, num_rotated:])
            )
            a = attend(index, q, k, v, scale=scale, window=layer.window, softcap=None)
            x = torch.addmm(x, a.reshape(num, -1), layer.out)
            if layer.out_bias is not None:
                x += layer.out_bias
            h = F.rms_norm(x, (width,), layer.norm_mlp, self._eps)
            gate, up = _multiply(h, layer.gate_up).chunk(2, -1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down)
        return F.rms_norm(x, (width,), self._model.norm.weight, self._eps)


def _multiply(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] = (None, None)) -> Tensor:
    if len(weights) == 1:
        return F.linear(x, weights[0], biases[0])
    return torch.cat([F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], -1)


def _side_by_side(weights: Sequence[Tensor]) -> list[Tensor]:
    """One matrix of all rows if they are neighbours in memory or small enough to copy, else the weights as given."""
    weights = [w.detach() for w in weights]
    first = weights[0]
    at = first.data_ptr()
    neighbours = all(w.is_contiguous() for w in weights)
    for w in weights:
        neighbours &= w.data_ptr() == at and w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        at += w.nbytes
    if neighbours:
        return [first.as_strided((sum(len(w) for w in weights), first.shape[1]), first.stride())]
    if sum(w.nbytes for w in weights) <= COPY_BELOW_BYTES:
        return [torch.cat(weights)]
    return weights
