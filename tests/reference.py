"""The objective as the papers write it: float64, one sequence after another, nothing packed, nothing shared.

Written from the papers and from docs/algorithms.md, not from the package, of which it imports nothing; autograd makes
its gradients.  Slow on purpose.

A rollout is a list of segments, a segment the loss tokens of one context.  All tensors are [n] float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Segment:
    current: Tensor  # log-probs with gradient
    proximal: Tensor
    behavior: Tensor
    reference: Tensor
    entropy: Tensor  # with gradient
    advantage: Tensor  # of each token


@dataclass(frozen=True, kw_only=True)
class Choice:
    loss: str = "decoupled"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 0.0
    correction: str = "truncate"
    level: str = "token"
    low: float = 0.0
    high: float = 2.0
    reject: str = "none"
    reject_above: float = 0.1
    aggregation: str = "token_mean"
    longest: int = 10
    entropy: float = 0.0
    kl: str = "k3"
    beta: float = 0.0
    kl_in: str = "loss"


Rollout = Sequence[Segment]


def objective(rollouts: Sequence[Rollout], choice: Choice) -> Tensor:
    """The number that an optimizer step goes down on: sum over tokens / denominator."""
    total, denominator = sums(rollouts, choice)
    return total / denominator if denominator else total


def sums(rollouts: Sequence[Rollout], choice: Choice) -> tuple[Tensor, float]:
    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for rollout in rollouts:
        length = sum(len(segment.current) for segment in rollout)
        for segment in rollout:
            losses, kept = token_losses(segment, choice), is_kept(segment, choice)
            for t in range(len(losses)):
                if kept[t]:
                    total = total + losses[t] * scale(choice, length)
                    denominator += 1.0 if choice.aggregation == "token_mean" else 1.0 / length
    return total, denominator


def scale(choice: Choice, length: int) -> float:
    """token mean: DAPO eq. 8; mean of means: GRPO eq. 3; a constant: Dr. GRPO, figure 1."""
    return {"token_mean": 1.0, "sequence_mean": 1.0 / length, "constant": 1.0 / choice.longest}[choice.aggregation]


def token_losses(s: Segment, choice: Choice) -> list[Tensor]:
    """What each token adds: weight · policy loss + β · KL - c · entropy."""
    advantage = s.advantage
    if choice.beta and choice.kl_in == "reward":  # r_t = [last] R - β k1_t, whose sum from t on is the return
        distance = s.proximal - s.reference
        advantage = torch.stack([a - choice.beta * distance[t:].sum() for t, a in enumerate(advantage)])
    losses = []
    for t in range(len(s.current)):
        loss = weight(s, choice, t) * policy_loss(s, choice, advantage[t], t)
        if choice.beta and choice.kl_in == "loss":
            loss = loss + choice.beta * estimate(choice.kl, s.current[t], s.reference[t])
        losses.append(loss - choice.entropy * s.entropy[t])
    return losses


def policy_loss(s: Segment, choice: Choice, a: Tensor, t: int) -> Tensor:
    current = s.current[t]
    if choice.loss == "reinforce":  # Williams 1992
        return -a * current
    if choice.loss == "cispo":  # MiniMax-M1, eq. 4 and 5: sg(clip(r)) A log π
        r = (current - s.behavior[t]).exp().detach()
        return -clip(r, choice) * a * current
    if choice.loss == "gspo":  # eq. 14: s_t = sg(s) · π_t / sg(π_t)
        mean = (s.current - s.behavior).mean().detach()
        ratio = mean.exp() * (current - current.detach()).exp()
    elif choice.loss == "ppo":  # Schulman et al. 2017, eq. 7
        ratio = (current - s.behavior[t]).exp()
    elif choice.loss == "decoupled":  # Hilton et al. 2022: the clip is around the proximal policy
        ratio = (current - s.proximal[t]).exp()
    else:
        raise ValueError(choice.loss)
    surrogate = torch.minimum(ratio * a, clip(ratio, choice) * a)
    if choice.clip_dual and a < 0:  # Ye et al. 2020, eq. 5
        surrogate = torch.maximum(surrogate, choice.clip_dual * a)
    return -surrogate


def clip(ratio: Tensor, choice: Choice) -> Tensor:
    return ratio.clamp(1 - choice.clip_low, 1 + choice.clip_high)


def weight(s: Segment, choice: Choice, t: int) -> float:
    """IMPALA's and TIS's truncation, IcePop's and MIS's mask."""
    if choice.correction == "none":
        return 1.0
    current = s.current.detach()
    judged = at_level((current if choice.loss == "reinforce" else s.proximal) - s.behavior, choice.level, t)
    own = 1.0 if choice.loss in ("ppo", "cispo", "gspo") else judged
    if choice.correction == "truncate":
        return min(max(own, choice.low), choice.high)
    return own if choice.low <= judged <= choice.high else 0.0


def at_level(log: Tensor, level: str, t: int) -> float:
    return math.exp({"token": log[t], "sequence": log.sum(), "geometric": log.mean()}[level])


def is_kept(s: Segment, choice: Choice) -> list[bool]:
    """DeepSeek-V3.2, eq. 9: a sequence with mean log(behavior / current) above δ is left out, there if A < 0."""
    moved = float((s.behavior - s.current.detach()).mean()) > choice.reject_above
    advantage = s.advantage
    if choice.beta and choice.kl_in == "reward":
        distance = s.proximal - s.reference
        advantage = torch.stack([a - choice.beta * distance[t:].sum() for t, a in enumerate(advantage)])
    return [
        not moved or choice.reject == "none" or (choice.reject == "off_policy_negative" and float(a) >= 0)
        for a in advantage
    ]


def estimate(name: str, policy: Tensor, reference: Tensor) -> Tensor:
    """Schulman, "Approximating KL divergence": of KL(policy || reference) on samples of the policy."""
    log_r = reference - policy
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": log_r.exp() - 1 - log_r}[name]


# ---- advantages


def group_advantages(name: str, rewards: Sequence[float]) -> list[float]:
    """Of the rollouts of one prompt."""
    k, found = len(rewards), []
    mean = sum(rewards) / k
    for i, r in enumerate(rewards):
        others = [rewards[j] for j in range(k) if j != i]
        unbiased = math.sqrt(sum((x - mean) ** 2 for x in rewards) / (k - 1))
        population = math.sqrt(sum((x - mean) ** 2 for x in rewards) / k)
        found.append(
            {
                "grpo": (r - mean) / unbiased,
                "grpo_population": (r - mean) / population,
                "dr_grpo": r - mean,
                "rloo": r - sum(others) / (k - 1),
            }[name]
        )
    return found


def reinforce_pp(rewards: Sequence[float], distances: Sequence[Sequence[float]], beta: float) -> list[list[float]]:
    """REINFORCE++, eq. 8 to 10: A_t = r - β Σ_later KL, standardised over all tokens of the batch."""
    every = [[r - beta * sum(d[t:]) for t in range(len(d))] for r, d in zip(rewards, distances, strict=True)]
    flat = [a for one in every for a in one]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((a - mean) ** 2 for a in flat) / len(flat))
    return [[(a - mean) / std for a in one] for one in every]


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Schulman et al. 2015, eq. 16: A_t = Σ_l (γλ)^l δ_{t+l}, as a sum."""
    after = [*values[1:], 0.0]
    delta = [r + gamma * w - v for r, v, w in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, len(delta))) for t in range(len(delta))]


def overlong(length: int, longest: int, buffer: int) -> float:
    """DAPO, eq. 13."""
    if length <= longest - buffer:
        return 0.0
    return ((longest - buffer) - length) / buffer if length <= longest else -1.0


def value_loss(value: float, before: float, ret: float, clip: float) -> float:
    """PPO's clipped value loss, 1/2 max(…)²."""
    near = before + min(max(value - before, -clip), clip)
    return max((value - ret) ** 2, (near - ret) ** 2) / 2
