"""Whether what is trained was sampled by the model that is trained: the limits, and which side is likely wrong.

Checksums prove what bytes an engine received.  What it samples with may be copies of them, packed for the processor or
loaded by vLLM, beside keys, values and states that it keeps of running sequences: only sampled tokens show those.  The
log-probs stamped at sampling are compared with the trainers', who score the same tokens packed as in training.  Beside
them, to tell causes apart: the engine's own forward over each sequence, and the trainers' over each alone.

In float32 on CPUs, `exact`, both sides agree to rounding, and more than MOST_DIFFERENCE ends the run.  In bfloat16, and
in the float32 of GPUs whose kernels may round products to TF32, the mean k3 counts: MUCH_KL is warned of, by the
report, and MOST_KL ends the run.  In models of experts rounding may choose another expert, which moves single tokens
far: there the 99th percentile counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from spmd_rl.packing.packing import Packed, pack, unpack
from spmd_rl.types import Disagreement, Rollout

MOST_DIFFERENCE = 1e-3  # between log-probs; measured at most 4.8e-5 (SmolLM2-135M)
MUCH_KL = 1e-2  # nats per token; measured 1.4e-6 (tiny model, bfloat16 on CPUs)
MOST_KL = 0.5
FAR = 0.1  # nats: a token that differs by more is counted
WRONG_WEIGHTS = (
    "it does not compute with the weights that it received (their checksums are right), or not the trainers' model "
    "(rope, window, a layer)"
)
LEAKS = "the trainers' packed forward gives another result than each sequence alone: sequences see each other"
STALE = (
    "its forward over the whole sequence agrees: what it keeps of running sequences (keys, values, a state) is stale "
    "or wrong, or it samples at another temperature"
)


def _unknown() -> np.ndarray:
    return np.empty((0, 0), np.int16)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a difference may be."""

    exact: bool = False  # float32 on CPUs on both sides
    experts: bool = False  # the model routes tokens to experts

    def largest(self, difference: np.ndarray) -> float:
        """Of [N] differences of log-probs, the one that counts."""
        size = np.abs(difference)
        if not len(size):
            return 0.0
        return float(np.percentile(size, 99, method="lower") if self.experts else size.max())

    def broken(self, largest: float, kl: float) -> str:
        """What is too large, and the limit; "" where nothing is.  NaN is too large."""
        if self.exact and not largest <= MOST_DIFFERENCE:
            which = "the 99th percentile of tokens" if self.experts else "up to"
            return f"by {which} {largest:.3g} where float32 allows {MOST_DIFFERENCE:g}"
        if not kl <= MOST_KL:
            return f"by {kl:.3g} nats per token, the limit is {MOST_KL:g}"
        return ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    """An engine's half of a probe."""

    rank: int  # that leads the engine
    packed: Packed
    scores: np.ndarray  # [T] float32, by the engine's forward, at temperature 1; 0 for the first token of each sequence
    choices: np.ndarray = field(default_factory=_unknown)
    # [T, layers · k] int16, experts of each token in that forward; [., 0] where they are not known


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """A trainer rank's half: [T] float32 log-probs each, of the same tokens."""

    packed: np.ndarray  # as it would be trained, at the temperature of sampling; 0 off the loss mask
    alone: np.ndarray  # each sequence in a forward of its own, at that temperature
    plain: np.ndarray  # the same at temperature 1
    choices: np.ndarray = field(default_factory=_unknown)  # as an engine's, alone; -1 for last tokens

    def last(self, num: int) -> Scored:
        """Of the last tokens alone."""
        names = ("packed", "alone", "plain", "choices")
        return Scored(**{name: getattr(self, name)[-num:] for name in names})


def ends_of(packed: Packed) -> list[Rollout]:
    """The shortest and the longest sequence."""
    by_length = sorted(unpack(packed), key=lambda rollout: len(rollout.token_ids))
    return [by_length[0], by_length[-1]]


def behind(beside: Sequence[Rollout], packed: Packed) -> Packed:
    """What trainers score: these sequences first, which are not compared, then what was sampled; tickets from 0."""
    rollouts = [replace(rollout, ticket=ticket) for ticket, rollout in enumerate([*beside, *unpack(packed)])]
    return pack(rollouts, np.ones(len(rollouts), np.float32))


