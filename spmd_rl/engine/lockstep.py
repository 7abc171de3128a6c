"""One engine over several ranks: the leader decides, the members do the same.

Every rank of the engine holds an `Engine` that computes its part inside; all must see the same calls in the same
order.  The leader is an `Engine` itself: it notes each call and broadcasts its notes, the plan, before each step
and swap.  Members apply plans until one says close.  A member that sampled other tokens than the leader is found with
the next plan, the last at the close.  Knows nothing of the engine's kind, nor how weights arrive.

    plan    int64[1] bytes, then uint8 JSON [digest, [[call, argument, ...], ...]]   over the engine's group, on the CPU
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.engine.protocol import Engine
from spmd_rl.engine.update import DISTURBED
from spmd_rl.types import JSON, Completion, Sampling


class Leader:
    """The engine as its users see it, on the first rank of `group`."""

    def __init__(self, *, engine: Engine, group: ProcessGroup) -> None:
        self._engine, self._group = engine, group
        self._plan: list[list[JSON]] = []
        self._digest = 0  # of everything that ended
        self._newest = -1  # version that members were told to load

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def prefill_budget(self) -> int:
        return self._engine.prefill_budget

    @property
    def scored_choices(self) -> np.ndarray:
        return self._engine.scored_choices

    @property
    def num_running(self) -> int:
        return self._engine.num_running

    @property
    def num_lacking_kv(self) -> int:
        return self._engine.num_lacking_kv

    @property
    def kv_used(self) -> float:
        return self._engine.kv_used

    @property
    def recomputes(self) -> bool:
        return self._engine.recomputes

    def submit(self, request_id: int, prompt: np.ndarray, sampling: Sampling) -> None:
        self._engine.submit(request_id, prompt, sampling)  # first, for it may refuse
        self._plan.append(["submit", request_id, prompt.tolist(), asdict(sampling)])

    def cancel(self, request_id: int) -> None:
        self._plan.append(["cancel", request_id])
        self._engine.cancel(request_id)

    def step(self) -> list[tuple[int, Completion]]:
        self._tell("step")
        ended = self._engine.step()
        self._digest = _digest(self._digest, ended)
        return ended

    def prepare(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self._engine.prepare(tensors, version)

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Those of a probe, disturbed or the newest once more, members have already."""
        again = version in (self._newest, DISTURBED)
        self._tell("reload" if again else "load", version)
        self._newest = self._newest if again else version
        self._engine.load_weights(tensors, version)

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        self._tell("score", token_ids.tolist())
        return self._engine.score(token_ids)

    def close(self) -> None:
        self._tell("close")
        self._engine.close()

    def _tell(self, call: str, *arguments: JSON) -> None:
        plan = json.dumps([self._digest, [*self._plan, [call, *arguments]]], separators=(",", ":")).encode()
        self._plan = []
        dist.broadcast(torch.tensor([len(plan)]), group=self._group, group_src=0)
        dist.broadcast(torch.frombuffer(bytearray(plan), dtype=torch.uint8), group=self._group, group_src=0)


def follow(
    *,
    engine: Engine,
    group: ProcessGroup,
    load: Callable[[int], None],  # the weights of a version into the engine, once this rank has them
    reload: Callable[[int], None],  # those that it has: disturbed, as DISTURBED, or as they are
    progress: Callable[[str], None] = lambda doing: None,
) -> None:
    """A member's life: do what the leader does, until it closes.  Waits for the leader's plans."""
    digest = 0
    while True:
        progress("waiting for the leader's plan")
        expected, calls = _next_plan(group)
        if digest != expected:
            raise RuntimeError(
                f"rank {dist.get_rank()} sampled other tokens than the leader of its engine, rank "
                f"{dist.get_global_rank(group, 0)}"
            )
        for call, *arguments in calls:
            match call, arguments:
                case "submit", (request_id, prompt, sampling):
                    tuples = {name: tuple(sampling[name]) for name in ("stop_ids", "stop")}
                    engine.submit(request_id, np.array(prompt, np.int32), Sampling(**sampling | tuples))
                case "cancel", (request_id,):
                    engine.cancel(request_id)
                case "step", ():
                    progress("generating")
                    digest = _digest(digest, engine.step())
                case "load", (version,):
                    load(version)
                case "reload", (version,):
                    reload(version)
                case "score", (token_ids,):
                    engine.score(np.array(token_ids, np.int32))
                case "close", ():
                    engine.close()
                    return
                case unknown:
                    raise RuntimeError(f"the leader's plan says {unknown}: do all ranks run the same code?")


def _next_plan(group: ProcessGroup) -> tuple[int, list[list[Any]]]:  # JSON, as `Leader` of the same code wrote it
    size = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(size, group=group, group_src=0)
    plan = torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(plan, group=group, group_src=0)
    digest, calls = json.loads(plan.numpy().tobytes())
    return digest, calls


def _digest(digest: int, ended: list[tuple[int, Completion]]) -> int:
    for request_id, completion in ended:
        digest = zlib.crc32(completion.token_ids.tobytes(), digest ^ request_id & 0xFFFFFFFF)
    return digest
