"""The reference: the plain model of `transformers`, its own attention, one sequence a forward.

Given a folder.  Knows nothing of how the trainer or an engine computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from spmd_rl.behavior.samples import Rollouts


def load(folder: Path, config: PretrainedConfig | None = None) -> PreTrainedModel:
    """In float32 and eval mode; `config`: in place of the folder's."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    model.eval()
    return model


def logits(model: PreTrainedModel, ids: Tensor, **inputs: Tensor) -> Tensor:  # [T] to [T, V]
    batch: Tensor = model(input_ids=ids[None], use_cache=False, **inputs).logits
    return batch[0]


def token_logprobs(model: PreTrainedModel, ids: Tensor, temperature: float = 1.0, **inputs: Tensor) -> Tensor:
    """[T] to [T - 1] float64: of each token but the first given those before it."""
    z = logits(model, ids[:-1], **{name: value[:, :-1] for name, value in inputs.items()}).double() / temperature
    return z.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def reply_logprobs(model: PreTrainedModel, rollouts: Rollouts) -> Tensor:  # [N] float64, in order
    """Of all tokens under the loss mask."""
    mask = torch.from_numpy(rollouts.loss_mask)
    bounds = zip(rollouts.cu_seqlens[:-1], rollouts.cu_seqlens[1:], strict=True)
    every = [
        token_logprobs(model, ids)[mask[a + 1 : b]] for ids, (a, b) in zip(rollouts.sequences, bounds, strict=True)
    ]
    return torch.cat(every)


def pulled_gradients(model: PreTrainedModel, logprobs: Tensor, pull: Tensor) -> dict[str, Tensor]:
    """Of the sum of log-probs times `pull`, by parameter."""
    model.zero_grad(set_to_none=True)
    (logprobs * pull.to(logprobs.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest relative distance of two gradients of a parameter; small ones count by the largest of all."""
    norms = {name: gradient.double().norm().item() for name, gradient in theirs.items()}
    floor = 1e-3 * max(norms.values(), default=0.0) + 1e-30
    distances = []
    for name in ours.keys() | theirs.keys():
        nothing = torch.zeros_like(ours[name] if name in ours else theirs[name])
        distance = (ours.get(name, nothing).double() - theirs.get(name, nothing).double()).norm().item()
        distances.append(distance / max(norms.get(name, 0.0), floor))
    return largest(distances)


def largest(values: Iterable[float]) -> float:
    """0 of none, NaN where one is."""
    return torch.tensor([0.0, *values], dtype=torch.float64).max().item()
