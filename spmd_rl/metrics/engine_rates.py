"""What the counters of engines say: figures of all of them together and, where there are several, of each.

Given every engine's counters now and then.  Knows nothing of ranks but their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

SPAN_S = 1.0  # that rates are taken over, at least: a shorter one says nothing
Counts = Mapping[int, Mapping[str, float]]  # an engine's counters, by the rank that leads it


class EngineFigures:
    """`count` whenever there are new counters; `rates` while the run goes on, `within` and `summary` at its end.

    Example: a reader that asks once a step gets the rates of that step, whoever counts in between.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._newest: tuple[float, Counts] | None = None  # with its time
        self._read: dict[str, list[tuple[float, Counts]]] = {}  # by reader, the newest and back to SPAN_S before it
        self._window: list[tuple[float, Counts]] = []  # at the first admission, at the last batch

    def count(self, counts: Counts) -> None:
        self._newest = (self._clock(), counts)

    def mark(self) -> None:
        """At the newest count the window begins in which there are batches to fill; called again, it ends."""
        assert self._newest is not None
        self._window = [*self._window[:1], self._newest]

    def rates(self, reader: str) -> dict[str, float]:
        """Metrics from the count that this reader saw last to the newest one; of SPAN_S at least."""
        if self._newest is None:
            return {}
        counted = self._read.setdefault(reader, self._window[:1])
        if not counted or counted[-1] is not self._newest:
            counted.append(self._newest)
        while len(counted) > 2 and self._newest[0] - counted[1][0] >= SPAN_S:
            del counted[0]
        if len(counted) < 2:
            return {}
        each = _between(counted[0], counted[-1])
        total = _together(list(each.values()))
        several = each if len(each) > 1 else {}
        return {f"engine/{name}": value for name, value in total.items()} | {
            f"engine/rank{rank}/{name}": value for rank, own in several.items() for name, value in own.items()
        }

    @property
    def within(self) -> dict[str, float]:
        """Figures of all engines over the window; none before it has ended."""
        return _together(list(_between(*self._window).values())) if len(self._window) == 2 else {}

    def summary(self) -> dict[str, dict[str, float | None]]:
        """Each engine over the run."""
        within = _between(*self._window) if len(self._window) == 2 else {}
        return {
            f"rank{rank}": {
                "rollouts": counts["rollouts"],
                "tokens": counts["tokens"],
                "idle": within[rank]["idle"] if within else None,
                "updates": counts["swaps"],
                "mean_pause_s": counts["pause_s"] / max(counts["swaps"], 1),
                "mean_recompute_s": counts["recompute_s"] / max(counts["swaps"], 1),
            }
            for rank, counts in (self._newest[1] if self._newest else {}).items()
        }


def _between(first: tuple[float, Counts], last: tuple[float, Counts]) -> dict[int, dict[str, float]]:
    """Figures of each engine between two counts."""
    (before, old), (after, new) = first, last
    seconds = max(after - before, 1e-9)
    return {
        rank: {
            "tokens_per_s": (counts["tokens"] - old[rank]["tokens"]) / seconds,
            "recompute": (counts["recompute_s"] - old[rank]["recompute_s"]) / seconds,
            "idle": max(0.0, 1.0 - (counts["busy_s"] - old[rank]["busy_s"]) / seconds),
            "running": (counts["slot_s"] - old[rank]["slot_s"]) / seconds,
            "waiting": (counts["waiting_s"] - old[rank]["waiting_s"]) / seconds,
            "kv_waiting": (counts["kv_waiting_s"] - old[rank]["kv_waiting_s"]) / seconds,
            **{name: counts[name] for name in ("rollouts", "kv_used", "version")},
        }
        for rank, counts in new.items()
    }


def _together(each: list[dict[str, float]]) -> dict[str, float]:
    how: dict[str, Callable[[list[float]], float]] = {
        "tokens_per_s": sum,
        "running": sum,
        "waiting": sum,
        "kv_waiting": sum,
    }
    how |= {"recompute": _mean, "idle": _mean, "kv_used": max}
    return {name: combine([own[name] for own in each]) for name, combine in how.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
