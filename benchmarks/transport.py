"""Rollouts from one rank to another: rollouts/s and MB/s beside raw bytes and pickled objects, as JSON.

    OMP_NUM_THREADS=1 python -m benchmarks.transport [--tokens 1000 8000 32000] [--rollouts 64] [--repeats 21]

`batch` packs all rollouts into one message, as a trainer gets them; `single` each into its own, as an engine's rank
sends them; both through an Outbox and an Inbox, packing and unpacking included.  `raw` is the same bytes in one send,
`raw_single` in one send per rollout, memory touched before; `pickled` is torch's own send of Python objects.
Interleaved, in another order every time, for each leaves caches and memory to the next; medians, and `share_of_raw`.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl.distributed.mail import Inbox, Outbox
from spmd_rl.distributed.world import World
from spmd_rl.packing import packing
from spmd_rl.packing.messages import AnyMessage, Bye, TrainBatch
from spmd_rl.types import Rollout
from tests.ranks import run_worlds

LIMIT_S = 300.0
SENDER, RECEIVER = 0, 1


def make_rollouts(num_rollouts: int, num_tokens: int) -> list[Rollout]:
    rollouts = []
    for sample in range(num_rollouts):
        rollout = Rollout(env="bench", task_id=str(sample), sample=sample, ticket=sample, finish_reason="stop")
        rollout.append(np.arange(num_tokens), np.full(num_tokens, -1.5, np.float32), np.full(num_tokens, 3, np.int32))
        rollouts.append(rollout)
    return rollouts


def measure(world: World, num_rollouts: int, num_tokens: int, repeats: int) -> dict[str, Any]:
    """On both ranks; the receiver's answer counts."""
    received: queue.Queue[AnyMessage] = queue.Queue()
    rollouts = make_rollouts(num_rollouts, num_tokens)
    num_bytes = sum(array.nbytes for array in packing.pack(rollouts).arrays().values())
    raw = torch.ones(num_bytes, dtype=torch.uint8)
    pieces = raw.tensor_split(num_rollouts)
    group = world.wts[world.sender_ranks[0]]  # ctl carries the messages: two users of one pair would take each other's
    outbox = inbox = None
    if world.rank == SENDER:
        outbox = Outbox(RECEIVER, world.ctl, failed=fail)
    else:
        inbox = Inbox(SENDER, world.ctl, deliver=lambda _, message: received.put(message), failed=fail)

    def send_packed(some: list[Rollout]) -> None:
        outbox.put(TrainBatch(index=0, save=False, share=packing.pack(some)))

    def receive_packed() -> list[Rollout]:
        message = received.get(timeout=LIMIT_S)
        assert isinstance(message, TrainBatch)
        return packing.unpack(message.share)

    def check(got: list[Rollout]) -> None:
        assert len(got) == num_rollouts and got[-1].token_ids[-1] == num_tokens - 1

    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "batch": (lambda: send_packed(rollouts), lambda: check(receive_packed())),
        "raw": (lambda: dist.send(raw, RECEIVER, group=group), lambda: dist.recv(raw, SENDER, group=group)),
        "single": (
            lambda: [send_packed([rollout]) for rollout in rollouts],
            lambda: check([rollout for _ in rollouts for rollout in receive_packed()]),
        ),
        "raw_single": (
            lambda: [dist.send(piece, RECEIVER, group=group) for piece in pieces],
            lambda: [dist.recv(piece, SENDER, group=group) for piece in pieces],
        ),
        "pickled": (
            lambda: dist.send_object_list(rollouts, RECEIVER, group=group),
            lambda: dist.recv_object_list([None] * num_rollouts, SENDER, group=group),
        ),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)  # on both ranks the same
    for _ in range(repeats + 1):
        for name, (send, receive) in order.sample(sorted(ways.items()), len(ways)):
            dist.barrier(group=world.bar)
            start = time.perf_counter()
            (send if world.rank == SENDER else receive)()
            dist.barrier(group=world.bar)
            taken[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(times[1:]) for name, times in taken.items()}  # the first of each warms up
    if outbox is not None:
        outbox.put(Bye())
        outbox.close(timeout_s=LIMIT_S)
    else:
        inbox.join(timeout_s=LIMIT_S)
    return {
        "megabytes": round(num_bytes / 1e6, 2),
        **{f"{name}_ms": round(1e3 * value, 2) for name, value in seconds.items()},
        "rollouts_per_s": round(num_rollouts / seconds["single"]),
        "megabytes_per_s": round(num_bytes / seconds["batch"] / 1e6),
        "share_of_raw": round(seconds["raw"] / seconds["batch"], 2),
        "share_of_raw_single": round(seconds["raw_single"] / seconds["single"], 2),
        "times_faster_than_pickled": round(seconds["pickled"] / seconds["batch"], 1),
    }


def fail(peer: int, error: Exception) -> None:
    raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 8000, 32000])
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=21)
    options = parser.parse_args()
    results = {
        f"{tokens} tokens x {options.rollouts}": run_worlds(
            measure, 1, 1, options.rollouts, tokens, options.repeats, timeout_s=LIMIT_S
        )[RECEIVER]
        for tokens in options.tokens
    }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
