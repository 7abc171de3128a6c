import math

import pytest
import torch

from spmd_rl.losses import LOSSES, Limits, LossSums, Rows, decoupled, gspo, k3, ppo, tis


def rows(current: list[float], *, proximal=None, behavior=None, advantages=None, sequence=None) -> Rows:
    n = len(current)
    return Rows(
        current=torch.tensor(current, requires_grad=True),
        proximal=torch.tensor(current if proximal is None else proximal),
        behavior=torch.tensor(current if behavior is None else behavior),
        advantages=torch.tensor([1.0] * n if advantages is None else advantages),
        sequence=torch.tensor([0] * n if sequence is None else sequence, dtype=torch.int64),
    )


def gradient(batch: Rows, result: LossSums) -> list[float]:
    return torch.autograd.grad(result.total, batch.current)[0].tolist()


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_plain_policy_gradient(name: str) -> None:
    batch = rows([-0.5, -1.5, -3.0], advantages=[1.0, -2.0, 0.5])
    result = LOSSES[name]()(batch)
    expected = [-1.0, 2.0, -0.5]
    if name == "gspo":  # one ratio for the sequence: each token gets the mean advantage
        expected = [0.5 / 3] * 3
    assert gradient(batch, result) == pytest.approx(expected)
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
    batch = rows([math.log(ratio)], behavior=[0.0], proximal=[0.0], advantages=[advantage])
    result = ppo(batch, Limits(clip_low=0.1, clip_high=0.2))
    assert result.total.item() == pytest.approx(loss)
    assert gradient(batch, result) == pytest.approx([slope])
    assert result.sums["clip_share"] == (slope == 0)


def test_decoupled_clips_against_proximal_and_weighs_by_the_capped_step_from_behavior() -> None:
    log = math.log
    batch = rows(
        [log(1.1), log(1.1) + log(1.5), log(1.5)], proximal=[0.0, log(1.5), log(3.0)], behavior=[0.0, 0.0, 0.0]
    )
    result = decoupled(batch, Limits(clip_low=0.2, clip_high=0.2, importance_cap=2.0))
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
    result = decoupled(batch, Limits())
    assert result.maxima["ratio_max"] == 1
    assert gradient(batch, result) == pytest.approx([-math.exp(0.2)])


def test_tis_is_policy_gradient_times_the_truncated_weight() -> None:
    batch = rows([-1.0, -1.0], behavior=[-2.0, -1.5], advantages=[1.0, -1.0])
    result = tis(batch, Limits(importance_cap=2.0))
    assert gradient(batch, result) == pytest.approx([-2.0, math.exp(0.5)])
    assert result.sums["importance_capped_share"] == 1
    assert result.maxima["importance_max"].item() == pytest.approx(math.e)


def test_cispo_keeps_a_gradient_where_the_weight_is_clipped() -> None:
    batch = rows([math.log(3.0), math.log(0.1)], behavior=[0.0, 0.0])
    result = LOSSES["cispo"](clip_low=0.5, clip_high=1.0)(batch)
    assert gradient(batch, result) == pytest.approx([-2.0, -0.5])
    assert result.sums["clip_share"] == 2


def test_gspo_has_one_ratio_for_each_sequence() -> None:
    batch = rows([0.2, 0.4, 0.1], proximal=[0.0] * 3, behavior=[0.0] * 3, sequence=[0, 0, 1])
    result = gspo(batch, Limits(clip_low=0.5, clip_high=0.5))
    assert result.total.item() == pytest.approx(-(2 * math.exp(0.3) + math.exp(0.1)))
    assert result.maxima["ratio_max"].item() == pytest.approx(math.exp(0.3))


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
    result = LOSSES[name]()(batch)
    (slope,) = torch.autograd.grad(result.total, logprobs)
    assert slope.tolist() == [-1.0, 0.0]
    if name in ("decoupled", "ppo", "gspo"):
        assert result.total.item() == -1.0


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_log_ratios_stay_finite(name: str, advantage: float) -> None:
    batch = rows(
        [0.0, -1000.0, 0.0], proximal=[-1000.0, 0.0, 0.0], behavior=[-1000.0, 0.0, -89.0], advantages=[advantage] * 3
    )
    result = LOSSES[name]()(batch)
    assert math.isfinite(result.total.item())
    assert all(map(math.isfinite, gradient(batch, result)))


@pytest.mark.parametrize("name", LOSSES)
def test_no_rows_give_zero(name: str) -> None:
    batch = rows([])
    result = LOSSES[name]()(batch)
    assert result.total.item() == 0
    assert all(value == 0 for value in (*result.sums.values(), *result.maxima.values()))


@pytest.mark.parametrize("name", LOSSES)
def test_zero_advantage_gives_no_gradient(name: str) -> None:
    batch = rows([-1.0, -2.0], behavior=[-0.5, -3.0], advantages=[0.0, 0.0])
    assert gradient(batch, LOSSES[name]()(batch)) == [0.0, 0.0]


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
    result = k3(torch.zeros(1), other)
    result.sum().backward()
    assert result.item() == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert other.grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-6)
