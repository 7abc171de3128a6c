"""Faults planted in the plain model, one for each property of its config that an implementation may get wrong.

Given a model, its folder and rollouts; says how far each fault moves log-probs.  A fault that moves none by a bit is
of a property that the model has not (a window that is switched off).  Knows nothing of trainer or engine.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from spmd_rl.behavior import plain
from spmd_rl.behavior.samples import Rollouts
from spmd_rl.model.causal_lm import ropes

LEAK = "a sequence sees the one before it"
SINKS = ("sinks", "attention_sink_bias")  # parameters that take a share of attention for nothing
LOW = -1e4  # a sink that takes none
FAR, HIGH = 10**6, 1e6  # a window or chunk beyond every sequence, a cap above every logit
NEUTRAL: dict[str, tuple[str, Any]] = {  # attribute of the config: what the fault is called, value without effect
    "sliding_window": ("no window", FAR),
    "sliding_window_size": ("no window", FAR),
    "attention_window_size": ("no window", FAR),
    "local_attention": ("no window", FAR),
    "window_size": ("no window", FAR),
    "attention_chunk_size": ("no chunks", FAR),
    "attn_logit_softcapping": ("no softcap of attention", HIGH),
    "final_logit_softcapping": ("no softcap of logits", HIGH),
    "logits_soft_cap": ("no softcap of logits", HIGH),
    "output_logit_soft_cap": ("no softcap of logits", HIGH),
    "logits_scaling": ("logits not scaled", 1.0),
    "logit_scale": ("logits not scaled", 1.0),
    "lm_head_multiplier": ("logits not scaled", 1.0),
    "embedding_multiplier": ("embedding not scaled", 1.0),
    "residual_multiplier": ("residuals not scaled", 1.0),
    "attention_multiplier": ("attention not scaled", 1.0),
    "routed_scaling_factor": ("experts not scaled", 1.0),
}
DEFAULT_ROPE = {"rope_type": "default"}


@torch.no_grad()
def planted(model: PreTrainedModel, folder: Path, rollouts: Rollouts) -> dict[str, float]:
    """Name of each fault that shows: the most nats by which it moves a token's log-prob."""
    longest = max(rollouts.sequences, key=len)
    found = {LEAK: leak(model, rollouts)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        found["a position left out"] = _moved(model, longest, _gap(longest))
        found["positions begin late"] = _moved(model, rollouts.sequences[0], _late(rollouts.sequences[0]))
        if not _ropes_by_length(model.config.get_text_config()) and found["positions begin late"] < 1e-3:
            del found["positions begin late"]  # attention by distance
    expected = plain.token_logprobs(model, longest)
    for name, changed in neutral(model.config):
        other = plain.load(folder, changed)
        distance = _distance(plain.token_logprobs(other, longest), expected)
        found[name] = max(distance, found.get(name, 0.0))
    if names := buffers(model):
        have = dict(model.named_buffers())
        found[f"without {names[0].rpartition('.')[2]}"] = _changed(model, [have[name] for name in names], 0.0, longest)
    if sinks := [p for name, p in model.named_parameters() if name.endswith(SINKS)]:
        found["no attention sinks"] = _changed(model, sinks, LOW, longest)
    found = {name: moved for name, moved in found.items() if moved}
    return {LEAK: 0.0} | found  # that sequences see nothing of others cannot be switched off


def leak(model: PreTrainedModel, rollouts: Rollouts) -> float:
    """A sequence that goes on from another one."""
    first, second = rollouts.sequences[-1], rollouts.sequences[0]
    joined = plain.token_logprobs(model, torch.cat([first, second]))
    return _distance(joined[len(first) :], plain.token_logprobs(model, second))


def buffers(model: PreTrainedModel) -> list[str]:
    """Numbers that a folder holds and no optimizer changes."""
    have = dict(model.named_buffers())
    return [name for name in model.state_dict() if name in have and have[name].is_floating_point()]


def neutral(config: PretrainedConfig) -> Iterator[tuple[str, PretrainedConfig]]:
    """(fault, config with it) for each property that the config has."""
    for attribute, (name, value) in NEUTRAL.items():
        text = copy.deepcopy(config)
        inner = text.get_text_config()
        computed = isinstance(getattr(type(inner), attribute, None), property)
        now = None if computed else getattr(inner, attribute, None)
        if isinstance(now, int | float) and now != value:
            setattr(inner, attribute, value)
            yield name, text
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if "'rope_type'" in str(rope) and any(kind != "default" for kind in rope_types(config)):
        text = copy.deepcopy(config)
        text.get_text_config().rope_parameters = _default_rope(rope)
        yield "another rope scaling", text


def rope_types(config: PretrainedConfig) -> set[str]:
    """Of all kinds of layers."""
    return {rope["rope_type"] for rope in ropes(config.get_text_config()) if "rope_type" in rope}


def _default_rope(rope: dict[str, Any]) -> dict[str, Any]:
    kept = {name: _default_rope(value) if isinstance(value, dict) else value for name, value in rope.items()}
    keep = {"rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    if "rope_type" not in kept:
        return kept
    return {name: value for name, value in kept.items() if name in keep or isinstance(value, dict)} | DEFAULT_ROPE


def _ropes_by_length(config: PretrainedConfig) -> bool:
    return bool(rope_types(config) & {"dynamic", "longrope"})


def _gap(ids: Tensor) -> Tensor:  # [1, T]
    """Positions of which one in the middle is left out."""
    places = torch.arange(len(ids))
    return (places + (places >= len(ids) // 2))[None]


def _late(ids: Tensor) -> Tensor:  # [1, T]
    """Positions that go on from another sequence."""
    return torch.arange(40, 40 + len(ids))[None]


def _moved(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> float:
    """0 where the model takes no such positions: then that is no mistake that could be made."""
    expected = plain.token_logprobs(model, ids)
    try:
        return _distance(plain.token_logprobs(model, ids, position_ids=positions), expected)
    except (IndexError, RuntimeError):
        return 0.0


def _changed(model: PreTrainedModel, tensors: Sequence[Tensor], value: float, ids: Tensor) -> float:
    """How far log-probs move while all of `tensors` are `value`."""
    expected = plain.token_logprobs(model, ids)
    kept = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.fill_(value)
    found = _distance(plain.token_logprobs(model, ids), expected)
    for tensor, before in zip(tensors, kept, strict=True):
        tensor.copy_(before)
    return found


def _distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()
