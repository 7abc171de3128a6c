"""Proximal log-probs without a forward: on the line between behavior and current, by versions.

Knows nothing of models or batches.
"""

from __future__ import annotations

import torch
from torch import Tensor


def loglinear(
    current: Tensor,  # [N] log-probs, detached
    behavior: Tensor,  # [N]
    versions: Tensor,  # [N] ints, that sampled each token; -1: unknown
    n: int,  # the version that is trained, which is the proximal policy
    progress: float,  # share of the batch's optimizer steps that are done, in [0, 1)
) -> Tensor:  # [N]
    """Log-probs at version n, with current at n + progress and behavior at `versions` (Li et al. 2025, A-3PO).

    behavior + (n - v) / (n + progress - v) · (current - behavior).  Exact at both ends: before the first step it is
    current itself, so that the ratio is 1; for a token that version n sampled it is behavior from then on.
    Example: age 1 and progress 0.5 lie at 2/3 of the way to current.
    """
    if progress == 0:
        return current
    age = (n - versions).clamp(min=0).to(current.dtype)
    way = torch.where(versions < 0, 1.0, age / (age + progress))
    return behavior + way * (current - behavior)
