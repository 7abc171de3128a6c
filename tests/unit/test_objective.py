"""Losses, corrections and their sum; every number by hand."""

import math

import pytest
import torch
from torch import Tensor

from spmd_rl import config
from spmd_rl.objective.advantages import ADVANTAGES
from spmd_rl.objective.corrections import CORRECTIONS, LEVELS, REJECTIONS, Correction
from spmd_rl.objective.losses import KLS, LOSSES, Limits, Rows, k3
from spmd_rl.objective.objective import AGGREGATIONS, KL_PLACES, Objective, Sums
from spmd_rl.ranks.build_trainer import make_objective
from spmd_rl.trainer.critic import LEVELS as CREDIT_LEVELS

LOG = math.log
NONE = Correction(kind="none")


def rows(current: list[float], *, proximal=None, behavior=None, advantages=None, sequence=None) -> Rows:
    n = len(current)
    return Rows(
        current=torch.tensor(current, requires_grad=True),
        proximal=torch.tensor(current if proximal is None else proximal),
        behavior=torch.tensor(current if behavior is None else behavior),
        advantages=torch.tensor([1.0] * n if advantages is None else advantages),
        sequence=torch.tensor([0] * n if sequence is None else sequence, dtype=torch.int64),
    )


def run(batch: Rows, loss: str = "decoupled", *, entropy=None, reference=None, **settings: object) -> Sums:
    ones = torch.ones(len(batch.current), dtype=torch.float64)
    return Objective(loss=LOSSES[loss], **settings)(
        batch,
        entropy=torch.zeros_like(batch.current) if entropy is None else entropy,
        scale=ones,
        share=ones,
        reference=None if reference is None else torch.tensor(reference),
    )


def gradient(batch: Rows, result: Sums) -> list[float]:
    return torch.autograd.grad(result.total, batch.current)[0].tolist()


def test_config_names_every_choice_that_the_dicts_have() -> None:
    dicts = {
        "trainer.advantage": ADVANTAGES,
        "trainer.loss": LOSSES,
        "trainer.correction": CORRECTIONS,
        "trainer.correction_level": LEVELS,
        "trainer.reject": REJECTIONS,
        "trainer.aggregation": {"auto", *AGGREGATIONS},
        "trainer.kl": KLS,
        "trainer.kl_in": KL_PLACES,
        "critic.level": CREDIT_LEVELS,
    }
    assert config.USUAL.keys() == LOSSES.keys() and {usual[2] for usual in config.USUAL.values()} <= set(AGGREGATIONS)
    for key, choices in dicts.items():
        assert set(config.CHOICES[key]) == set(choices), key


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_plain_policy_gradient(name: str) -> None:
    batch = rows([-0.5, -1.5, -3.0], advantages=[1.0, -2.0, 0.5])
    result = run(batch, name)
    assert gradient(batch, result) == pytest.approx([-1.0, 2.0, -0.5])
    assert result.sums["clip_share"] == 0
    assert result.sums["importance_mean"] == 3
    assert result.maxima["ratio_max"] == 1


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 1.0, -1.2, 0.0),  # too far up, good: clipped
        (0.5, 1.0, -0.5, -0.5),  # far down, good: pulled back up
        (1.5, -1.0, 1.5, 1.5),  # far up, bad: pushed down
        (0.5, -1.0, 0.9, 0.0),  # far down, bad: clipped
        (1.1, 1.0, -1.1, -1.1),  # inside
    ],
)
def test_ppo_clips_low_and_high_on_their_own(ratio: float, advantage: float, loss: float, slope: float) -> None:
    batch = rows([LOG(ratio)], behavior=[0.0], proximal=[0.0], advantages=[advantage])
    result = run(batch, "ppo", limits=Limits(clip_low=0.1, clip_high=0.2))
    assert result.total.item() == pytest.approx(loss)
    assert gradient(batch, result) == pytest.approx([slope])
    assert result.sums["clip_share"] == (slope == 0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (4.0, -1.0, 3.0, 0.0),  # beyond the dual bound
        (2.0, -1.0, 2.0, 2.0),  # before it
        (4.0, -2.0, 6.0, 0.0),  # in units of the advantage
        (0.5, -1.0, 0.8, 0.0),  # the ordinary clip is as it was
        (4.0, 1.0, -1.2, 0.0),  # a good token never reaches it
    ],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(ratio: float, advantage: float, loss: float, slope: float) -> None:
    batch = rows([LOG(ratio)], behavior=[0.0], proximal=[0.0], advantages=[advantage])
    result = run(batch, "ppo", limits=Limits(clip_dual=3.0))
    assert result.total.item() == pytest.approx(loss)
    assert gradient(batch, result) == pytest.approx([slope])
    assert result.sums["clip_share"] == (slope == 0)


