"""The life of a rank that computes its part of an engine which another rank leads.

The main thread applies the leader's plans; weights come in a thread, into this rank as into every other, and are
swapped in at the step that the plan names.  Knows nothing of requests' purposes, episodes or rollouts.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from spmd_rl.config import Config
from spmd_rl.distributed.liveness import Liveness
from spmd_rl.distributed.stop_signals import StopSignals
from spmd_rl.distributed.transport import Inbox, Kind, Message, Outbox
from spmd_rl.distributed.world import World
from spmd_rl.engine.lockstep import follow
from spmd_rl.engine.protocol import Engine
from spmd_rl.engine.update import DISTURBED, disturbed
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.ranks.build_engine import build_engine, make_receiver
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.weights.disk import DiskReceiver
from spmd_rl.weights.wire import Received


def run_member(world: World, config: Config, run_dir: RunDir, live: Liveness, signals: StopSignals) -> None:
    """Until the leader closes the engine and rank 0 says stop."""
    live.progress("building the engine")
    decode = partial(Tokenizer(config.model.path).decode, special=True)
    engine, specs = build_engine(config, device=world.device, group=world.engine_group, decode=decode)
    outbox = Outbox(peer=0, group=world.ctl, failed=live.lost)
    signals.on_first(lambda number: outbox.put(Message(Kind.ASKED, {"signal": number})))
    arrived: queue.Queue[Received] = queue.Queue()
    held: list[Received] = []  # the first weights, until others come

    receiver = make_receiver(
        world,
        config,
        run_dir,
        specs=specs,
        deliver=lambda version, fetch: arrived.put(fetch()),
        failed=live.failed,
    )
    receiver.start()

    def told(message: Message) -> None:
        if message.kind == Kind.SWAP and isinstance(receiver, DiskReceiver):  # else the leader's plan says when
            receiver.take(message.words["version"], message.words["checksums"])

    inbox = Inbox(peer=0, group=world.ctl, deliver=told, failed=live.lost)

    def load(version: int) -> None:
        live.progress(f"waiting for weights {version}")
        first = not held

        def received() -> Received:
            held[:] = [arrived.get()]
            return held[0]

        loaded = swap(engine, version, received)
        if not first:
            held[:] = [replace(held[0], tensors={})]
        receiver.release(version)
        outbox.put(loaded)

    def reload(version: int) -> None:
        tensors = held[0].tensors
        engine.load_weights(disturbed(tensors) if version == DISTURBED else tensors, version)

    follow(engine=engine, group=world.engine_group, load=load, reload=reload, progress=live.progress)
    live.progress("ending")
    receiver.join(timeout_s=config.run.shutdown_s)
    inbox.join(timeout_s=config.run.shutdown_s)
    outbox.put(Message(Kind.STOP))
    outbox.close(timeout_s=config.run.shutdown_s)


def swap(
    engine: Engine, version: int, arrived: Callable[[], Received], clock: Callable[[], float] = time.perf_counter
) -> Message:
    """To the weights that arrive next, which must be of this version; what rank 0 is told of it.

    The engine stands still while it waits for them.
    """
    start = clock()
    received = arrived()
    if received.version != version:
        raise RuntimeError(f"the leader's plan says weights {version}, {received.version} arrived")
    engine.load_weights(received.tensors, version)
    words = {"version": version, "checksums": received.checksums, "receive_s": received.receive_s}
    return Message(Kind.LOADED, {**words, "pause_s": clock() - start})
