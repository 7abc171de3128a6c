"""A config made small, each kind of its layers kept, so that a model of it is built and compared in a second.

Given any decoder's config of `transformers`.  Promises: widths, experts and the vocabulary shrink together; the first
layers are kept, as many as there are kinds among them; windows, chunks and the lengths at which a rope changes become
so small that sequences of some dozens of tokens cross them; nothing is made larger.  Knows nothing of weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

WINDOW, CHUNK, ORIGINAL, LONGEST = 7, 8, 24, 256  # tokens
VOCAB, WIDTH, HEADS, HEAD_DIM = 97, 64, 4, 16
MOST_LAYERS = 16  # among which kinds of layers are looked for
_ROPE_DIM = 8  # of a head whose other part has no position
_INNER = 2 * WIDTH  # of recurrent layers: heads times their width

SIZES: tuple[tuple[str, int], ...] = (  # the first pattern that matches a whole name; values are never raised
    (r"type_vocab_size|n_langs|task_type_vocab_size", 2),
    (r"(?!num_).*vocab_size\w*|encoder_hash_byte_group_vocab", VOCAB),
    (r"hidden_size_per_layer_input", 16),
    (r"mamba_d_ssm|mamba_intermediate|attention_hidden_size|d_inner", _INNER),
    (r"(?:decoder_|encoder_)?(?:hidden_size|d_model|n_embd|emb_dim|embedding_dim|hidden_dim)", WIDTH),
    (r"(?:input_|output_)?embedding_size|word_embed_proj_dim|lru_width|out_hidden_size|projection_dim", WIDTH),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads|mamba_heads", 8),
    (r"mamba_d_head|mamba_head_?dim|mamba_headdim", _INNER // 8),
    (r"(?:mamba_)?(?:d_state|state_size|ssm_state_size)", 8),
    (r"(?:mamba_)?(?:dt_rank|time_step_rank)", 4),
    (r"(?:mamba_)?n_?groups", 2),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|linear_num_heads", 4),
    (r"linear_(?:key_|value_)?head_dim", HEAD_DIM),
    (r"attention_head_dim|kv_channels|d_kv|attention_head_size|d_head|head_dim|swa_head_dim|global_head_dim", HEAD_DIM),
    (r"index_head_dim|qk_nope_head_dim|v_head_dim", HEAD_DIM),
    (r"qk_rope_head_dim", _ROPE_DIM),
    (r"qk_head_dim", HEAD_DIM + _ROPE_DIM),
    (r"rotary_dim", _ROPE_DIM),
    (r"\w*(?:intermediate_size|ffn_dim|ffn_hidden_size|n_inner|dim_ff|dff|feed_forward_size)\w*", 48),
    (r"\w*(?:_rank|_lowrank|latent_size|router_hidden_size)", 16),
    (r"\w*(?:num_key_value_heads|num_kv_heads|num_query_groups)", 2),
    (r"(?:\w*num_|n_|\w*_|index_n_)?(?:attention_)?heads?(?:_per_layer)?|num_heads|n_head|index_n_heads", HEADS),
    (r"(?:moe_)?(?:num_(?:local_|routed_)?experts|n_routed_experts)", 16),
    (r"zero_expert_num", 2),
    (r"num_experts_per_tok(?:en)?|moe_top_?k|moe_k|top_k_experts", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length", LONGEST),
    (r"original_max_position_embeddings", ORIGINAL),
    (r"index_topk_blocks", 2),
    (
        r"\w*sliding_window(?:_size)?|local_attention_window_len|attention_window_size|keep_window_size|window_size|local_attention",
        WINDOW,
    ),
    (r"\w*chunk_size|\w*_chunk_length|(?:index_)?block_size|floor_scale|index_topk|log_scaling_n_floor", CHUNK),
)
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "logits_soft_cap": 5.0}
CAPS |= {"output_logit_soft_cap": 5.0}  # which logits of small models reach
DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_blocks",
    "decoder_layers",
    "num_decoder_layers",
)
INDICES = re.compile(r"\w*(?:layers|layer_ids|idxs|indices)")  # lists of layers by number
SIGHT = re.compile(r"window|chunk|block_?size|block_len|topk_|top_k_blocks|stride")
SHORTEST_LIMIT = 32  # tokens; above, too few of a tried sequence would be beyond it
NOT_SIZES = {"chunk_size_feed_forward", "chunk_size_lm_head", "sliding_window_pattern", "pad_vocab_size_multiple"}


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """A small config of the same class.  Whatever the class raises for it is raised."""
    narrow = _narrowed(config.to_dict())
    text = _narrowed(config.get_text_config().to_dict())
    depth = _depth(text)
    if depth is None:
        return _made(config, narrow)
    looked_at = max(min(depth, MOST_LAYERS), _last_new_kind(text, depth))
    tall = _made(config, _cut(narrow, depth, looked_at))
    return _made(config, _cut(narrow, depth, min(depth, max(2, num_first_of_all_kinds(layers_on_meta(tall))))))


def unseen(config: PretrainedConfig) -> tuple[str, int] | None:
    """A size of the small config that by its name limits what a token sees, and that no tried sequence reaches."""
    for name, value in config.get_text_config().to_dict().items():
        limits = SIGHT.search(name) and name not in NOT_SIZES and not name.startswith(("max_", "num_"))
        if limits and isinstance(value, int) and value > SHORTEST_LIMIT:
            return name, value
    return None


def layers_on_meta(config: PretrainedConfig) -> nn.ModuleList | None:
    """The decoder layers of a model of this config, without memory; None where no list of them is found."""
    with torch.device("meta"):
        return decoder_layers(AutoModelForCausalLM.from_config(config))


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The longest list of modules that are no experts: the layers, whatever the architecture calls them."""
    lists = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    named = [m for m in lists if any(hasattr(one, "forward") and len(list(one.children())) > 1 for one in m)]
    return max(named, key=len, default=None)


