"""Credit by a critic's values, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spmd_rl.objective.losses import penalized
from spmd_rl.trainer.critic import Credit, Credited, credit, first_of_turn, value_losses
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.trainer.token_advantages import standardize

CPU = torch.device("cpu")


def micro(positions: list[int], sequence: list[int], rewards: list[float]) -> SimpleNamespace:
    return SimpleNamespace(
        positions=np.array(positions),
        sequence=np.array(sequence),
        advantages=np.array(rewards, np.float32)[np.array(sequence)],
    )


def test_tokens_are_credited_with_the_reward_at_the_end_of_their_own_sequence() -> None:
    batch = micro([3, 4, 9, 10], [0, 0, 1, 1], [1.0, -2.0])
    found = credit(batch, torch.tensor([0.0, 0.0, 0.5, -1.0]), Credit(lam=0.95))
    # second sequence: δ = -1 - 0.5 and -2 + 1, so -1.5 - 0.95 and -1
    assert found.advantages.tolist() == pytest.approx([0.95, 1.0, -2.45, -1.0])
    assert found.returns.tolist() == pytest.approx([0.95, 1.0, -1.95, -2.0])
    assert found.valued.all()


def test_every_token_pays_for_its_distance_from_the_reference() -> None:
    """Rewards of the first sequence: -0.1 · 0.5 and 1 - 0.1 · (-1); of the second -2 - 0.1 · 2."""
    batch = micro([3, 4, 9], [0, 0, 1], [1.0, -2.0])
    kl = torch.tensor([0.5, -1.0, 2.0])
    found = credit(batch, torch.tensor([0.25, 0.5, 0.0]), Credit(lam=0.5, gamma=0.9, kl_coefficient=0.1), kl)
    last = 1.1 - 0.5
    first = -0.05 + 0.9 * 0.5 - 0.25 + 0.9 * 0.5 * last
    assert found.advantages.tolist() == pytest.approx([first, last, -2.2])
    assert found.returns.tolist() == pytest.approx([first + 0.25, 1.1, -2.2])


def test_a_turn_pays_for_all_its_tokens() -> None:
    batch = micro([4, 5, 8, 9, 10], [0] * 5, [1.0])
    kl = torch.tensor([1.0, 2.0, 0.5, 0.5, 1.0])
    found = credit(batch, torch.zeros(5), Credit(lam=1.0, level="turn", kl_coefficient=0.1), kl)
    assert found.advantages.tolist() == pytest.approx([0.5, 0.5, 0.8, 0.8, 0.8])  # 1 - 0.2 - 0.3 and 1 - 0.2


def test_a_turn_is_one_action_valued_at_its_first_token() -> None:
    """Tokens 5 6 | 9 10 11 of one sequence: two turns, with a tool's answer between them."""
    batch = micro([4, 5, 8, 9, 10], [0] * 5, [1.0])
    found = credit(batch, torch.tensor([0.25, 7.0, 0.5, 7.0, 7.0]), Credit(lam=0.5, level="turn"))
    assert first_of_turn(batch).tolist() == [True, False, True, False, False]
    # last turn 1 - 0.5; first 0.5 - 0.25 + 0.5 · 0.5
    assert found.advantages.tolist() == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.5])
    assert found.returns.tolist() == pytest.approx([0.75, 0.75, 1.0, 1.0, 1.0])
    assert found.valued.tolist() == [True, False, True, False, False]


def test_adjacent_positions_of_two_sequences_are_two_turns() -> None:
    assert first_of_turn(micro([4, 5], [0, 1], [0.0, 0.0])).tolist() == [True, True]


def credited(advantages: list[float], **others: list) -> Credited:
    parts = {name: torch.tensor(value) for name, value in others.items()}
    zeros = torch.zeros(len(advantages))
    defaults = {"values": zeros, "returns": zeros, "valued": zeros == 0}
    return Credited(advantages=torch.tensor(advantages), **(defaults | parts))


def test_a_token_pays_for_its_own_distance_and_for_what_comes_after_it() -> None:
    """k1 of two sequences: 0.5 1 | -0.25."""
    found = penalized(
        torch.tensor([1.0, 1.0, 2.0]), torch.tensor([0.5, 1.0, -0.25]), torch.tensor([0, 0, 1]), coefficient=0.1
    )
    assert found.tolist() == pytest.approx([1 - 0.15, 1 - 0.1, 2 + 0.025])


def test_advantages_are_standardized_over_all_tokens_of_the_batch() -> None:
    first, nothing, second = standardize(
        [torch.tensor([1.0, 3.0]), None, torch.tensor([5.0])], TrainerRanks(group=None, device=CPU)
    )
    assert nothing is None
    scale = (8 / 3) ** 0.5
    assert [*first.tolist(), *second.tolist()] == pytest.approx([-2 / scale, 0, 2 / scale])


@pytest.mark.parametrize(
    ("value", "returns", "loss", "slope"),
    [
        (0.1, 1.0, 0.5 * 0.81 / 2, 0.5 * -0.9),  # near its old value 0
        (0.5, 1.0, 0.5 * 0.64 / 2, 0.0),  # moved beyond 0.2: the loss at 0.2, no gradient
        (0.5, 0.0, 0.5 * 0.25 / 2, 0.5 * 0.5),  # beyond, and away from the return: pulled back
    ],
)
def test_value_loss_is_clipped_around_the_value_at_the_start(
    value: float, returns: float, loss: float, slope: float
) -> None:
    values = torch.tensor([value, 9.0], requires_grad=True)
    start = credited([0.0, 0.0], values=[0.0, 0.0], returns=[returns, 0.0], valued=[True, False])
    losses = value_losses(values, start, Credit(clip=0.2, coefficient=0.5))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([loss, 0.0])
    assert values.grad.tolist() == pytest.approx([slope, 0.0])