def test_decoupled_clips_against_proximal_and_weighs_by_the_capped_step_from_behavior() -> None:
    batch = rows(
        [LOG(1.1), LOG(1.1) + LOG(1.5), LOG(1.5)], proximal=[0.0, LOG(1.5), LOG(3.0)], behavior=[0.0, 0.0, 0.0]
    )
    result = run(batch)
    assert result.total.item() == pytest.approx(-(1.0 * 1.1 + 1.5 * 1.1 + 2.0 * 0.5), rel=1e-6)
    assert gradient(batch, result) == pytest.approx([-1.1, -1.65, -1.0], rel=1e-6)  # the weight has no gradient
    assert result.sums["importance_mean"].item() == pytest.approx(1.0 + 1.5 + 3.0)
    assert result.sums["importance_capped_share"] == 1
    assert result.maxima["importance_max"].item() == pytest.approx(3.0)


def test_decoupled_sends_no_gradient_into_the_proximal_policy() -> None:
    current = torch.tensor([-1.0], requires_grad=True)
    batch = Rows(
        current=current,
        proximal=current.detach(),
        behavior=torch.tensor([-1.2]),
        advantages=torch.ones(1),
        sequence=torch.zeros(1, dtype=torch.int64),
    )
    result = run(batch)
    assert result.maxima["ratio_max"] == 1
    assert gradient(batch, result) == pytest.approx([-math.exp(0.2)])


def test_truncated_policy_gradient_is_weighed_by_current_over_behavior() -> None:
    batch = rows([-1.0, -1.0], behavior=[-2.0, -1.5], advantages=[1.0, -1.0])
    result = run(batch, "reinforce")
    assert gradient(batch, result) == pytest.approx([-2.0, math.exp(0.5)])
    assert result.sums["importance_capped_share"] == 1
    assert result.maxima["importance_max"].item() == pytest.approx(math.e)


def test_cispo_keeps_a_gradient_where_the_weight_is_clipped() -> None:
    batch = rows([LOG(3.0), LOG(0.1)], behavior=[0.0, 0.0])
    result = run(batch, "cispo", limits=Limits(clip_low=0.5, clip_high=1.0))
    assert gradient(batch, result) == pytest.approx([-2.0, -0.5])
    assert result.sums["clip_share"] == 2


def test_gspo_has_one_ratio_for_each_sequence() -> None:
    batch = rows([0.2, 0.4, 0.1], proximal=[0.0] * 3, behavior=[0.0] * 3, sequence=[0, 0, 1])
    result = run(batch, "gspo", limits=Limits(clip_low=0.5, clip_high=0.5))
    assert result.total.item() == pytest.approx(-(2 * math.exp(0.3) + math.exp(0.1)))
    assert result.maxima["ratio_max"].item() == pytest.approx(math.exp(0.3))
    assert gradient(batch, result) == pytest.approx([-math.exp(0.3)] * 2 + [-math.exp(0.1)])


