"""How all ranks of a start agree before any group exists: each says something, rank 0 decides, all hear the same.

By the job's store alone, in bounded time.  What one rank cannot use, or what differs between two of them, is a
ValueError on all ranks alike; a rank that says nothing in time is a TimeoutError on all of them.  Where rank 0 or the
store is gone each rank finds that by itself: NoAnswer.  Knows nothing of what is said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import DistNetworkError

NOTHING = "none"  # what a rank has that does not have what another one has
_LONGEST = 160  # characters of a value in a message
_REPLY_S = 60.0  # after the last rank has spoken, for rank 0 to decide


class NoAnswer(Exception):
    """Of rank 0, or of the store: this rank alone says so."""


class Store(Protocol):
    """torch.distributed's."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta) -> None: ...
    def check(self, keys: list[str]) -> bool: ...


class Party(Protocol):
    """A rank among others: world.Meeting."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def host(self) -> str: ...
    @property
    def store(self) -> Store: ...


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one rank said."""

    rank: int
    host: str
    value: Any  # JSON

    @property
    def place(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a rank knows by name, for comparison with what others know."""

    of_all: Mapping[str, str]  # every rank must have them
    of_some: Mapping[str, str]  # compared among the ranks that have them


def agree(
    party: Party,
    topic: str,
    say: Callable[[], Any],
    decide: Callable[[Sequence[Said]], Any],
    *,
    timeout_s: float,
) -> Any:
    """Every rank says the JSON that `say` returns; what rank 0 decides of all of it is returned on every rank."""
    try:
        return _agreed(party, topic, say, decide, timeout_s)
    except DistNetworkError as error:
        raise NoAnswer(f"start: the job's store, on rank 0's host, was lost before {topic} was decided") from error


def _agreed(
    party: Party, topic: str, say: Callable[[], Any], decide: Callable[[Sequence[Said]], Any], timeout_s: float
) -> Any:
    try:
        mine = {"host": party.host, "value": say()}
    except (ValueError, OSError) as error:
        mine = {"host": party.host, "error": str(error)}
    party.store.set(f"{topic}/{party.rank}", json.dumps(mine))
    if party.rank == 0:
        party.store.set(f"{topic}/decision", json.dumps(_decision(party, topic, decide, timeout_s)))
    if not _heard(party.store, [f"{topic}/decision"], timeout_s + _REPLY_S):
        raise NoAnswer(f"start: rank 0 decided nothing about {topic} within {timeout_s + _REPLY_S:.0f} s")
    decision = json.loads(party.store.get(f"{topic}/decision"))
    if "late" in decision:
        raise TimeoutError(decision["late"])
    if "error" in decision:
        raise ValueError(decision["error"])
    return decision["value"]


def difference(said: Sequence[tuple[Said, Facts]]) -> str:
    """What is not alike, in one line that names the first of it, both values and both ranks; "" where all is."""
    found: dict[str, str] = {}
    names = dict.fromkeys(name for _, facts in said for name in (*facts.of_all, *facts.of_some))
    needed = {name for _, facts in said for name in facts.of_all}
    for name in names:
        first: tuple[Said, str] | None = None
        for one, facts in said:
            value = facts.of_all.get(name, facts.of_some.get(name, NOTHING if name in needed else None))
            if value is None:
                continue
            if first is None:
                first = one, value
            elif value != first[1]:
                here, there = _told(first[1], value)
                found[name] = f"{name} differs between ranks: {here} on {first[0].place}, {there} on {one.place}"
                break
    if not found:
        return ""
    first_line, *others = found.values()
    more = f"; {len(others)} more, such as {list(found)[1]}" if others else ""
    return f"{first_line}{more}"


def _decision(party: Party, topic: str, decide: Callable[[Sequence[Said]], Any], timeout_s: float) -> dict[str, Any]:
    keys = [f"{topic}/{rank}" for rank in range(party.world_size)]
    if not _heard(party.store, keys, timeout_s):
        late = ", ".join(str(rank) for rank, key in enumerate(keys) if not party.store.check([key]))
        return {"late": f"start: no word about {topic} from rank {late} within {timeout_s:.0f} s"}
    words = [json.loads(party.store.get(key)) for key in keys]
    for rank, word in enumerate(words):
        if "error" in word:
            where = "" if rank == 0 else f"rank {rank} ({word['host']}): "
            return {"error": f"{where}{word['error']}"}
    try:
        value = decide([Said(rank=rank, host=word["host"], value=word["value"]) for rank, word in enumerate(words)])
    except ValueError as error:
        return {"error": str(error)}
    return {"value": value}


def _heard(store: Store, keys: list[str], timeout_s: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except DistNetworkError:
        raise
    except RuntimeError:  # DistStoreError: not in time
        return False
    return True


def _told(*values: str) -> list[str]:
    """Long ones cut where they begin to differ."""
    common = next((i for i, pair in enumerate(zip(*values, strict=False)) if len({*pair}) > 1), 0)
    first = max(0, common - _LONGEST // 2) if max(map(len, values)) > _LONGEST else 0
    cut = [value[first : first + _LONGEST] for value in values]
    return [
        "…" * (first > 0) + part + "…" * (first + _LONGEST < len(value))
        for part, value in zip(cut, values, strict=True)
    ]
