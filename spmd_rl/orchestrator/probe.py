"""Whether engines compute what trainers compute: the same sequences, scored by both at the same version.

Checksums prove what bytes an engine received.  What it computes with may be copies of them, packed for the processor or
loaded by vLLM: only scores show those.  In float32 on CPUs, `exact`, both sides agree to rounding, and more than
MOST_DIFFERENCE ends the run.  In bfloat16, and in the float32 of GPUs whose kernels may round products to TF32, kernels
differ by more than a step of a small learning rate changes: there MUCH_KL is warned of, by the report.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from spmd_rl.types import Rollout

PROBE_TOKENS = 256  # scored, at least
MOST_DIFFERENCE = 1e-3  # between log-probs; measured at most 4.8e-5 (SmolLM2-135M); one version behind: 0.16 to 0.6
MUCH_KL = 1e-2  # nats per token; measured 1.4e-6 (tiny model, bfloat16 on CPUs)


def make_probe(rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Whole sequences, [T] tokens each, until PROBE_TOKENS are scored; again from the first if they do not reach."""
    sequences: list[np.ndarray] = []
    num_scored = 0
    for rollout in itertools.cycle([r for r in rollouts if len(r.context) > 1]):
        if num_scored >= PROBE_TOKENS:
            break
        sequences.append(rollout.context)
        num_scored += len(rollout.context) - 1
    return sequences


def compare_probe(
    trainer: np.ndarray,  # [T] log-probs, 0 where nothing is scored
    engines: Mapping[int, np.ndarray],  # by rank, the same; empty where an engine missed the probe
    *,
    exact: bool,
    version: int,
) -> dict[str, float]:
    """The worst of all engines as metrics; RuntimeError where one cannot hold the trainers' weights."""
    differences = {rank: trainer.astype(np.float64) - scores for rank, scores in engines.items() if len(scores)}
    worst = {"probe/missed": len(engines) - len(differences)}
    for rank, difference in differences.items():
        largest = float(np.abs(difference).max())
        if exact and not largest <= MOST_DIFFERENCE:  # NaN is not
            raise RuntimeError(
                f"wrong weights in the engine of rank {rank}: at version {version} its log-probs differ from the "
                f"trainers' by up to {largest:.3g} where float32 allows {MOST_DIFFERENCE:g}, though it received the "
                "weights that were sent (their checksums are equal): it does not compute with them"
            )
        worst["probe/kl"] = max(worst.get("probe/kl", 0.0), float(np.mean(np.expm1(difference) - difference)))
        worst["probe/max_difference"] = max(worst.get("probe/max_difference", 0.0), largest)
        worst["probe/tokens"] = int(np.count_nonzero(trainer))
    return worst