def num_first_of_all_kinds(layers: nn.ModuleList | None) -> int:
    """The least number of first layers among which is one of each kind."""
    kinds = [layer_kind(layer) for layer in layers or ()]
    return max((kinds.index(kind) + 1 for kind in set(kinds)), default=1)


def layer_kind(layer: nn.Module) -> tuple[object, ...]:
    """What tells two layers apart but for their weights: classes of their parts, and what is set in them."""
    return tuple((name, type(part).__name__, *_settings(part)) for name, part in layer.named_modules())


def _settings(part: nn.Module) -> Iterator[tuple[str, object]]:
    for name, value in sorted(vars(part).items()):
        public = not name.startswith("_") and "idx" not in name and "index" not in name and "layer_id" not in name
        if public and isinstance(value, bool | int | str | None):
            yield name, value


def _made(config: PretrainedConfig, values: dict[str, Any]) -> PretrainedConfig:
    return type(config).from_dict(copy.deepcopy(values))


def _depth(values: dict[str, Any]) -> int | None:
    return next((values[name] for name in DEPTHS if isinstance(values.get(name), int)), None)


def _narrowed(values: dict[str, Any]) -> dict[str, Any]:
    """All sizes at most those of SIZES, also those of configs within."""
    old_dim, narrow = _head_dim(values), {}
    for name, value in values.items():
        if isinstance(value, dict) and name.startswith("rope_"):
            narrow[name] = value
        elif isinstance(value, dict):
            narrow[name] = _narrowed(value)
        else:
            narrow[name] = _least(name, value)
    heads, kv = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if isinstance(heads, int) and heads == kv:  # no groups of queries
        narrow["num_key_value_heads"] = narrow["num_attention_heads"]
    if "qk_rope_head_dim" in values and values.get("head_dim") == values["qk_rope_head_dim"]:
        narrow["head_dim"] = narrow["qk_rope_head_dim"]
    _fit_tokens(narrow)
    _fit_recurrent(narrow)
    _fit_rope(values, narrow, old_dim)
    return narrow


def _least(name: str, value: Any) -> Any:
    if isinstance(value, bool) or name in NOT_SIZES:
        return value
    if isinstance(value, float) and name in CAPS:
        return min(value, CAPS[name])
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        return [_least(name, v) for v in value]
    if not isinstance(value, int) or value < 1:
        return value
    most = next((most for pattern, most in SIZES if re.fullmatch(pattern, name)), value)
    return min(value, most)


