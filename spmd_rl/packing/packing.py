"""Rollouts as a handful of flat arrays: the one form that travels, is logged and is restored.

`pack` concatenates rollouts, `unpack` gives them back (as views), `save` and `load` write them as safetensors,
readable without this package.  Knows nothing of ranks, queues or what the rollouts are for.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from spmd_rl.files import tensor_file
from spmd_rl.packing.buffers import Buffers, aligned
from spmd_rl.types import Rollout

PER_TOKEN: dict[
    str, type[np.generic]
] = {  # in the order of the fields of Packed, as what follows: so a message carries them from where they lie
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "behavior_logprobs": np.float32,
    "versions": np.int32,
}
PER_ROLLOUT: dict[str, type[np.generic]] = {
    "ticket": np.int64,
    "group_id": np.int64,
    "sample": np.int32,
    "reward": np.float64,
    "num_turns": np.int32,
    "num_wasted_tokens": np.int64,
    "admission_version": np.int32,
    "finished_version": np.int32,
    "generation_s": np.float64,
}
GIVEN: dict[str, type[np.generic]] = {  # by the batch, one a rollout
    "advantage": np.float32,
    "usable": np.bool_,
    "minibatch": np.int32,
}
DTYPES = {**PER_TOKEN, **PER_ROLLOUT, **GIVEN, "cu_seqlens": np.int64}
WORDS = ("env", "task_id", "purpose", "finish_reason", "error", "reward_parts", "segments")
_WORDS = frozenset(WORDS)
_memory = Buffers()


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """n rollouts of T tokens in all; rollout i has the tokens cu_seqlens[i] … cu_seqlens[i + 1].

    Raises ValueError where the arrays do not fit together.
    """

    token_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] bool
    behavior_logprobs: np.ndarray  # [T] float32
    versions: np.ndarray  # [T] int32
    ticket: np.ndarray  # [n] int64
    group_id: np.ndarray  # [n] int64
    sample: np.ndarray  # [n] int32
    reward: np.ndarray  # [n] float64
    num_turns: np.ndarray  # [n] int32
    num_wasted_tokens: np.ndarray  # [n] int64
    admission_version: np.ndarray  # [n] int32
    finished_version: np.ndarray  # [n] int32
    generation_s: np.ndarray  # [n] float64, seconds
    advantage: np.ndarray  # [n] float32, 0 where there is none
    usable: np.ndarray  # [n] bool, False = trains nothing and is in no denominator
    minibatch: np.ndarray  # [n] int32, which optimizer step of a pass over its batch it is in
    cu_seqlens: np.ndarray  # [n + 1] int64
    words: dict[str, list[Any]]  # the fields of WORDS, [n] each, of the type in Rollout

    def __post_init__(self) -> None:
        num, total, ends = len(self.ticket), len(self.token_ids), self.cu_seqlens
        fits = (
            all(len(getattr(self, name)) == num for name in (*PER_ROLLOUT, *GIVEN))
            and self.words.keys() == _WORDS
            and all(len(column) == num for column in self.words.values())
            and all(len(getattr(self, name)) == total for name in PER_TOKEN)
            and len(ends) == num + 1
            and ends[0] == 0
            and ends[-1] == total
            and (num == 1 or bool((ends[1:] >= ends[:-1]).all()))
        )
        if not fits:
            raise ValueError(f"packed rollouts: arrays of {num} rollouts and {total} tokens do not fit together")

    def __len__(self) -> int:
        return len(self.ticket)

    def arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in DTYPES}


def pack(
    rollouts: Sequence[Rollout],
    advantages: np.ndarray | None = None,  # [n]; None: 0
    usable: Sequence[bool] | np.ndarray | None = None,  # [n]; None: all
    minibatch: np.ndarray | None = None,  # [n]; None: 0
) -> Packed:
    """Concatenate rollouts in the order given."""
    lengths = [len(r.token_ids) for r in rollouts]
    columns: dict[str, Any] = {name: list(map(attrgetter(name), rollouts)) for name in (*PER_TOKEN, *PER_ROLLOUT)}
    columns["advantage"] = 0 if advantages is None else advantages
    columns["usable"] = True if usable is None else usable
    columns["minibatch"] = 0 if minibatch is None else minibatch
    words = {name: list(map(attrgetter(name), rollouts)) for name in WORDS}
    return Packed(words=words, **_joined(lengths, columns))


def unpack(packed: Packed) -> list[Rollout]:
    """The rollouts again; their arrays are views into the packed ones."""
    spans = _spans(packed)
    columns = {
        **{name: getattr(packed, name).tolist() for name in PER_ROLLOUT},
        **{name: map(getattr(packed, name).__getitem__, spans) for name in PER_TOKEN},
        **packed.words,
    }
    return list(map(Rollout, *(columns[f.name] for f in dataclasses.fields(Rollout))))


def save(packed: Packed, path: Path) -> None:
    """Write `path` as safetensors, with the words as JSON in its metadata."""
    words = [dict(zip(packed.words, row, strict=True)) for row in zip(*packed.words.values(), strict=True)]
    arrays = {k: np.ascontiguousarray(v) for k, v in packed.arrays().items()}
    tensor_file.write(arrays, path, {"words": json.dumps(words)})


def load(path: Path) -> Packed:
    """Read what `save` wrote; ValueError, a line, when it is something else."""
    from safetensors import safe_open

    try:
        with safe_open(path, "numpy") as file:
            rows = json.loads(file.metadata()["words"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        packed = Packed(**arrays, words={name: [row[name] for row in rows] for name in WORDS})
        if other := [name for name, dtype in DTYPES.items() if arrays[name].dtype != dtype]:
            raise ValueError(f"{other[0]} is {arrays[other[0]].dtype}")
    except Exception as error:  # whatever it is, the file is to blame
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path}: not a file of packed rollouts: {text}") from error
    return packed


def split_evenly(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Indices in `num_parts` lists of near equal cost (longest first to the lightest part), each list ascending.

    Example: costs 5 4 3 2 in two parts give [0, 3] and [1, 2].
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0.0] * num_parts
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        lightest = min(range(num_parts), key=loads.__getitem__)
        parts[lightest].append(i)
        loads[lightest] += costs[i]
    return [sorted(part) for part in parts]


def by_segment(packed: Packed) -> Packed:
    """Every segment as a sequence of its own, with its rollout's ticket, reward and advantage: what is trained on."""
    starts = [
        [a, *(a + s for s in segments)]
        for segments, a in zip(packed.words["segments"], packed.cu_seqlens.tolist(), strict=False)
    ]
    rows = np.repeat(np.arange(len(packed)), [len(s) for s in starts])
    if len(rows) == len(packed):
        return packed
    per_rollout = {n: a[rows] for n, a in packed.arrays().items() if n not in PER_TOKEN and n != "cu_seqlens"}
    words = {name: [column[i] for i in rows] for name, column in packed.words.items()} | {"segments": [[]] * len(rows)}
    cu_seqlens = np.array([*itertools.chain(*starts), packed.cu_seqlens[-1]], np.int64)
    return dataclasses.replace(packed, cu_seqlens=cu_seqlens, words=words, **per_rollout)


