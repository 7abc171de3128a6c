"""Every loss, correction, rejection, KL, aggregation and advantage against the slow reference, values and gradients."""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from spmd_rl.objective.advantages import ADVANTAGES, overlong_penalty
from spmd_rl.objective.corrections import CORRECTIONS, LEVELS, REJECTIONS, Correction
from spmd_rl.objective.losses import KLS, LOSSES, Limits, Rows
from spmd_rl.objective.objective import AGGREGATIONS, Objective
from spmd_rl.trainer.critic import Credit, Credited, credit, value_losses
from tests import reference
from tests.reference import Choice, Segment

LENGTHS = [[3], [1], [4, 2], [5], [1, 1, 2]]  # loss tokens of the segments of each rollout
LIMITS = {"clip_low": 0.1, "clip_high": 0.15, "low": 0.75, "high": 1.3, "reject_above": 0.02, "longest": 6}
KL = [{}, *({"beta": 0.3, "kl": kl} for kl in KLS), {"beta": 0.3, "kl": "k1", "kl_in": "reward"}]
EVERY = list(itertools.product(LEVELS, REJECTIONS, range(len(KL)), AGGREGATIONS, (0.0, 0.1), (0.0, 1.2)))


def rollouts(seed: int = 0) -> list[list[Segment]]:
    """Ragged, off-policy: proximal some 0.3 nats per token from behavior, current as far from that."""
    random = np.random.default_rng(seed)

    def tensor(values: np.ndarray, *, gradient: bool = False) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, requires_grad=gradient)

    made = []
    for i, lengths in enumerate(LENGTHS):
        advantage, segments = (-1) ** i * (0.5 + i / 4), []
        for n in lengths:
            behavior = random.normal(-2, 0.5, n)
            proximal = behavior + random.normal(0.02, 0.3, n)
            segments.append(
                Segment(
                    current=tensor(proximal + random.normal(0.0, 0.2, n), gradient=True),
                    proximal=tensor(proximal),
                    behavior=tensor(behavior),
                    reference=tensor(behavior + random.normal(0, 0.4, n)),
                    entropy=tensor(random.uniform(0, 3, n), gradient=True),
                    advantage=tensor(np.full(n, advantage)),
                )
            )
        made.append(segments)
    return made


def objective_of(choice: Choice) -> Objective:
    """The package's."""
    return Objective(
        loss=LOSSES[choice.loss],
        limits=Limits(clip_low=choice.clip_low, clip_high=choice.clip_high, clip_dual=choice.clip_dual),
        correction=Correction(
            kind=choice.correction,
            level=choice.level,
            low=choice.low,
            high=choice.high,
            reject=choice.reject,
            reject_above=choice.reject_above,
        ),
        entropy_coefficient=choice.entropy,
        kl=choice.kl,
        kl_coefficient=choice.beta,
        kl_in=choice.kl_in,
    )


def ours(data: list[list[Segment]], choice: Choice) -> Tensor:
    """The same by the package: all segments in one micro-batch."""
    segments = [s for segments in data for s in segments]
    sizes = [sum(len(s.current) for s in segments) for segments in data for _ in segments]
    aggregation = partial(AGGREGATIONS[choice.aggregation], longest=choice.longest)
    weights = [aggregation(size) for size, s in zip(sizes, segments, strict=True) for _ in s.current]
    scale, share = (torch.tensor(column, dtype=torch.float64) for column in zip(*weights, strict=True))

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(s, name) for s in segments])

    result = objective_of(choice)(
        Rows(
            current=joined("current"),
            proximal=joined("proximal"),
            behavior=joined("behavior"),
            advantages=joined("advantage"),
            sequence=torch.repeat_interleave(
                torch.arange(len(segments)), torch.tensor([len(s.current) for s in segments])
            ),
        ),
        entropy=joined("entropy"),
        scale=scale,
        share=share,
        reference=joined("reference"),
    )
    return result.total / result.denominator if result.denominator else result.total


def gradients(value: Tensor, data: list[list[Segment]]) -> np.ndarray:
    leaves = [getattr(s, name) for name in ("current", "entropy") for segments in data for s in segments]
    found = torch.autograd.grad(value, leaves, allow_unused=True)
    return torch.cat([torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]).numpy()


def compare(loss: str, correction: str, settings: list[tuple]) -> None:
    data = rollouts()
    for level, reject, kl, aggregation, entropy, dual in settings:
        choice = Choice(
            loss=loss, correction=correction, level=level, reject=reject, aggregation=aggregation, entropy=entropy,
            clip_dual=dual, **LIMITS, **KL[kl],
        )  # fmt: skip
        expected, found = reference.objective(data, choice), ours(data, choice)
        assert found.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12), choice
        np.testing.assert_allclose(
            gradients(found, data), gradients(expected, data), rtol=1e-9, atol=1e-12, err_msg=choice
        )


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_are_those_of_the_reference(loss: str, correction: str) -> None:
    """Every seventh of all combinations: each pair of choices is among them."""
    chosen = EVERY[::7]
    for a, b in itertools.combinations(range(6), 2):
        every = {(one[a], one[b]) for one in EVERY}
        assert {(one[a], one[b]) for one in chosen} == every
    compare(loss, correction, chosen)


