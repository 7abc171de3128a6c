"""Versions of weights by disk, from a sender to a receiver in one process."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spmd_rl.model.stored_names import StoredNames
from spmd_rl.trainer.hf_folder import export
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.weights.disk import DiskReceiver, DiskSender
from spmd_rl.weights.wire import Received, SendReport

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Both ends: `publish` and `take` one version after the other."""

    publish: Callable[[int], float]
    take: Callable[[int], Received]
    reports: list[SendReport]  # by version


@contextmanager
def by_disk(
    weights: Path, source: Path, parameters: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]
) -> Iterator[Versions]:
    """Of a model folder `source`, in bfloat16 where its architecture keeps nothing in another type."""
    arrived: queue.Queue[Received | Exception] = queue.Queue()
    reports: list[SendReport] = []
    names, alone = StoredNames(source), TrainerRanks(group=None, device=CPU)
    sender = DiskSender(
        weights=weights,
        export=lambda to: export(parameters, alone, folder=to, source=source, names=names, dtypes=dtypes),
        kept=2,
        reports=True,
        sent=reports.append,
    )
    receiver = DiskReceiver(
        weights=weights,
        loaded=StoredNames(source, torch.bfloat16).loaded,
        device=CPU,
        deliver=lambda version, fetch: arrived.put(fetch()),
        failed=arrived.put,
        sender=0,
        rank=0,
    )
    receiver.start()

    def take(version: int) -> Received:
        receiver.take(version, reports[version].checksums)
        got = arrived.get(timeout=20)
        assert not isinstance(got, Exception), got
        return got

    yield Versions(publish=sender.publish, take=take, reports=reports)
    receiver.join()
