"""The trainer ranks as one: sums and maxima over their group, or over this process alone.

Promises that every rank gets the same numbers, and that without a group nothing is communicated.  Every method is a
collective of all trainer ranks.  Knows nothing of models or losses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

GATHERED = 64  # ints each rank can hand to the others


class TrainerRanks:
    """Collectives over the trainer ranks; group None is one rank."""

    def __init__(self, *, group: ProcessGroup | None, device: torch.device, counts: bool = True) -> None:
        self.group, self.device = group, device
        self.counts = counts  # False: another rank holds the same rollouts and speaks for them
        self.index = 0 if group is None else dist.get_rank(group)
        self.num = 1 if group is None else group.size()

    def sum(self, values: Tensor) -> Tensor:
        """In place, over all ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def total(self, values: Tensor) -> Tensor:
        """Sum over the ranks whose rollouts count."""
        return self.sum(values if self.counts else torch.zeros_like(values))

    def max(self, values: Tensor) -> Tensor:
        """In place, over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, mine: Sequence[int]) -> list[int]:
        """The ints ≥ 0 of all ranks whose rollouts count, in rank order; at most GATHERED of each."""
        mine = mine if self.counts else ()
        table = torch.full((self.num, GATHERED), -1, dtype=torch.int64, device=self.device)
        some = torch.tensor(list(mine)[:GATHERED], dtype=torch.int64)
        table[self.index, : len(some)] = some.to(self.device)
        return [value for value in self.max(table).flatten().tolist() if value >= 0]

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        self.sum(torch.zeros(1, device=self.device)).cpu()

    def _reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, op, group=self.group)
        return values
