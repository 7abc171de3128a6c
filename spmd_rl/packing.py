"""Rollouts as a handful of flat arrays: the one form that travels, is logged and is restored.

`pack` concatenates rollouts, `unpack` gives them back (as views), `save` and `load` write them as safetensors,
readable without this package.  Knows nothing of ranks, queues or what the rollouts are for.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from spmd_rl.types import Rollout

PER_TOKEN = {  # the widest first, so that in one piece of memory all are aligned
    "token_ids": np.int32,
    "behavior_logprobs": np.float32,
    "versions": np.int32,
    "loss_mask": np.bool_,
}
PER_ROLLOUT = {
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
DTYPES = {**PER_TOKEN, **PER_ROLLOUT, "cu_seqlens": np.int64, "advantage": np.float32, "usable": np.bool_}
WORDS = ("env", "task_id", "purpose", "finish_reason", "error", "reward_parts", "segments")


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """n rollouts of T tokens in all; rollout i has the tokens cu_seqlens[i] … cu_seqlens[i + 1]."""

    cu_seqlens: np.ndarray  # [n + 1] int64
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
    words: list[dict[str, object]]  # [n], the fields of WORDS

    def __len__(self) -> int:
        return len(self.ticket)

    def arrays(self) -> dict[str, np.ndarray]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "words"}


def pack(rollouts: Sequence[Rollout], advantages: np.ndarray | None = None, usable: np.ndarray | None = None) -> Packed:
    """Concatenate rollouts in the order given; advantages and usable are [n], one a rollout (None: 0, all)."""
    lengths = [len(r.token_ids) for r in rollouts]
    per_rollout = {name: np.array([getattr(r, name) for r in rollouts], dtype) for name, dtype in PER_ROLLOUT.items()}
    return Packed(
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int64),
        advantage=np.zeros(len(rollouts), np.float32) if advantages is None else np.asarray(advantages, np.float32),
        usable=np.ones(len(rollouts), np.bool_) if usable is None else np.asarray(usable, np.bool_),
        words=[{name: getattr(r, name) for name in WORDS} for r in rollouts],
        **_joined({name: [getattr(r, name) for r in rollouts] for name in PER_TOKEN}, sum(lengths)),
        **per_rollout,
    )


def unpack(packed: Packed) -> list[Rollout]:
    """The rollouts again; their arrays are views into the packed ones."""
    columns = [getattr(packed, name).tolist() for name in PER_ROLLOUT]
    starts = packed.cu_seqlens.tolist()
    rollouts = []
    for words, *scalars, a, b in zip(packed.words, *columns, starts[:-1], starts[1:], strict=True):
        tokens = {name: getattr(packed, name)[a:b] for name in PER_TOKEN}
        rollouts.append(Rollout(**dict(zip(PER_ROLLOUT, scalars, strict=True)), **tokens, **words))
    return rollouts


def from_arrays(arrays: Mapping[str, np.ndarray], words: list[dict[str, object]]) -> Packed:
    """Build from received or loaded arrays; ValueError when they do not fit together."""
    expected = {f.name for f in fields(Packed)} - {"words"}
    if set(arrays) != expected:
        raise ValueError(f"packed rollouts: arrays {sorted(set(arrays) ^ expected)} are missing or unknown")
    packed = Packed(**arrays, words=words)
    num, total = len(words), len(packed.token_ids)
    cu_seqlens = packed.cu_seqlens
    fits = (
        all(len(arrays[name]) == num for name in (*PER_ROLLOUT, "advantage", "usable"))
        and all(len(arrays[name]) == total for name in PER_TOKEN)
        and len(cu_seqlens) == num + 1
        and cu_seqlens[0] == 0
        and cu_seqlens[-1] == total
        and bool((np.diff(cu_seqlens) >= 0).all())
    )
    if not fits:
        raise ValueError(f"packed rollouts: arrays of {num} rollouts and {total} tokens do not fit together")
    return packed


def save(packed: Packed, path: Path) -> None:
    """Write `path` as safetensors, with the words as JSON in its metadata."""
    from safetensors.numpy import save_file

    save_file(
        {k: np.ascontiguousarray(v) for k, v in packed.arrays().items()}, path, {"words": json.dumps(packed.words)}
    )


def load(path: Path) -> Packed:
    """Read what `save` wrote; ValueError, a line, when it is something else."""
    from safetensors import safe_open

    try:
        with safe_open(path, "numpy") as file:
            words = json.loads(file.metadata()["words"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        packed = from_arrays(arrays, words)
        if other := [name for name, dtype in DTYPES.items() if arrays[name].dtype != dtype]:
            raise ValueError(f"{other[0]} is {arrays[other[0]].dtype}")
        unpack(packed)  # the words of every rollout are there
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
        [int(a), *(int(a) + s for s in w["segments"])] for w, a in zip(packed.words, packed.cu_seqlens, strict=False)
    ]
    rows = np.repeat(np.arange(len(packed)), [len(s) for s in starts])
    if len(rows) == len(packed):
        return packed
    per_rollout = {n: a[rows] for n, a in packed.arrays().items() if n not in PER_TOKEN and n != "cu_seqlens"}
    words = [{**packed.words[i], "segments": []} for i in rows]
    cu_seqlens = np.array([*itertools.chain(*starts), packed.cu_seqlens[-1]], np.int64)
    return dataclasses.replace(packed, cu_seqlens=cu_seqlens, words=words, **per_rollout)


def shares(packed: Packed, num: int, *, width: int, share_prefix: bool = False) -> list[Packed]:
    """Rollouts in `num` parts of about equal cost to train; `width` is the model's.

    A token costs a constant and attention to those before it: as much again at 12 · width tokens.  With share_prefix
    what the members of a group have in common is paid once in each part.
    """

    def cost(length: int) -> float:
        return length * (1 + length / (12 * width))

    costs = [cost(n) for n in np.diff(packed.cu_seqlens).tolist()]
    if not share_prefix:
        return [select(packed, part) for part in split_evenly(costs, num)]
    groups = by_group(packed.group_id)
    tokens = [packed.token_ids[a:b] for a, b in itertools.pairwise(packed.cu_seqlens)]
    firsts = [cost(common_prefix([tokens[i] for i in members])) for members in groups]
    return [select(packed, part) for part in _split_groups(groups, firsts, costs, num)]


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
    best, lightest = [[] for _ in range(num)], float("inf")
    for num_pieces, num_whole in itertools.product(sizes, (0, len(groups) // num * num)):
        pieces, heavy = [], []
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
    spans = [slice(packed.cu_seqlens[i], packed.cu_seqlens[i + 1]) for i in indices]
    cu_seqlens = np.cumsum([0, *(span.stop - span.start for span in spans)], dtype=np.int64)
    rows = np.array(indices, np.int64)
    return Packed(
        cu_seqlens=cu_seqlens,
        words=[packed.words[i] for i in indices],
        **_joined({name: [getattr(packed, name)[span] for span in spans] for name in PER_TOKEN}, int(cu_seqlens[-1])),
        **{name: getattr(packed, name)[rows] for name in (*PER_ROLLOUT, "advantage", "usable")},
    )


def _joined(parts: Mapping[str, Sequence[np.ndarray]], num_tokens: int) -> dict[str, np.ndarray]:
    """Arrays of tokens in one piece of memory: fresh pages cost more than the copy, and large pieces get large ones."""
    memory = np.empty(num_tokens * sum(np.dtype(dtype).itemsize for dtype in PER_TOKEN.values()), np.uint8)
    joined, start = {}, 0
    for name, dtype in PER_TOKEN.items():
        end = start + num_tokens * np.dtype(dtype).itemsize
        joined[name] = memory[start:end].view(dtype)
        if parts[name]:
            np.concatenate(parts[name], out=joined[name])
        start = end
    return joined