def _head_dim(values: dict[str, Any]) -> int | None:
    if isinstance(own := values.get("head_dim"), int):
        return own
    width = values.get("hidden_size") or values.get("n_embd")
    heads = values.get("num_attention_heads") or values.get("n_head")
    return width // heads if isinstance(width, int) and isinstance(heads, int) else None


def _fit_recurrent(narrow: dict[str, Any]) -> None:
    """Heads times their width are the inner width."""
    inner = narrow.get("mamba_d_ssm") or narrow.get("hidden_size", 0) * (narrow.get("mamba_expand") or 2)
    for heads, dim in (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim")):
        if isinstance(narrow.get(heads), int) and isinstance(narrow.get(dim), int):
            narrow[dim] = inner // narrow[heads]
    if {"expand", "state_size", "num_heads", "head_dim"} <= narrow.keys():
        narrow["num_heads"] = narrow["expand"] * narrow["hidden_size"] // narrow["head_dim"]


def _fit_tokens(narrow: dict[str, Any]) -> None:
    """Special tokens into the vocabulary."""
    vocab = narrow.get("vocab_size")
    for name, value in narrow.items():
        if isinstance(vocab, int) and name.endswith(("token_id", "token_ids")):
            if isinstance(value, int) and value >= vocab:
                narrow[name] = value % vocab
            elif isinstance(value, list):
                narrow[name] = [v % vocab if isinstance(v, int) else v for v in value]


def _fit_rope(values: dict[str, Any], narrow: dict[str, Any], old_dim: int | None) -> None:
    """Factors per frequency, sections of a head, and the lengths at which a rope changes."""
    new_dim = _head_dim(narrow)
    ratio = 1.0 if not old_dim or not new_dim else new_dim / old_dim
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            narrow[name] = _rope(values[name], ratio)
    changes = str(narrow.get("rope_parameters")) + str(narrow.get("rope_scaling"))
    if "'dynamic'" in changes and isinstance(values.get("max_position_embeddings"), int):
        narrow["max_position_embeddings"] = min(values["max_position_embeddings"], ORIGINAL)


def _rope(rope: dict[str, Any], ratio: float) -> dict[str, Any]:
    fitted: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):  # by the type of layer
            fitted[name] = _rope(value, ratio)
        elif name in ("short_factor", "long_factor"):
            num = max(1, round(len(value) * ratio))
            fitted[name] = [value[i * len(value) // num] for i in range(num)]
        elif name == "mrope_section":
            fitted[name] = _sections(value, max(len(value), round(sum(value) * ratio)))
        elif name == "original_max_position_embeddings":
            fitted[name] = min(value, ORIGINAL)
        else:
            fitted[name] = value
    return fitted


def _sections(sections: list[int], total: int) -> list[int]:
    """As many parts, near in proportion, whose sum is `total`."""
    parts = [max(1, n * total // sum(sections)) for n in sections]
    parts[0] += total - sum(parts)
    return parts


def _last_new_kind(values: dict[str, Any], depth: int) -> int:
    """Layers up to the one whose entry in a list per layer is the last new one."""
    last = 0
    for value in values.values():
        if isinstance(value, list | tuple) and len(value) == depth:
            seen = [str(entry) for entry in value]
            last = max(last, max(seen.index(entry) for entry in set(seen)) + 1)
    return min(last, 4 * MOST_LAYERS)


def _cut(values: dict[str, Any], depth: int, num: int) -> dict[str, Any]:
    """With the first `num` of `depth` layers; a config within of another depth has as many at most."""
    own = _depth(values)
    if own not in (None, depth):
        depth, num = own, min(own, num)
    cut: dict[str, Any] = {}
    for name, value in values.items():
        if name in DEPTHS and value == depth:
            cut[name] = num
        elif isinstance(value, list | tuple) and len(value) == depth:
            cut[name] = list(value[:num])
        elif isinstance(value, list | tuple) and INDICES.fullmatch(name) and all(type(v) is int for v in value):
            cut[name] = [v for v in value if v < num]
        elif name == "num_kv_shared_layers" and value:
            cut[name] = min(value, num // 2)
        elif isinstance(value, dict) and value and all(str(key).isdigit() for key in value) and "label" not in name:
            cut[name] = {key: v for key, v in value.items() if int(key) < num}
        elif isinstance(value, dict) and not name.startswith("rope_"):
            cut[name] = _cut(value, depth, num)
        else:
            cut[name] = value
    return cut