def test_gspo_clips_what_is_stale_from_the_start_and_needs_no_second_step() -> None:
    """The policy has not moved since the start of the batch, and is 1e-3 nats per token off the one that sampled."""
    batch = rows([-1.0, -2.0, -1.0, -2.0], behavior=[-1.002, -2.0, -0.998, -2.0], sequence=[0, 0, 1, 1])
    result = run(batch, "gspo", limits=Limits(clip_low=3e-4, clip_high=4e-4))
    assert gradient(batch, result) == pytest.approx([0.0, 0.0, -math.exp(-1e-3), -math.exp(-1e-3)])
    assert result.sums["clip_share"] == 2
    assert result.sums["importance_mean"].item() == pytest.approx(math.exp(2e-3) + math.exp(-2e-3) + 2)


def test_gspo_leaves_each_token_its_own_advantage() -> None:
    """GSPO-token: one ratio, here 1, and three advantages."""
    batch = rows([-0.5, -1.5, -3.0], advantages=[1.0, -2.0, 0.5])
    assert gradient(batch, run(batch, "gspo")) == pytest.approx([-1.0, 2.0, -0.5])


def test_gspo_is_anchored_on_the_policy_that_sampled_and_not_weighed_again() -> None:
    batch = rows([0.0, 0.0], proximal=[0.0, 0.0], behavior=[-1.0, -1.0])
    result = run(batch, "gspo", limits=Limits(clip_low=0.5, clip_high=5.0))
    assert gradient(batch, result) == pytest.approx([-math.e, -math.e])


@pytest.mark.parametrize(
    ("settings", "clip", "aggregation"),
    [
        ({}, (0.2, 0.28), "token_mean"),
        ({"loss": "gspo"}, (3e-4, 4e-4), "sequence_mean"),
        ({"loss": "gspo", "clip_high": 0.1, "aggregation": "token_mean"}, (3e-4, 0.1), "token_mean"),
        ({"loss": "cispo"}, (1.0, 4.0), "token_mean"),
    ],
)
def test_what_is_not_chosen_is_as_the_loss_has_it(settings: dict, clip: tuple, aggregation: str) -> None:
    chosen = config.from_tree({"model": {"path": "x"}, "env": {"a": {"path": "m:C"}}, "trainer": settings})
    assert chosen.trainer.clip == clip and chosen.trainer.aggregates_by == aggregation
    limits = make_objective(chosen).limits
    assert (limits.clip_low, limits.clip_high) == clip


def test_cispo_without_a_lower_bound_keeps_every_small_weight() -> None:
    batch = rows([LOG(1e-3), LOG(6.0)], behavior=[0.0, 0.0])
    result = run(batch, "cispo", limits=Limits(clip_low=1.0, clip_high=4.0))
    assert gradient(batch, result) == pytest.approx([-1e-3, -5])


RATIOS = [LOG(0.25), LOG(1.5), LOG(4.0)]  # proximal / behavior of three tokens, the first two of one sequence


@pytest.mark.parametrize(
    ("kind", "level", "weights"),
    [
        ("none", "token", [1.0, 1.0, 1.0]),
        ("truncate", "token", [0.5, 1.5, 2.0]),
        ("mask", "token", [0.0, 1.5, 0.0]),
        ("truncate", "sequence", [0.5, 0.5, 2.0]),  # products 0.375 and 4
        ("mask", "sequence", [0.0, 0.0, 0.0]),
        ("truncate", "geometric", [0.375**0.5, 0.375**0.5, 2.0]),
        ("mask", "geometric", [0.375**0.5, 0.375**0.5, 0.0]),
    ],
)
@pytest.mark.parametrize("loss", ["decoupled", "reinforce"])
def test_weights_of_each_correction_and_level(kind: str, level: str, weights: list[float], loss: str) -> None:
    batch = rows(RATIOS, behavior=[0.0] * 3, sequence=[0, 0, 1])
    result = run(batch, loss, correction=Correction(kind=kind, level=level, low=0.5, high=2.0))
    assert gradient(batch, result) == pytest.approx([-w for w in weights])
    assert result.denominator == 3  # a masked token still counts


def test_masks_leave_tokens_of_ppo_out_and_do_not_weigh_them_twice() -> None:
    batch = rows(RATIOS, behavior=[0.0] * 3, advantages=[-1.0] * 3)
    result = run(batch, "ppo", correction=Correction(kind="mask", low=0.2, high=2.0), limits=Limits(clip_low=0.9))
    assert gradient(batch, result) == pytest.approx([0.25, 1.5, 0.0])


