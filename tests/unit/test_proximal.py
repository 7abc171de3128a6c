import pytest
import torch

from spmd_rl.trainer.proximal import loglinear

CURRENT, BEHAVIOR = torch.tensor([-1.0]), torch.tensor([-4.0])


@pytest.mark.parametrize(
    ("version", "progress", "expected"),
    [
        (5, 0.0, -1.0),  # before the first step current is the proximal policy, whoever sampled
        (7, 0.0, -1.0),
        (7, 0.5, -4.0),  # sampled by the version that is trained: behavior is the proximal policy
        (6, 0.5, -2.0),  # 1 of 1.5 versions on the way from -4 to -1
        (5, 0.5, -1.6),  # 2 of 2.5
        (6, 0.25, -1.6),  # 1 of 1.25
        (-1, 0.5, -1.0),  # unknown
    ],
)
def test_proximal_lies_between_behavior_and_current_by_versions(version: int, progress: float, expected: float) -> None:
    found = loglinear(CURRENT, BEHAVIOR, torch.tensor([version]), 7, progress)
    assert found.item() == pytest.approx(expected)
