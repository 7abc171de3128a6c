"""PPO's critic: values of the states before each loss token, advantages from them, and the loss that trains them.

Given log-prob-like tensors of a micro-batch.  Credit goes to tokens, or to turns: a turn is one action, valued at its
first token, and all its tokens share its advantage.  The rollout's reward (the `advantage` of the batch) comes with its
last token or turn; every token may pay for its distance from a reference (Ziegler et al. 2019, arXiv:1909.08593;
Ouyang et al. 2022, arXiv:2203.02155): r_t = [t is the last] · R - β · (log policy_t - log reference_t), the policy as
it was at the start of the batch.  Knows nothing of models, shards or how values are computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spmd_rl.objective.advantages import gae
from spmd_rl.trainer.microbatch import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """How values become advantages."""

    gamma: float = 1.0
    lam: float = 0.95
    level: str = "token"  # of LEVELS
    clip: float = 0.2  # a value may move this far from that at the start of the batch before its gradient is cut
    coefficient: float = 0.5  # of the value loss in the objective
    kl_coefficient: float = 0.0  # β of the KL to the reference in the rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class Credited:
    """What the loss tokens of a micro-batch are trained with, for all steps of its batch."""

    advantages: Tensor  # [N] float32, before standardization
    values: Tensor  # [N] float32, at the start of the batch
    returns: Tensor  # [N] float32, what the values should have been
    valued: Tensor  # [N] bool, the tokens whose value is trained


def every_token(micro: MicroBatch) -> np.ndarray:  # [N] bool
    return np.ones(len(micro.positions), np.bool_)


def first_of_turn(micro: MicroBatch) -> np.ndarray:  # [N] bool
    """A turn begins where the token before it is not under the loss mask, or of another sequence."""
    first = np.ones(len(micro.positions), np.bool_)
    first[1:] = (np.diff(micro.positions) != 1) | (np.diff(micro.sequence) != 0)
    return first


LEVELS = {"token": every_token, "turn": first_of_turn}


def credit(
    micro: MicroBatch,
    values: Tensor,  # [N]
    how: Credit,
    kl: Tensor | None = None,  # [N] log policy - log reference; needed where kl_coefficient is not 0
) -> Credited:
    """By GAE.  A turn pays for all its tokens."""
    seen = values.double().cpu().numpy()
    steps = np.flatnonzero(LEVELS[how.level](micro))  # [M] first token of each action
    lengths = np.diff(np.r_[steps, len(seen)])
    sequence = micro.sequence[steps]
    last = np.r_[sequence[1:] != sequence[:-1], True]
    rewards = np.where(last, micro.advantages[steps], 0.0)
    if how.kl_coefficient:
        assert kl is not None
        rewards = rewards - how.kl_coefficient * np.add.reduceat(kl.double().cpu().numpy(), steps)
    advantages = np.zeros(len(steps))
    for i in np.unique(sequence):
        mine = np.flatnonzero(sequence == i)
        advantages[mine] = gae(
            rewards[mine], seen[steps[mine]], np.ones(len(mine), np.bool_), gamma=how.gamma, lam=how.lam
        )
    returns = advantages + seen[steps]
    valued = np.zeros(len(seen), np.bool_)
    valued[steps] = True

    def tensor(array: np.ndarray, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.from_numpy(array).to(values.device, dtype)

    return Credited(
        advantages=tensor(np.repeat(advantages, lengths)),
        values=values,
        returns=tensor(np.repeat(returns, lengths)),
        valued=tensor(valued, torch.bool),
    )


def value_losses(values: Tensor, credited: Credited, how: Credit) -> Tensor:  # [N], with gradient
    """max((V - R)², (clip(V, V_old ± clip) - R)²) / 2 where a value is trained (Schulman et al. 2017)."""
    near = credited.values + (values - credited.values).clamp(-how.clip, how.clip)
    worst = torch.maximum((values - credited.returns).square(), (near - credited.returns).square())
    return how.coefficient * torch.where(credited.valued, worst / 2, torch.zeros_like(worst))
