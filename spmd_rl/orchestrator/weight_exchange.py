"""A version's way from trainers to engines, seen from rank 0: who sent it, who took it, and that both are the same.

Given a way to tell engines that wait for the word; the answers of ranks come in by `sent` and `loaded`.
Promises: a version is taken once every rank of an engine holds the bytes that were sent, by checksum; after `restore`
the first one is the very one that a checkpoint remembers.
Knows nothing of what moves the bytes, of steps or of the policy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spmd_rl.orchestrator.roll_call import RollCall
from spmd_rl.types import GuardError


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A trainer rank has sent its part of a version."""

    checksums: tuple[int, ...]
    sent_bytes: int
    send_s: float
    update_norm: float  # of its part of the change, as the engines see it


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """An engine's rank has swapped to a version."""

    checksums: tuple[int, ...]
    receive_s: float
    pause_s: float  # the engine stood still


class WeightExchange:
    """`take` one version after the other; `state` is what a checkpoint remembers of the last."""

    def __init__(
        self,
        *,
        senders: Sequence[int],  # trainer ranks
        holders: Sequence[int],  # ranks of engines
        engines: Sequence[int],  # those of them that lead one
        layout: str,  # of weights on the wire: under equal ones equal checksums mean equal weights; "": never
        by_disk: bool,  # engines are told when a version is written
        swap: Callable[[int, Sequence[int]], None],  # tell them: (version, its checksums; none: with the weights)
        say: Callable[[str], None],
    ) -> None:
        self._holders, self._engines, self._layout = holders, engines, layout
        self._by_disk, self._swap, self._say = by_disk, swap, say
        self._sends: RollCall[Sent] = RollCall("weights sent", senders)
        self._loads: RollCall[Loaded] = RollCall("weights", holders)
        self._saved: Mapping[str, object] | None = None  # the state to come back to, until the first version is taken
        self.state: dict[str, object] = {}  # of the version that all engines took last: layout and checksums

    def restore(self, saved: Mapping[str, object] | None) -> None:
        """Before the first `take`: the state of a checkpoint, None where it has none."""
        self._saved = saved

    def sent(self, rank: int, version: int, sent: Sent) -> None:
        self._sends.answer(version, rank, sent)

    def loaded(self, rank: int, version: int, loaded: Loaded) -> None:
        self._loads.answer(version, rank, loaded)

    async def take(self, version: int, *, tell: bool = False) -> dict[str, float]:
        """Waits until all trainers have sent it and all engines have swapped to those very bytes; the figures of that.

        `tell`: engines wait for the word.  By disk they do so always, and have it when the version is written.
        """
        sends: list[Sent] = []
        if self._by_disk:
            sends = await self._sends.all(version)
            self._swap(version, sends[0].checksums)
        elif tell:
            self._swap(version, ())
        loads = await self._loads.all(version)
        sends = sends or await self._sends.all(version)
        sent = tuple(itertools.chain.from_iterable(send.checksums for send in sends))
        for rank, load in zip(self._holders, loads, strict=True):
            if load.checksums != sent:
                raise RuntimeError(
                    f"rank {rank} does not hold the weights of version {version} that were sent: "
                    f"{_difference(load.checksums, sent)}"
                )
        self.state = {"layout": self._layout, "checksums": list(sent)}
        saved, self._saved = self._saved, None
        if saved is not None and self._layout:
            self._assert_restored(version, saved)
        return self._figures(sends, loads)

    def _assert_restored(self, version: int, saved: Mapping[str, object]) -> None:
        """What the engines hold after a resume is what they held when its checkpoint was made."""
        if saved["layout"] != self._layout:
            self._say(f"weights came {self._layout}, the checkpoint's {saved['layout']}: not compared")
        elif saved != self.state:
            raise RuntimeError(
                f"resumed engines do not hold the weights that they held at version {version}: checksums "
                f"{self.state['checksums']}, the checkpoint's are {saved['checksums']}"
            )
        else:
            self._say(f"engines hold the weights of version {version} again, by checksum")

    def _figures(self, sends: Sequence[Sent], loads: Sequence[Loaded]) -> dict[str, float]:
        pauses = {rank: load.pause_s for rank, load in zip(self._holders, loads, strict=True)}
        ranks = self._engines if len(self._engines) > 1 else ()
        return {
            "weights/update_norm": math.hypot(*(send.update_norm for send in sends)),
            "weights/sent_bytes": sum(send.sent_bytes for send in sends),
            "weights/send_s": max(send.send_s for send in sends),
            "weights/receive_s": max(load.receive_s for load in loads),
            "weights/pause_s": max(pauses.values()),
            "weights/verified_engines": len(loads),
            **{f"engine/rank{rank}/pause_s": pauses[rank] for rank in ranks},
        }


def assert_moved(version: int, norm: float, *, gradient: float, rate: float) -> None:
    """A step that had a gradient has changed weights as engines hold them."""
    if norm == 0 and gradient > 0 and rate > 0:
        raise GuardError(
            f"frozen policy: the step to version {version} had gradient norm {gradient:g} and learning rate "
            f"{rate:g}, and no weight changed as engines hold it: raise the rate, or compute in float32"
        )


def _difference(held: Sequence[int], sent: Sequence[int]) -> str:
    """Of checksums, where they first differ."""
    for place, (ours, theirs) in enumerate(zip(held, sent, strict=False)):
        if ours != theirs:
            return f"checksum {place} of {len(sent)} is {ours:#x}, the trainers' is {theirs:#x}"
    return f"it has {len(held)} checksums, the trainers' are {len(sent)}"