@pytest.mark.parametrize(
    ("reject", "kept"), [("none", [1, 1, 1]), ("off_policy", [0, 0, 0]), ("off_policy_negative", [0, 1, 0])]
)
def test_sequences_that_the_policy_has_left_are_dropped(reject: str, kept: list[int]) -> None:
    batch = rows([0.0] * 3, behavior=[1.0] * 3, advantages=[-0.5, 0.25, -0.25], sequence=[0, 1, 2])
    result = run(batch, "reinforce", correction=Correction(kind="none", reject=reject, reject_above=0.1))
    assert gradient(batch, result) == pytest.approx([k * -a for k, a in zip(kept, [-0.5, 0.25, -0.25], strict=True)])
    assert result.denominator == sum(kept)
    assert result.sums["rejected_share"] == 3 - sum(kept)
    if not any(kept):
        assert result.total == 0


def test_rejection_looks_at_the_mean_over_the_whole_sequence() -> None:
    batch = rows([0.0, 0.0, 0.0], behavior=[1.0, -0.9, 0.11], sequence=[0, 0, 1])  # means 0.05 and 0.11
    result = run(batch, correction=Correction(reject="off_policy", reject_above=0.1))
    assert (result.denominator, result.sums["rejected_share"]) == (2, 1)


def test_scale_and_share_make_the_aggregation() -> None:
    """Two sequences of 1 and 3 tokens with losses 2 | 1 1 4."""
    batch = rows([0.0] * 4, advantages=[-2.0, -1.0, -1.0, -4.0], sequence=[0, 1, 1, 1])
    values = {}
    for name, aggregation in AGGREGATIONS.items():
        parts = [aggregation(n, longest=10) for n in (1, 3, 3, 3)]
        scale, share = (torch.tensor(p, dtype=torch.float64) for p in zip(*parts, strict=True))
        result = Objective(loss=LOSSES["decoupled"])(batch, entropy=torch.zeros(4), scale=scale, share=share)
        values[name] = result.total.item() / result.denominator.item()
    assert values == pytest.approx({"token_mean": 8 / 4, "sequence_mean": (2 + 2) / 2, "constant": 8 / (2 * 10)})


def test_entropy_is_a_bonus_with_gradient() -> None:
    entropy = torch.tensor([2.0, 3.0], requires_grad=True)
    result = run(rows([0.0, 0.0], advantages=[0.0, 0.0]), entropy=entropy, entropy_coefficient=0.1)
    assert result.total.item() == pytest.approx(-0.5)
    assert torch.autograd.grad(result.total, entropy)[0].tolist() == pytest.approx([-0.1, -0.1])


