"""A share of a batch cut into minibatches (one optimizer step each) and micro-batches (one forward each).

Given the packed arrays of this rank's rollouts, which say the minibatch of each: that was decided for the whole batch
before it was shared out, so that an optimizer step is the same on any number of ranks.

Promises: nothing is padded; a sequence is never split; a token that no loss token depends on is not computed (the last
loss token and what follows it); everything per loss token is selected here, by index, so that values off the mask
cannot reach the loss.  Rollouts that are not usable are not there at all; those whose advantage is 0 are counted in the
denominator, and skipped where that changes nothing else.  The segments of a rollout are sequences of their own, and one
rollout for the aggregation.
With `share_prefix` what the members of a group begin with alike is there once, and each goes on from it.
Deterministic.  Knows nothing of ranks, models or losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from spmd_rl.packing.packing import by_group, common_prefix


class Share(Protocol):
    """What is read of a `Packed`: n rollouts of T tokens."""

    @property
    def cu_seqlens(self) -> np.ndarray: ...  # [n + 1] ints
    @property
    def token_ids(self) -> np.ndarray: ...  # [T] ints
    @property
    def loss_mask(self) -> np.ndarray: ...  # [T] bool
    @property
    def behavior_logprobs(self) -> np.ndarray: ...  # [T] float32
    @property
    def versions(self) -> np.ndarray: ...  # [T] ints
    @property
    def ticket(self) -> np.ndarray: ...  # [n] ints
    @property
    def group_id(self) -> np.ndarray: ...  # [n] ints
    @property
    def advantage(self) -> np.ndarray: ...  # [n] float32
    @property
    def usable(self) -> np.ndarray: ...  # [n] bool
    @property
    def minibatch(self) -> np.ndarray: ...  # [n] ints


Aggregation = Callable[[int], tuple[float, float]]  # loss tokens of a rollout -> (scale, share) of each of them


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MicroBatch:
    """n sequences of T input tokens in m segments, N of whose log-probs enter the loss."""

    token_ids: np.ndarray  # [T] int64
    cu_seqlens: list[int]  # [m + 1]
    parents: list[int]  # [m], the segment that each goes on from, itself where it is a start
    rows: np.ndarray  # [N] int64, index of the input token whose hidden state predicts the loss token
    targets: np.ndarray  # [N] int64, the loss tokens
    behavior: np.ndarray  # [N] float32
    advantages: np.ndarray  # [N] float32
    versions: np.ndarray  # [N] int64
    sequence: np.ndarray  # [N] int64, index of the sequence
    positions: np.ndarray  # [N] int64, of the loss token in it
    scale: np.ndarray  # [N] float64, factor of the token's loss
    share: np.ndarray  # [N] float64, its part of the denominator
    tickets: tuple[int, ...]  # [n], of the rollouts; empty for the stand-in

    @property
    def is_stand_in(self) -> bool:
        return not self.tickets

    @property
    def num_shared(self) -> int:
        """Tokens that would be computed again if no two sequences shared any."""
        last = np.r_[np.diff(self.sequence) != 0, True]
        return int(self.positions[last].sum()) - len(self.token_ids)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Minibatch:
    """What one rank gives to one optimizer step."""

    micro_batches: list[MicroBatch]
    num_loss_tokens: int  # also those of skipped sequences
    skipped_share: float = 0.0  # part of the denominator of skipped sequences


STAND_IN = MicroBatch(
    token_ids=np.zeros(1, np.int64),
    cu_seqlens=[0, 1],
    parents=[0],
    rows=np.zeros(1, np.int64),
    targets=np.zeros(1, np.int64),
    behavior=np.zeros(1, np.float32),
    advantages=np.zeros(1, np.float32),
    versions=np.full(1, -1, np.int64),
    sequence=np.zeros(1, np.int64),
    positions=np.ones(1, np.int64),
    scale=np.zeros(1),
    share=np.zeros(1),
    tickets=(),
)
"""One token with weight 0: lets a rank without work take part in the collectives of a forward and backward."""


def cut(
    share: Share,
    *,
    num_minibatches: int,
    micro_batch_tokens: int,
    aggregation: Aggregation,
    skip_zero: bool,
    share_prefix: bool = False,
    pack: bool = True,
) -> list[Minibatch]:
    """What of the share is in each minibatch 0 … num_minibatches - 1, in its order, in micro-batches.

    skip_zero: sequences with advantage 0 have no gradient and are not computed.
    pack = False: every sequence in a micro-batch of its own, for models that carry state from token to token.
    ValueError where the first token of a rollout is under the loss mask: no logits stand before it; where what several
    sequences share is asked for without packing; and for a minibatch that there is not.
    """
    if share_prefix and not pack:
        raise ValueError("share_prefix packs sequences that begin alike: it needs a model that packs")
    starts, ends = share.cu_seqlens[:-1], share.cu_seqlens[1:]
    for i, (a, b) in enumerate(zip(starts, ends, strict=True)):
        if b > a and share.loss_mask[a]:
            raise ValueError(
                f"ticket {share.ticket[i]}: the first token is under the loss mask, but nothing predicts it"
            )
    if len(share.minibatch) and share.minibatch.max() >= num_minibatches:
        last = share.minibatch.max()
        raise ValueError(f"minibatch {last} of 0 … {num_minibatches - 1}: the batch was cut for another trainer")
    parts = [np.flatnonzero(share.minibatch == m) for m in range(num_minibatches)]
    budget = micro_batch_tokens if pack else 0  # nothing fits beside another
    return [_minibatch(share, part, budget, aggregation, skip_zero, share_prefix) for part in parts]


def merged(minibatches: Sequence[Minibatch]) -> Minibatch:
    """What several ranks give to one optimizer step, on one."""
    return Minibatch(
        micro_batches=[micro for m in minibatches for micro in m.micro_batches],
        num_loss_tokens=sum(m.num_loss_tokens for m in minibatches),
        skipped_share=sum(m.skipped_share for m in minibatches),
    )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Sequence:
    index: int  # of the rollout in the share
    tokens: np.ndarray  # [length], the inputs: up to the last loss token
    loss: np.ndarray  # positions of its loss tokens
    weights: tuple[float, float]  # scale and share of each of them


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Unit:
    """Sequences that begin alike for `shared` tokens; one alone shares nothing."""

    sequences: list[_Sequence]
    shared: int

    @property
    def num_tokens(self) -> int:
        return self.shared + sum(len(s.tokens) - self.shared for s in self.sequences)


def _minibatch(
    share: Share,
    part: np.ndarray,
    micro_batch_tokens: int,
    aggregation: Aggregation,
    skip_zero: bool,
    share_prefix: bool,
) -> Minibatch:
    kept, num_loss_tokens, skipped_share = [], 0, 0.0
    losses = {i: np.flatnonzero(share.loss_mask[slice(*share.cu_seqlens[i : i + 2])]) for i in part if share.usable[i]}
    of_rollout: Counter[int] = Counter()  # loss tokens of all its segments, by ticket
    for i, loss in losses.items():
        of_rollout[int(share.ticket[i])] += len(loss)
    for i, loss in losses.items():
        if not len(loss):
            continue
        num_loss_tokens += len(loss)
        weights = aggregation(of_rollout[int(share.ticket[i])])
        if skip_zero and share.advantage[i] == 0:  # a NaN advantage is not skipped, it is found by the step
            skipped_share += len(loss) * weights[1]
        else:
            first = share.cu_seqlens[i]
            tokens = share.token_ids[first : first + loss[-1]]
            kept.append(_Sequence(index=int(i), tokens=tokens, loss=loss, weights=weights))
    units = [_Unit(sequences=[s], shared=0) for s in kept]
    if share_prefix:
        units = _units(kept, share.group_id, micro_batch_tokens)
    bins = pack_bins([unit.num_tokens for unit in units], micro_batch_tokens)
    micro_batches = [_micro_batch(share, [units[j] for j in b]) for b in bins]
    return Minibatch(micro_batches=micro_batches, num_loss_tokens=num_loss_tokens, skipped_share=skipped_share)


def _units(sequences: list[_Sequence], group_id: np.ndarray, budget: int) -> list[_Unit]:
    """The members of each group together, as many as the budget has room for."""
    units = []
    for group in by_group(group_id[[s.index for s in sequences]]):
        members = [sequences[j] for j in group]
        shared = common_prefix([s.tokens for s in members])
        for b in pack_bins([len(s.tokens) - shared for s in members], budget - shared):
            units.append(_Unit(sequences=[members[j] for j in b], shared=shared if len(b) > 1 else 0))
    return units


def _micro_batch(share: Share, units: list[_Unit]) -> MicroBatch:
    inputs: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    parents: list[int] = []
    start = 0
    for unit in units:
        first, prefix = start, len(inputs)
        if unit.shared:
            inputs.append(unit.sequences[0].tokens[: unit.shared])
            parents.append(prefix)
            start += unit.shared
        for s in unit.sequences:
            parents.append(prefix if unit.shared else len(inputs))
            inputs.append(s.tokens[unit.shared :])
            before = s.loss - 1  # the token that predicts
            rows.append(np.where(before < unit.shared, first + before, start + before - unit.shared))
            start += len(inputs[-1])
    sequences = [s for unit in units for s in unit.sequences]
    rollouts, counts = [s.index for s in sequences], [len(s.loss) for s in sequences]
    source = np.concatenate([s.loss + int(share.cu_seqlens[s.index]) for s in sequences])  # of loss tokens, in share
    scales, shares = np.array([s.weights for s in sequences]).T
    return MicroBatch(
        token_ids=np.concatenate(inputs).astype(np.int64),
        cu_seqlens=[0, *np.cumsum([len(tokens) for tokens in inputs]).tolist()],
        parents=parents,
        rows=np.concatenate(rows).astype(np.int64),
        targets=share.token_ids[source].astype(np.int64),
        behavior=share.behavior_logprobs[source].astype(np.float32),
        advantages=np.repeat(share.advantage[rollouts], counts).astype(np.float32),
        versions=share.versions[source].astype(np.int64),
        sequence=np.repeat(np.arange(len(rollouts)), counts),
        positions=np.concatenate([s.loss for s in sequences]),
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