@pytest.mark.full
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_combination_is_that_of_the_reference(loss: str, correction: str) -> None:
    compare(loss, correction, EVERY)


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"reinforce"}))
def test_the_data_of_the_comparison_are_clipped_masked_and_rejected_in_part(loss: str) -> None:
    """Else the comparison would show little: a gradient changes with each of the settings."""
    data, plain = rollouts(), Choice(loss=loss, correction="none", clip_low=0.9, clip_high=9.0)
    before = gradients(reference.objective(data, plain), data)
    for setting in (
        {"clip_low": 0.1, "clip_high": 0.15},
        {"correction": "mask", "low": 0.75, "high": 1.3},
        {"reject": "off_policy", "reject_above": 0.02},
        {"reject": "off_policy_negative", "reject_above": 0.02},
    ):
        after = gradients(reference.objective(data, Choice(**vars(plain) | setting)), data)
        lost = (after == 0) & (before != 0) if loss != "cispo" or "clip_low" not in setting else after != before
        assert 0 < lost.sum() < np.count_nonzero(before), setting


# ---- advantages

REWARDS = [[1.0, 0.0, 0.0, 1.0, 0.0], [0.3, -2.0, 5.0], [0.25, 0.5]]


@pytest.mark.parametrize("name", ["grpo", "grpo_population", "dr_grpo", "rloo"])
@pytest.mark.parametrize("rewards", REWARDS)
def test_advantages_of_a_group(name: str, rewards: list[float]) -> None:
    found = ADVANTAGES[name].of_group(np.array(rewards), np.ones(len(rewards), bool))
    assert found == pytest.approx(reference.group_advantages(name, rewards), rel=1e-6)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_advantages_over_the_tokens_of_a_batch(name: str) -> None:
    sizes, advantage = [3, 1, 7, 2, 20, 4, 6, 5], ADVANTAGES[name]
    staged = [advantage.of_group(np.array(r), np.ones(len(r), bool)) for r in REWARDS[:2]]
    found = advantage.of_batch(np.concatenate(staged), np.ones(8, bool), np.array(sizes))
    rewards = [r for group in REWARDS[:2] for r in group]
    if name == "reinforce_pp_baseline":
        rewards = [a for group in REWARDS[:2] for a in reference.group_advantages("dr_grpo", group)]
    expected = reference.reinforce_pp(rewards, [[0.0] * n for n in sizes], 0.0)
    assert found == pytest.approx([one[0] for one in expected], rel=1e-5)


@pytest.mark.parametrize("length", [0, 79, 80, 81, 90, 99, 100, 101])
def test_overlong_penalty(length: int) -> None:
    assert overlong_penalty(length, longest=100, buffer=20) == pytest.approx(reference.overlong(length, 100, 20))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.97, 0.0)])
@pytest.mark.parametrize("level", ["token", "turn"])
def test_credit_over_ragged_turns(level: str, gamma: float, lam: float) -> None:
    """Two rollouts with turns of 2, 3 and 1 tokens and of 4 and 1: what tools said between them is no action."""
    random = np.random.default_rng(1)
    turns = [[[4, 5], [9, 10, 11], [20]], [[3, 4, 5, 6], [8]]]
    positions = [t for rollout in turns for turn in rollout for t in turn]
    sequence = [i for i, rollout in enumerate(turns) for turn in rollout for _ in turn]
    values, kl, rewards = random.normal(size=11), random.normal(size=11), [1.0, -0.5]
    batch = SimpleNamespace(
        positions=np.array(positions), sequence=np.array(sequence), advantages=np.array(rewards)[sequence]
    )
    how = Credit(gamma=gamma, lam=lam, level=level, kl_coefficient=0.2)
    found = credit(batch, torch.tensor(values), how, torch.tensor(kl))
    advantages, returns, at = [], [], 0
    for rollout, reward in zip(turns, rewards, strict=True):
        actions = rollout if level == "turn" else [[t] for turn in rollout for t in turn]
        starts = np.cumsum([at, *map(len, actions)])
        paid = [-0.2 * kl[a:b].sum() for a, b in itertools.pairwise(starts)]
        paid[-1] += reward
        own = [values[a] for a in starts[:-1]]
        for action, a, v in zip(actions, reference.gae(paid, own, gamma, lam), own, strict=True):
            advantages += [a] * len(action)
            returns += [a + v] * len(action)
        at = starts[-1]
    assert found.advantages.tolist() == pytest.approx(advantages, rel=1e-5, abs=1e-6)
    assert found.returns.tolist() == pytest.approx(returns, rel=1e-5, abs=1e-6)


def test_value_loss() -> None:
    values, before, returns = (np.random.default_rng(2).normal(size=50) for _ in range(3))
    before = values + 0.3 * before
    start = Credited(
        advantages=torch.zeros(50), values=torch.tensor(before), returns=torch.tensor(returns),
        valued=torch.ones(50, dtype=torch.bool),
    )  # fmt: skip
    found = value_losses(torch.tensor(values), start, Credit(clip=0.2, coefficient=1.0))
    expected = [reference.value_loss(*one, 0.2) for one in zip(values, before, returns, strict=True)]
    assert found.tolist() == pytest.approx(expected)
