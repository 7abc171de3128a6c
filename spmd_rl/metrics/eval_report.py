"""The report of an evaluation: what was measured of each environment, and what was not."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb


@dataclass(frozen=True, kw_only=True)
class EnvReport:
    """One environment of one evaluation."""

    num_tasks: int
    samples: int  # rollouts per task
    reward: float | None  # mean of those measured; None, as below, where there are none
    solved: float | None  # share of those measured, avg@k with k = samples: every task weighs the same
    pass_at: dict[int, float | None]  # k -> unbiased pass@k, over the tasks with so many measured
    length: float | None  # mean sampled tokens of those measured
    truncated: float | None  # share of those measured that ended at the token limit
    num_failed: int  # rollouts that raised
    num_skipped: int  # whose prompt left no room for a reply
    oldest_version: int  # over all sampled tokens
    newest_version: int

    @property
    def num_rollouts(self) -> int:
        return self.num_tasks * self.samples

    @property
    def failed(self) -> float:
        """Share that raised."""
        return self.num_failed / self.num_rollouts

    @property
    def unmeasured(self) -> str:
        """Which of them have no reward, in words; "" where all have."""
        counts = (("failed", self.num_failed), ("skipped", self.num_skipped))
        return ", ".join(f"{end} {num} of {self.num_rollouts}" for end, num in counts if num)


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    eval_id: str
    envs: dict[str, EnvReport]


def pass_at(k: int, samples: int, solved: int) -> float:
    """1 - C(n-c, k) / C(n, k), unbiased (Chen et al. 2021, arXiv:2107.03374)."""
    return 1.0 - comb(samples - solved, k) / comb(samples, k)