def minibatches(group_id: np.ndarray, num: int, *, whole_groups: bool = False) -> np.ndarray:  # [n] int32
    """Which of `num` minibatches each of a batch's rollouts is in: near equal numbers of them, in order.

    A function of the whole batch, before it is shared out: the optimizer steps are the same on any number of ranks.
    whole_groups: near equal numbers of groups, where there are as many groups as minibatches.
    Example: 5 rollouts of groups 7 7 8 8 9 in two are 0 0 0 1 1, with whole groups 0 0 0 0 1.
    """
    groups = by_group(group_id)
    units = groups if whole_groups and len(groups) >= num else [[i] for i in range(len(group_id))]
    which = np.zeros(len(group_id), np.int32)
    for m, part in enumerate(np.array_split(np.arange(len(units)), num)):
        for unit in part:
            which[units[unit]] = m
    return which


def shares(packed: Packed, num: int, *, width: int, share_prefix: bool = False) -> list[Packed]:
    """Rollouts in `num` parts, of each minibatch about equal cost to train; `width` is the model's.

    A token costs a constant and attention to those before it: as much again at 12 · width tokens.  With share_prefix
    what the members of a group have in common is paid once in each part.
    """
    parts: list[list[int]] = [[] for _ in range(num)]
    for m in np.unique(packed.minibatch):
        members = np.flatnonzero(packed.minibatch == m)
        for part, mine in zip(parts, _split(packed, members, num, width, share_prefix), strict=True):
            part += members[mine].tolist()
    return [select(packed, sorted(part)) for part in parts]


