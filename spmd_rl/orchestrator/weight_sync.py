"""A version's way from trainers to engines: made, sent, loaded, proved, live.  The one place that advances the policy.

    StepDone of trainers → WeightsSent of senders, WeightsLoaded of ranks of engines → equal checksums → live

Promises: versions are never skipped or repeated; a version is live once every rank of an engine holds the bytes that
were sent, by checksum; after `restore` the first one is the very one that a checkpoint remembers.
Knows nothing of what moves the bytes, nor of who reads the version.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from spmd_rl.orchestrator.answers import Answers
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.packing.messages import LoadFromDisk, MayLoad, Message, Number, StepDone, WeightsLoaded, WeightsSent
from spmd_rl.types import GuardError


class WeightSync:
    """`start`, then `run` as a task; `state` is what a checkpoint remembers of the last version."""

    def __init__(
        self,
        *,
        policy: Policy,
        answers: Answers,
        send: Callable[[int, Message], None],
        trainers: Sequence[int],
        senders: Sequence[int],  # those of them that send weights
        holders: Sequence[int],  # ranks of engines
        engines: Sequence[int],  # those of them that lead one
        layout: str,  # of weights on the wire: under equal ones equal checksums mean equal weights; "": never
        by_disk: bool,  # engines are told when a version is written
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._answers, self._send = policy, answers, send
        self._trainers, self._senders, self._holders, self._engines = trainers, senders, holders, engines
        self._layout, self._by_disk, self._say, self._clock = layout, by_disk, say, clock
        self._saved: Mapping[str, object] | None = None  # the state to come back to, until the first version is taken
        self.state: dict[str, object] = {}  # of the version that all engines took last: layout and checksums

    def restore(self, saved: Mapping[str, object] | None) -> None:
        """Before `start`: the state of a checkpoint, None where it has none."""
        self._saved = saved

    async def start(self) -> None:
        """Wait until all engines hold the version that the run begins with."""
        await self.take(self._policy.version)

    async def run(
        self,
        *,
        last_version: Callable[[], int],  # of the run
        made: Callable[[int, Sequence[Mapping[str, Number]]], None],  # (version, metrics of each trainer rank)
        idle: Callable[[], Awaitable[None]] | None,  # engines load a version once nothing older runs; None: at any time
        loaded: Callable[[int, Mapping[str, float]], None],  # (version, figures), right before it is live
    ) -> None:
        """Bring one version after the other.  Waits for the trainers, then for all acknowledgements."""
        while (version := self._policy.version + 1) <= last_version():
            steps = await self._answers.all(StepDone, version, self._trainers)
            made(version, [step.metrics for step in steps])
            start = self._clock()
            if idle:
                await idle()
                if not self._by_disk:  # there they are told when it is written
                    self._tell(MayLoad(version=version))
            figures = await self.take(version)
            loaded(version, figures | {"weights/poll_to_reload_s": self._clock() - start})
            self._policy.advance(version)

    async def take(self, version: int) -> dict[str, float]:
        """Wait until all senders have sent it and all engines have loaded those very bytes; the figures of that."""
        sends: list[WeightsSent] = []
        if self._by_disk:
            sends = await self._answers.all(WeightsSent, version, self._senders)
            self._tell(LoadFromDisk(version=version, checksums=sends[0].checksums))
        loads = await self._answers.all(WeightsLoaded, version, self._holders)
        sends = sends or await self._answers.all(WeightsSent, version, self._senders)
        sent = list(itertools.chain.from_iterable(send.checksums for send in sends))
        for rank, load in zip(self._holders, loads, strict=True):
            if load.checksums != sent:
                raise RuntimeError(
                    f"rank {rank} does not hold the weights of version {version} that were sent: "
                    f"{_difference(load.checksums, sent)}"
                )
        self.state = {"layout": self._layout, "checksums": sent}
        saved, self._saved = self._saved, None
        if saved is not None and self._layout:
            self._assert_restored(version, saved)
        return self._figures(sends, loads)

    def _tell(self, message: Message) -> None:
        for rank in self._holders:
            self._send(rank, message)

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

    def _figures(self, sends: Sequence[WeightsSent], loads: Sequence[WeightsLoaded]) -> dict[str, float]:
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
