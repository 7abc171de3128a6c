"""How old the data was when it was trained, per token and per rollout, exactly and in constant memory.

Age = index of the batch - version.  Of a rollout it is that of its head, split into versions in flight (head until it
reached the orchestrator) and in queue (from there to its batch).  Over usable rollouts and their loss-masked tokens,
which are those that the trainer's loss is divided by, whatever their advantage.  Tokens and rollouts without a version
(replayed, cached, external) are counted apart and enter no figure.

Given: batches.  Promises: a maximum is a true maximum; statistics of parts add up with `merge`.
Knows nothing of orders or bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from spmd_rl.types import NO_VERSION, Batch, Rollout

HISTOGRAMS = ("rollouts", "tokens", "in_flight", "in_queue")


class Histogram:
    """Counts of whole numbers from 0."""

    def __init__(self) -> None:
        self.counts = np.zeros(8, np.int64)

    def add(self, values: np.ndarray) -> None:  # [N] ints >= 0
        self._add_counts(np.bincount(values))

    def merge(self, other: Histogram) -> None:
        self._add_counts(other.counts)

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        return float(self.counts @ np.arange(len(self.counts))) / self.total if self.total else 0.0

    @property
    def max(self) -> int:
        return int(np.flatnonzero(self.counts)[-1]) if self.total else 0

    def percentile(self, q: float) -> int:
        """The least value with at least q % of the counts at or below it."""
        if not self.total:
            return 0
        return int(np.searchsorted(np.cumsum(self.counts), self.total * q / 100.0 - 1e-9))

    def _add_counts(self, counts: np.ndarray) -> None:
        if len(counts) > len(self.counts):
            self.counts = np.concatenate([self.counts, np.zeros(2 * len(counts) - len(self.counts), np.int64)])
        self.counts[: len(counts)] += counts


class AgeStats:
    """Of one batch, or of many."""

    def __init__(self) -> None:
        self.rollouts = Histogram()
        self.tokens = Histogram()
        self.in_flight = Histogram()  # finished version - head
        self.in_queue = Histogram()  # index of the batch - finished version
        self.unversioned_rollouts = 0
        self.unversioned_tokens = 0

    def add(self, batch: Batch, usable: Callable[[Rollout], bool]) -> None:
        trained = list(filter(usable, batch.rollouts))
        heads = np.array([r.head for r in trained], np.int64)
        live = heads != NO_VERSION
        finished = np.array([r.finished_version for r in trained], np.int64)
        self.unversioned_rollouts += int((~live).sum())
        heads, finished = heads[live], finished[live]
        self.rollouts.add(batch.index - heads)
        self.in_flight.add(finished - heads)
        self.in_queue.add(batch.index - finished)
        if trained:
            versions = np.concatenate([r.versions for r in trained])[np.concatenate([r.loss_mask for r in trained])]
            live = versions != NO_VERSION
            self.unversioned_tokens += int((~live).sum())
            self.tokens.add(batch.index - versions[live])

    def record(self) -> dict[str, object]:
        """As metrics of a batch: the summary, and all that `from_record` needs."""
        counts = {name: np.trim_zeros(getattr(self, name).counts, "b").tolist() for name in HISTOGRAMS}
        return {f"age/{name}": value for name, value in self.summary().items()} | {"age/counts": counts}

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> AgeStats:
        stats = cls()
        for name in HISTOGRAMS:
            getattr(stats, name).counts = np.array(values["age/counts"][name], np.int64)
        stats.unversioned_rollouts = values["age/unversioned_rollouts"]
        stats.unversioned_tokens = values["age/unversioned_tokens"]
        return stats

    def merge(self, other: AgeStats) -> None:
        for name in HISTOGRAMS:
            getattr(self, name).merge(getattr(other, name))
        self.unversioned_rollouts += other.unversioned_rollouts
        self.unversioned_tokens += other.unversioned_tokens

    def summary(self) -> dict[str, float]:
        """mean, p50, p99 and max per rollout and per token; means of the split; what had no version."""
        out: dict[str, float] = {}
        for name in ("rollouts", "tokens"):
            histogram: Histogram = getattr(self, name)
            short = name.removesuffix("s")
            out[f"{short}_mean"] = histogram.mean
            out[f"{short}_p50"] = histogram.percentile(50)
            out[f"{short}_p99"] = histogram.percentile(99)
            out[f"{short}_max"] = histogram.max
        out["in_flight_mean"] = self.in_flight.mean
        out["in_queue_mean"] = self.in_queue.mean
        out["unversioned_rollouts"] = self.unversioned_rollouts
        out["unversioned_tokens"] = self.unversioned_tokens
        return out
