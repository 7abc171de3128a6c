"""Rollouts from one rank to another: rollouts/s and MB/s beside raw bytes and pickled objects, as JSON.

    OMP_NUM_THREADS=1 python -m benchmarks.transport [--tokens 1000 8000] [--rollouts 64] [--repeats 5]

`message` packs rollouts, sends them through an Outbox, receives them through an Inbox and unpacks; `raw` sends and
receives the same number of bytes; `pickled` is torch's own send of Python objects.  Interleaved, best of the repeats.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spmd_rl import packing
from spmd_rl.transport import Inbox, Kind, Message, Outbox
from spmd_rl.types import Rollout
from spmd_rl.world import World
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
    received: queue.Queue[Message] = queue.Queue()
    rollouts = make_rollouts(num_rollouts, num_tokens)
    packed = packing.pack(rollouts)
    num_bytes = sum(array.nbytes for array in packed.arrays().values())
    raw = torch.ones(num_bytes, dtype=torch.uint8)
    outbox = inbox = None
    if world.rank == SENDER:
        outbox = Outbox(RECEIVER, world.ctl, failed=fail)
    else:
        inbox = Inbox(SENDER, world.ctl, deliver=received.put, failed=fail)

    def send_message() -> None:
        fresh = packing.pack(rollouts)
        outbox.put(Message(Kind.BATCH, {"words": fresh.words}, fresh.arrays()))

    def receive_message() -> None:
        message = received.get(timeout=LIMIT_S)
        got = packing.unpack(packing.from_arrays(message.arrays, message.words["words"]))
        assert len(got) == num_rollouts and got[-1].token_ids[-1] == num_tokens - 1

    # messages use ctl, so the others have a group of their own: two users of one pair would take each other's bytes
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "message": (send_message, receive_message),
        "raw": (
            lambda: dist.send(raw, RECEIVER, group=world.wts[world.sender_ranks[0]]),
            lambda: dist.recv(raw, SENDER, group=world.wts[world.sender_ranks[0]]),
        ),
        "pickled": (
            lambda: dist.send_object_list(rollouts, RECEIVER, group=world.wts[world.sender_ranks[0]]),
            lambda: dist.recv_object_list([None] * num_rollouts, SENDER, group=world.wts[world.sender_ranks[0]]),
        ),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats + 1):
        for name, (send, receive) in ways.items():
            dist.barrier(group=world.bar)
            start = time.perf_counter()
            (send if world.rank == SENDER else receive)()
            dist.barrier(group=world.bar)
            best[name] = min(best[name], time.perf_counter() - start)
    if outbox is not None:
        outbox.put(Message(Kind.STOP))
        outbox.close(timeout_s=LIMIT_S)
    else:
        inbox.join(timeout_s=LIMIT_S)
    return {
        "megabytes": round(num_bytes / 1e6, 2),
        **{f"{name}_ms": round(1e3 * seconds, 2) for name, seconds in best.items()},
        "rollouts_per_s": round(num_rollouts / best["message"]),
        "megabytes_per_s": round(num_bytes / best["message"] / 1e6),
        "share_of_raw": round(best["raw"] / best["message"], 3),
        "times_faster_than_pickled": round(best["pickled"] / best["message"], 2),
    }


def fail(peer: int, error: Exception) -> None:
    raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1000, 8000])
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
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
