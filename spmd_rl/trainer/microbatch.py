"""A share of a batch cut into minibatches (one optimizer step each) and micro-batches (one forward each).

Given the packed arrays of this rank's rollouts.  Promises: nothing is padded; a sequence is never split; a token that
no loss token depends on is not computed (the last loss token and what follows it); everything per loss token is
selected here, by index, so that values off the mask cannot reach the loss.  Rollouts that are not usable are not there
at all; those whose advantage is 0 are counted in the denominator, and skipped where that changes nothing else.
Deterministic.  Knows nothing of ranks, models or losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Share(Protocol):
    """What is read of a `Packed`: n rollouts of T tokens."""

    cu_seqlens: np.ndarray  # [n + 1] ints
    token_ids: np.ndarray  # [T] ints
    loss_mask: np.ndarray  # [T] bool
    behavior_logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] ints
    ticket: np.ndarray  # [n] ints
    advantage: np.ndarray  # [n] float32
    usable: np.ndarray  # [n] bool


Aggregation = Callable[[int], tuple[float, float]]  # loss tokens of a sequence -> (scale, share) of each of them


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MicroBatch:
    """n sequences of T input tokens, N of whose log-probs enter the loss."""

    token_ids: np.ndarray  # [T] int64
    cu_seqlens: list[int]  # [n + 1]
    rows: np.ndarray  # [N] int64, index of the input token whose hidden state predicts the loss token
    targets: np.ndarray  # [N] int64, the loss tokens
    behavior: np.ndarray  # [N] float32
    advantages: np.ndarray  # [N] float32
    versions: np.ndarray  # [N] int64
    sequence: np.ndarray  # [N] int64, index of the sequence
    scale: np.ndarray  # [N] float64, factor of the token's loss
    share: np.ndarray  # [N] float64, its part of the denominator
    tickets: tuple[int, ...]  # [n], of the rollouts; empty for the stand-in

    @property
    def is_stand_in(self) -> bool:
        return not self.tickets


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Minibatch:
    """What one rank gives to one optimizer step."""

    micro_batches: list[MicroBatch]
    num_loss_tokens: int  # also those of skipped sequences
    skipped_share: float = 0.0  # part of the denominator of skipped sequences


STAND_IN = MicroBatch(
    token_ids=np.zeros(1, np.int64),
    cu_seqlens=[0, 1],
    rows=np.zeros(1, np.int64),
    targets=np.zeros(1, np.int64),
    behavior=np.zeros(1, np.float32),
    advantages=np.zeros(1, np.float32),
    versions=np.full(1, -1, np.int64),
    sequence=np.zeros(1, np.int64),
    scale=np.zeros(1),
    share=np.zeros(1),
    tickets=(),
)
"""One token with weight 0: lets a rank without work take part in the collectives of a forward and backward."""


def cut(
    share: Share, *, num_minibatches: int, micro_batch_tokens: int, aggregation: Aggregation, skip_zero: bool
) -> list[Minibatch]:
    """`num_minibatches` parts of near equal numbers of rollouts, in the order of the share, each in micro-batches.

    skip_zero: sequences with advantage 0 have no gradient and are not computed.
    ValueError where the first token of a rollout is under the loss mask: no logits stand before it.
    """
    starts, ends = share.cu_seqlens[:-1], share.cu_seqlens[1:]
    for i, (a, b) in enumerate(zip(starts, ends, strict=True)):
        if b > a and share.loss_mask[a]:
            raise ValueError(
                f"ticket {share.ticket[i]}: the first token is under the loss mask, but nothing predicts it"
            )
    parts = np.array_split(np.arange(len(share.ticket)), num_minibatches)
    return [_minibatch(share, part, micro_batch_tokens, aggregation, skip_zero) for part in parts]


def merged(minibatches: Sequence[Minibatch]) -> Minibatch:
    """What several ranks give to one optimizer step, on one."""
    return Minibatch(
        micro_batches=[micro for m in minibatches for micro in m.micro_batches],
        num_loss_tokens=sum(m.num_loss_tokens for m in minibatches),
        skipped_share=sum(m.skipped_share for m in minibatches),
    )


def _minibatch(
    share: Share, part: np.ndarray, micro_batch_tokens: int, aggregation: Aggregation, skip_zero: bool
) -> Minibatch:
    positions, kept, lengths, num_loss_tokens, skipped_share = [], [], [], 0, 0.0
    for i in part:
        a, b = share.cu_seqlens[i], share.cu_seqlens[i + 1]
        trained = np.flatnonzero(share.loss_mask[a:b])
        if not len(trained) or not share.usable[i]:
            continue
        num_loss_tokens += len(trained)
        if skip_zero and share.advantage[i] == 0:  # a NaN advantage is not skipped, it is found by the step
            skipped_share += len(trained) * aggregation(len(trained))[1]
        else:
            kept.append(int(i))
            positions.append(trained)
            lengths.append(int(trained[-1]))  # inputs end before the last loss token
    bins = pack_bins(lengths, micro_batch_tokens)
    micro_batches = [_micro_batch(share, [kept[j] for j in b], [positions[j] for j in b], aggregation) for b in bins]
    return Minibatch(micro_batches=micro_batches, num_loss_tokens=num_loss_tokens, skipped_share=skipped_share)


def _micro_batch(
    share: Share, rollouts: list[int], positions: list[np.ndarray], aggregation: Aggregation
) -> MicroBatch:
    """Rollouts by index, with the positions of their loss tokens."""
    starts = [int(share.cu_seqlens[i]) for i in rollouts]
    lengths = [int(p[-1]) for p in positions]
    cu_seqlens = [0, *np.cumsum(lengths).tolist()]
    counts = [len(p) for p in positions]
    source = np.concatenate([p + start for p, start in zip(positions, starts, strict=True)])  # of loss tokens, in share
    rows = [p - 1 + offset for p, offset in zip(positions, cu_seqlens[:-1], strict=True)]
    inputs = [share.token_ids[s : s + n] for s, n in zip(starts, lengths, strict=True)]
    scales, shares = np.array([aggregation(n) for n in counts]).T
    return MicroBatch(
        token_ids=np.concatenate(inputs).astype(np.int64),
        cu_seqlens=cu_seqlens,
        rows=np.concatenate(rows).astype(np.int64),
        targets=share.token_ids[source].astype(np.int64),
        behavior=share.behavior_logprobs[source].astype(np.float32),
        advantages=np.repeat(share.advantage[rollouts], counts).astype(np.float32),
        versions=share.versions[source].astype(np.int64),
        sequence=np.repeat(np.arange(len(rollouts)), counts),
        scale=np.repeat(scales, counts),
        share=np.repeat(shares, counts),
        tickets=tuple(int(share.ticket[i]) for i in rollouts),
    )


def pack_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in bins of at most `budget` tokens, longest first into the first bin with room; ascending in a bin.

    A sequence longer than the budget has a bin to itself.  Example: 5 4 3 2 1 with budget 7 give [0, 3], [1, 2], [4].
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((b for b, free in enumerate(room) if lengths[i] <= free), None)
        if fits is None:
            bins.append([])
            room.append(budget)
            fits = len(bins) - 1
        bins[fits].append(i)
        room[fits] -= lengths[i]
    return [sorted(b) for b in bins]