@pytest.mark.parametrize(
    ("kl", "value", "slope"),
    [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", math.exp(-0.5) - 0.5, 1 - math.exp(-0.5))],
)
def test_kl_to_the_reference_in_the_loss(kl: str, value: float, slope: float) -> None:
    batch = rows([-1.0], advantages=[0.0])
    result = run(batch, reference=[-1.5], kl=kl, kl_coefficient=2.0)
    assert result.total.item() == pytest.approx(2 * value)
    assert gradient(batch, result) == pytest.approx([2 * slope])
    assert result.sums["kl_reference"].item() == pytest.approx(value)


@pytest.mark.parametrize("name", KLS)
def test_gradient_of_each_kl_over_all_that_the_policy_may_sample(name: str) -> None:
    """k1 has none, so it regularises nothing in a loss; k2 has that of KL(policy || reference), k3 of the other way."""
    logits = torch.tensor([0.3, -1.2, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.5, 0.4, 0.1, 1.0], dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = {
        "k1": 0.0 * policy.sum(),
        "k2": (policy.exp() * (policy - reference)).sum(),
        "k3": (reference.exp() * (reference - policy)).sum(),
    }
    sampled = (policy.detach().exp() * KLS[name](policy, reference)).sum()
    (found,) = torch.autograd.grad(sampled, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(exact[name], logits)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_kl_to_the_reference_in_the_reward_is_paid_by_the_tokens_before_it() -> None:
    """k1 = 0.5, 1 | -0.25 at the start of the batch: the first token of a sequence pays for all of it."""
    batch = rows([-1.1, -1.3, -1.2], proximal=[-1.0] * 3, advantages=[1.0, 1.0, 2.0], sequence=[0, 0, 1])
    result = run(batch, "reinforce", correction=NONE, reference=[-1.5, -2.0, -0.75], kl_coefficient=0.1, kl_in="reward")
    assert gradient(batch, result) == pytest.approx([-(1 - 0.15), -(1 - 0.1), -(2 + 0.025)])


@pytest.mark.parametrize(
    ("advantage", "coefficient"),
    [("rloo", 0.1), ("gae", 0.0), ("reinforce_pp", 0.0), ("reinforce_pp_baseline", 0.0)],
)
def test_a_kl_in_the_reward_is_paid_once_where_the_advantages_are_made(advantage: str, coefficient: float) -> None:
    trainer = {"advantage": advantage, "kl_in": "reward", "kl_coefficient": 0.1}
    chosen = config.from_tree({"model": {"path": "x"}, "env": {"a": {"path": "m:C"}}, "trainer": trainer})
    assert make_objective(chosen).kl_coefficient == coefficient


@pytest.mark.parametrize("name", LOSSES)
def test_selected_rows_keep_a_nan_off_the_mask_out_of_value_and_gradient(name: str) -> None:
    logprobs, old = torch.zeros(2, requires_grad=True), torch.tensor([0.0, math.nan])
    mask = torch.tensor([True, False])
    current = logprobs[mask]
    batch = Rows(
        current=current,
        proximal=current.detach(),
        behavior=old[mask],
        advantages=torch.ones(1),
        sequence=torch.zeros(1, dtype=torch.int64),
    )
    result = run(batch, name)
    (slope,) = torch.autograd.grad(result.total, logprobs)
    assert slope.tolist() == [-1.0, 0.0]
    if name in ("decoupled", "ppo", "gspo"):
        assert result.total.item() == -1.0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_log_ratios_stay_finite(name: str, kind: str, level: str, advantage: float) -> None:
    batch = rows(
        [0.0, -1000.0, 0.0], proximal=[-1000.0, 0.0, 0.0], behavior=[-1000.0, 0.0, -89.0], advantages=[advantage] * 3
    )
    result = run(batch, name, correction=Correction(kind=kind, level=level))
    assert math.isfinite(result.total.item())
    assert all(map(math.isfinite, gradient(batch, result)))


@pytest.mark.parametrize("name", LOSSES)
def test_no_rows_give_zero(name: str) -> None:
    result = run(rows([]), name, correction=Correction(level="sequence", reject="off_policy"))
    assert result.total.item() == result.denominator.item() == 0
    assert all(value == 0 for value in (*result.sums.values(), *result.maxima.values()))


@pytest.mark.parametrize("name", LOSSES)
def test_zero_advantage_gives_no_gradient(name: str) -> None:
    batch = rows([-1.0, -2.0], behavior=[-0.5, -3.0], advantages=[0.0, 0.0])
    assert gradient(batch, run(batch, name)) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("difference", "value", "slope"),
    [
        (0.0, 0.0, 0.0),
        (1.0, math.e - 2, math.e - 1),
        (20.0, math.exp(20) - 21, math.exp(20) - 1),
        (89.0, math.exp(20) - 21, 0.0),
        (1000.0, math.exp(20) - 21, 0.0),
        (-1000.0, math.exp(-20) + 19, 0.0),
    ],
)
def test_k3_is_finite_in_value_and_gradient(difference: float, value: float, slope: float) -> None:
    other = torch.tensor([difference], requires_grad=True)
    result: Tensor = k3(torch.zeros(1), other)
    result.sum().backward()
    assert result.item() == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert other.grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-6)
