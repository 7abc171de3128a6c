"""Random weights that show differences, and rollouts that are ragged, short beside long, in groups that begin alike.

Given a model, fills it; given a seed, makes a share of a batch as `trainer.microbatch.cut` takes it.  Knows nothing of
what is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

GAIN = 1.5  # of each matrix; at 0.1 of it a layer hardly changes what goes through, and so hides its mistakes
NOISE = 0.2  # of norms, biases and whatever else starts as a constant
FIRST_TOKEN = 5  # special tokens mostly lie below: some models leave their positions out
GROUPS = ((19, (3, 26, 11)), (2, (1, 40)), (45, (5, 9)))  # tokens of a prompt, and of each of its replies


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Rollouts:
    """A `microbatch.Share`: n rollouts of T tokens, every one of whose replies is under the loss mask."""

    cu_seqlens: np.ndarray
    token_ids: np.ndarray
    loss_mask: np.ndarray
    behavior_logprobs: np.ndarray
    versions: np.ndarray
    ticket: np.ndarray
    group_id: np.ndarray
    advantage: np.ndarray
    usable: np.ndarray
    minibatch: np.ndarray

    @property
    def sequences(self) -> list[Tensor]:
        """[length] int64 of each rollout."""
        bounds = zip(self.cu_seqlens[:-1], self.cu_seqlens[1:], strict=True)
        return [torch.from_numpy(self.token_ids[a:b]).long() for a, b in bounds]


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """In place: matrices anew, N(0, GAIN² / inputs); what starts as a constant, N(0, NOISE²) beside it."""
    generator = torch.Generator().manual_seed(seed)
    buffers = dict(model.named_buffers())
    kept = [buffers[name] for name in model.state_dict() if name in buffers and buffers[name].is_floating_point()]
    for tensor in [*model.parameters(), *kept]:
        noise = torch.randn(tensor.shape, generator=generator)
        values = tensor.float()
        constant = tensor.ndim < 2 or values.mean().abs() > values.std() or not values.any()
        if tensor.ndim > 1 and (not constant or not values.any()):
            tensor.copy_(noise * (GAIN / tensor.shape[-1] ** 0.5))
        else:
            tensor.add_(NOISE * noise)


def tokens(num: int, vocab: int, seed: int) -> np.ndarray:
    """[num] int32."""
    return np.random.default_rng(seed).integers(min(FIRST_TOKEN, vocab - 1), vocab, num).astype(np.int32)


def rollouts(vocab: int, seed: int = 0) -> Rollouts:
    """Those of GROUPS."""
    ids, mask, groups = [], [], []
    for group, (prompt, replies) in enumerate(GROUPS):
        start = tokens(prompt, vocab, seed + group)
        for member, reply in enumerate(replies):
            ids.append(np.concatenate([start, tokens(reply, vocab, seed + 100 * (group + 1) + member)]))
            mask.append(np.arange(prompt + reply) >= prompt)
            groups.append(group)
    num, total = len(ids), sum(map(len, ids))
    return Rollouts(
        cu_seqlens=np.array([0, *accumulate(map(len, ids))]),
        token_ids=np.concatenate(ids),
        loss_mask=np.concatenate(mask),
        behavior_logprobs=np.zeros(total, np.float32),
        versions=np.zeros(total, np.int64),
        ticket=np.arange(num),
        group_id=np.array(groups),
        advantage=np.ones(num, np.float32),
        usable=np.ones(num, bool),
        minibatch=np.zeros(num, np.int32),
    )
