"""The program, with one part of one rank that raises or hangs: `... -m tests.end_to_end.misbehaving … engine:1:raise`.

That is the part (engine: in its 20th step, loss: in its 3rd batch, weights: an engine that has half of the 4th version,
all versions then coming in many small buckets), the rank, and what it does.  With `checkpoint:0:slow` rank 0 takes a
second to complete one.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable

from spmd_rl.cli import main
from spmd_rl.engine.native import NativeEngine
from spmd_rl.objective.losses import LOSSES
from spmd_rl.storage import checkpoint
from spmd_rl.weights import receiver, sender

NUM_BUCKETS = 22  # of models/tiny, 1.4 MB


def failing(work: Callable, how: str, after: int) -> Callable:
    """`work`, until it has been called `after` times."""
    calls = itertools.count(1)

    def call(*args: object, **named: object) -> object:
        if next(calls) >= after:
            if how == "raise":
                raise RuntimeError("the device is on fire")
            print("hanging", flush=True)
            threading.Event().wait()
        return work(*args, **named)

    return call


def slow(work: Callable) -> Callable:
    def call(*args: object) -> object:
        time.sleep(1.0)
        return work(*args)

    return call


parts = r"(engine|loss|weights):\d+:(raise|hang)|checkpoint:0:slow"
words = [word for word in sys.argv[1:] if re.fullmatch(parts, word)]
for part, rank, how in (word.split(":") for word in words):
    if part == "weights":
        for side in (sender.WeightSender, receiver.WeightReceiver):
            side.__init__.__kwdefaults__["bucket_bytes"] = 1 << 16
    if rank != os.environ["RANK"]:
        continue
    if part == "loss":
        LOSSES.update({name: failing(loss, how, 3) for name, loss in LOSSES.items()})
    elif part == "checkpoint":
        checkpoint.complete = slow(checkpoint.complete)
    elif part == "weights":
        receiver.bucket_checksum = failing(receiver.bucket_checksum, how, int(3.5 * NUM_BUCKETS))
    else:
        NativeEngine.step = failing(NativeEngine.step, how, 20)

sys.exit(main([word for word in sys.argv[1:] if word not in words]))
