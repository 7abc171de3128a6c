"""How long an episode takes: laws named on the command line, in seconds.

    fixed:x   uniform:a,b   integers:a,b   pareto:alpha[,least]   lognormal:mu,sigma   replay:RUN_DIR

Promises: the same law and seed give the same endless sequence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

BLOCK = 4096  # drawn at a time
Draw = Callable[[np.random.Generator, int], np.ndarray]  # (rng, N) -> [N] seconds

LAWS: dict[str, Callable[..., Draw]] = {
    "fixed": lambda x: lambda rng, n: np.full(n, x),
    "uniform": lambda low, high: lambda rng, n: rng.uniform(low, high, n),
    "integers": lambda low, high: lambda rng, n: rng.integers(int(low), int(high), n, endpoint=True).astype(float),
    "pareto": lambda alpha, least=1.0: lambda rng, n: least * (1.0 + rng.pareto(alpha, n)),
    "lognormal": lambda mu, sigma: lambda rng, n: rng.lognormal(mu, sigma, n),
}


def parse(text: str) -> Draw:
    """A law as written on the command line; ValueError says what is known."""
    name, _, rest = text.partition(":")
    if name == "replay":
        return _replay(Path(rest))
    try:
        numbers = [float(number) for number in rest.split(",")]
        draw = LAWS[name](*numbers)
        sample = draw(np.random.default_rng(0), 64)
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"--latency {text!r}: known are fixed:x, uniform:a,b, integers:a,b, pareto:alpha[,least], "
            "lognormal:mu,sigma, replay:RUN_DIR"
        ) from None
    if not (np.isfinite(sample).all() and (sample >= 0).all()):
        raise ValueError(f"--latency {text!r}: gives latencies below 0 or without end")
    return draw


def stream(draw: Draw, seed: int) -> Iterator[float]:
    """One latency after the other, for ever."""
    rng = np.random.default_rng(seed)
    while True:
        yield from draw(rng, BLOCK).tolist()


def _replay(run_dir: Path) -> Draw:
    """Drawn from what the rollouts of a run's batch log took."""
    seconds = [
        rollout["generation_s"]
        for path in sorted((run_dir / "batches").glob("*.json"))
        for rollout in json.loads(path.read_text(encoding="utf-8"))["rollouts"]
    ]
    if not seconds:
        raise ValueError(f"--latency replay:{run_dir}: no rollouts in {run_dir / 'batches'}/*.json")
    taken = np.array(seconds, np.float64)
    return lambda rng, n: rng.choice(taken, n)
