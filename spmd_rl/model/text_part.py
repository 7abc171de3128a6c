"""The text part of a multimodal model: its config, and which tensors of the folder it is made of.

Such a part is a causal LM of its own (Mistral in Mistral 3, Gemma 3's language model).  It is trained and sampled from;
what else the folder holds (vision, projections) is left as it is.  Knows nothing of files or weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from spmd_rl.model.parts import body

ALONE = {  # text parts without a class of their own: with positions that are equal on all axes they are these
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
_AXES = ("mrope_section", "mrope_interleaved")  # of ropes for images


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Of the text part of a multimodal model, or the config itself; ValueError for a part that is no causal LM."""
    text = config.get_text_config()
    if text is config:
        return config
    if text.model_type in ALONE:
        text = _alone(text)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return config
        raise ValueError(f"{config.model_type}: its text part ({text.model_type}) is no causal LM of transformers")
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", text.tie_word_embeddings))
    text.dtype = config.dtype if text.dtype is None else text.dtype
    return text


def _alone(text: PretrainedConfig) -> PretrainedConfig:
    values = text.to_dict()
    kind = ALONE[values.pop("model_type")]
    for rope in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(rope), dict):
            values[rope] = {name: value for name, value in values[rope].items() if name not in _AXES}
    values.pop("architectures", None)
    return AutoConfig.for_model(kind, **values)


@dataclass(frozen=True)
class TextNames:
    """Names in a folder and in a folder of its text part alone."""

    text: Mapping[str, str]  # by the name in the folder: that in the text part
    rest: frozenset[str]  # what else is in the folder

    @property
    def whole(self) -> dict[str, str]:
        """By the name in the text part: that in the folder."""
        return {text: name for name, text in self.text.items()}


def text_names(stored: Iterable[str], model: PreTrainedModel) -> TextNames:
    """`model` is the text part.  It begins where the folder's embedding is; a head lies beside it, or above.

    Example: language_model.model.embed_tokens.weight is model.embed_tokens.weight, and so are those beside it.
    """
    stored = list(stored)
    base = f"{model.base_model_prefix}."
    embedding, out = (f"{_name_of(model, part)}.weight" for part in (_embedding(model), model.get_output_embeddings()))
    tail = embedding.removeprefix(base)
    found = [name for name in stored if f".{name}".endswith(f".{tail}")]
    if not found:
        raise ValueError(f"no tensor of the folder is named …{tail}, as the embedding of its text part")
    prefix = min(found, key=len).removesuffix(tail)
    parents = {prefix[: i + 1] for i, letter in enumerate(prefix) if letter == "."} | {""}
    heads = {f"{parent}{out.rpartition('.')[0].rpartition('.')[2]}.weight" for parent in parents}
    names = {name: out for name in stored if name in heads and out != embedding}
    names |= {
        name: base + name.removeprefix(prefix) for name in stored if name.startswith(prefix) and name not in heads
    }
    return TextNames(names, frozenset(stored) - names.keys())


def text_prefix(config: PretrainedConfig) -> str:
    """What the names of the text part's layers begin with in a multimodal model of this config, with a dot."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    return f"{_name_of(model, model.get_decoder())}."


def _embedding(model: PreTrainedModel) -> nn.Module:
    within = body(model)
    assert isinstance(within, PreTrainedModel)
    return within.get_input_embeddings()


def _name_of(model: nn.Module, part: nn.Module) -> str:
    names: list[str] = [name for name, module in model.named_modules() if module is part]
    return names[0]