def k3(difference: np.ndarray) -> float:
    """KL(sampling, scoring) in nats per token, estimated from scored - sampled log-probs; 0 of none."""
    return float(np.mean(np.expm1(difference) - difference)) if len(difference) else 0.0


def whole_context(packed: Packed, version: int, *, recomputes: bool) -> np.ndarray:  # [T] bool
    """Tokens that `version` sampled from a context that it has computed from its start.

    With `recomputes` that is every token of the version; else those of sequences that no other version has begun.
    """
    mine: np.ndarray = packed.loss_mask & (packed.versions == version)
    if recomputes:
        return mine
    others = packed.loss_mask & (packed.versions != version)
    for start, end in zip(packed.cu_seqlens[:-1], packed.cu_seqlens[1:], strict=True):
        mine[start:end] &= np.cumsum(others[start:end]) == 0
    return mine


def compare(
    sampled: Sampled, scored: Sequence[Scored], *, version: int, limits: Limits, recomputes: bool
) -> dict[str, float]:
    """The worst of all trainer ranks, as metrics."""
    packed = sampled.packed
    whole = whole_context(packed, version, recomputes=recomputes)
    if not whole.any():
        raise RuntimeError(f"the engine of rank {sampled.rank} sampled no token for the probe of version {version}")
    kept = packed.loss_mask & (packed.versions == version) & ~whole
    inner = np.ones(len(whole), bool)  # tokens with something before them
    inner[packed.cu_seqlens[:-1]] = False
    measured = []
    for trainer in scored:
        differences = trainer.packed.astype(np.float64) - packed.behavior_logprobs
        forwards = (trainer.plain.astype(np.float64) - sampled.scores)[inner]
        between = (trainer.packed.astype(np.float64) - trainer.alone)[packed.loss_mask]
        values = {
            "probe/sampled_max": limits.largest(differences[whole]),
            "probe/sampled_kl": k3(differences[whole]),
            "probe/far": int((np.abs(differences[whole]) > FAR).sum()),
            "probe/max_difference": limits.largest(forwards),
            "probe/kl": k3(forwards),
            "probe/packed_max": limits.largest(between),
        }
        if kept.any():
            values["probe/kept_kl"] = k3(differences[kept])
        if sampled.choices.size and sampled.choices.shape == trainer.choices.shape:
            both = (trainer.choices >= 0).all(1)
            values["probe/flips"] = int((sampled.choices != trainer.choices)[both].any(1).sum())
        measured.append(values)
    return {"probe/tokens": int(whole.sum())} | together(measured)


def together(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of several comparisons, the largest of each; NaN where one is NaN."""
    names = dict.fromkeys(name for one in values for name in one)
    return {name: np.max([one[name] for one in values if name in one]).item() for name in names}


def assert_agreed(values: Mapping[str, float], *, rank: int, version: int, limits: Limits) -> None:
    """Disagreement, with the likely cause, where what `compare` measured breaks a limit."""
    forwards = limits.broken(values["probe/max_difference"], values["probe/kl"])
    if forwards:
        raise Disagreement(
            f"wrong weights in the engine of rank {rank}: at version {version} its log-probs differ from the "
            f"trainers' {forwards}: {WRONG_WEIGHTS}"
        )
    sampled = limits.broken(values["probe/sampled_max"], values["probe/sampled_kl"])
    if sampled:
        leaks = values["probe/packed_max"] > 0.5 * values["probe/sampled_max"]
        raise Disagreement(
            f"the engine of rank {rank} does not sample from the model that is trained: at version {version} the "
            f"log-probs of the tokens that it sampled differ from the trainers' {sampled}: {LEAKS if leaks else STALE}"
        )


def check_mismatch(values: Mapping[str, float], *, version: int, limits: Limits) -> None:
    """The same limits for the tokens of a batch that the trained version sampled; Disagreement where one is broken."""
    kl = values.get("trainer/mismatch_kl")
    if kl is None:
        return
    broken = limits.broken(values["trainer/mismatch_p99" if limits.experts else "trainer/mismatch_max"], kl)
    if broken:
        raise Disagreement(
            f"training version {version}: the log-probs of tokens that it sampled differ from the trainers' {broken}: "
            "an engine does not sample from the model that is trained, or an environment gives back other tokens than "
            "were sampled"
        )