def _split(packed: Packed, members: np.ndarray, num: int, width: int, share_prefix: bool) -> list[list[int]]:
    """Places in `members`, rollouts of one minibatch, in `num` parts."""

    def cost(length: int) -> float:
        return length * (1 + length / (12 * width))

    tokens = [packed.token_ids[packed.cu_seqlens[i] : packed.cu_seqlens[i + 1]] for i in members]
    costs = [cost(len(some)) for some in tokens]
    if not share_prefix:
        return split_evenly(costs, num)
    groups = by_group(packed.group_id[members])
    firsts = [cost(common_prefix([tokens[i] for i in group])) for group in groups]
    return _split_groups(groups, firsts, costs, num)


def _split_groups(
    groups: list[list[int]],  # indices of members
    firsts: list[float],  # what the members of each have in common costs
    costs: list[float],  # of each member alone
    num: int,
) -> list[list[int]]:
    """Groups whole, or all or those left over cut into 2, 4, 8 … pieces: whatever makes the heaviest part lightest.

    Example: three equal groups to two parts are a group and a half each.
    """
    order = sorted(range(len(groups)), key=lambda g: -sum(costs[i] for i in groups[g]))
    sizes = [2**k for k in range(max(map(len, groups), default=1).bit_length())]
    best: list[list[int]] = [[] for _ in range(num)]
    lightest = float("inf")
    for num_pieces, num_whole in itertools.product(sizes, (0, len(groups) // num * num)):
        pieces: list[list[int]] = []
        heavy: list[float] = []
        for place, g in enumerate(order):
            own = [costs[i] - firsts[g] for i in groups[g]]
            for piece in filter(None, split_evenly(own, 1 if place < num_whole else num_pieces)):
                pieces.append([groups[g][j] for j in piece])
                heavy.append(firsts[g] + sum(own[j] for j in piece))
        parts = split_evenly(heavy, num)
        heaviest = max(sum(heavy[p] for p in part) for part in parts)
        if heaviest < lightest:
            best, lightest = [sorted(i for p in part for i in pieces[p]) for part in parts], heaviest
    return best


def by_group(group_id: np.ndarray) -> list[list[int]]:
    """Indices of equal group ids together, in order of their first."""
    groups: dict[int, list[int]] = {}
    for i, group in enumerate(group_id.tolist()):
        groups.setdefault(group, []).append(i)
    return list(groups.values())


def common_prefix(sequences: Sequence[np.ndarray]) -> int:
    """How many tokens all begin with.  Example: 1 2 3, 1 2 and 1 2 5 begin with 2 alike."""
    shortest = min(map(len, sequences))
    same = np.logical_and.reduce([one[:shortest] == sequences[0][:shortest] for one in sequences])
    return shortest if same.all() else int(np.argmin(same))


def select(packed: Packed, indices: Sequence[int]) -> Packed:
    """Some of the rollouts, in the order given."""
    spans = _spans(packed)
    spans = [spans[i] for i in indices]
    rows = np.array(indices, np.int64)
    columns = {name: getattr(packed, name)[rows] for name in (*PER_ROLLOUT, *GIVEN)}
    columns |= {name: [getattr(packed, name)[span] for span in spans] for name in PER_TOKEN}
    words = {name: [column[i] for i in indices] for name, column in packed.words.items()}
    return Packed(words=words, **_joined([span.stop - span.start for span in spans], columns))


def _spans(packed: Packed) -> list[slice]:
    return list(itertools.starmap(slice, itertools.pairwise(packed.cu_seqlens.tolist())))


def _joined(lengths: Sequence[int], columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of rollouts of these lengths, one after another in one piece of memory, as a message carries them."""
    num, total = len(lengths), sum(lengths)
    counts = {name: total if name in PER_TOKEN else num for name in DTYPES} | {"cu_seqlens": num + 1}
    sizes = {name: count * np.dtype(DTYPES[name]).itemsize for name, count in counts.items()}
    memory = _memory.take(sum(map(aligned, sizes.values())))
    arrays: dict[str, np.ndarray] = {}
    start = 0
    for name, size in sizes.items():
        arrays[name] = memory[start : start + size].view(DTYPES[name])
        start += aligned(size)
    arrays["cu_seqlens"][:] = [0, *itertools.accumulate(lengths)]
    for name in arrays.keys() & columns.keys():
        if name not in PER_TOKEN:
            arrays[name][:] = columns[name]
        elif num:
            np.concatenate(columns[name], out=arrays[name])
    return arrays
