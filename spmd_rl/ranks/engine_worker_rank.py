"""The life of a rank that computes its part of an engine which another rank leads.

The main thread applies the leader's plans; weights come in a thread, into this rank as into every other, and are loaded
at the step that the plan names.  Knows nothing of requests' purposes, episodes or rollouts.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from spmd_rl.config import Config
from spmd_rl.distributed.liveness import Liveness
from spmd_rl.distributed.mail import Mail, farewell
from spmd_rl.distributed.stop_signals import StopSignals
from spmd_rl.distributed.world import World
from spmd_rl.engine.lockstep import follow
from spmd_rl.engine.protocol import Engine
from spmd_rl.engine.update import DISTURBED, disturbed
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.packing.messages import AnyMessage, LoadFromDisk, StopRequested, WeightsLoaded
from spmd_rl.ranks.build_engine import build_engine, make_receiver
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.weights.disk import DiskReceiver
from spmd_rl.weights.wire import Received


class EngineWorkerRank:
    """One rank's part of an engine: `handle` takes messages, `run` follows the leader's plans."""

    def __init__(
        self, *, world: World, config: Config, run_dir: RunDir, live: Liveness, send: Callable[[WeightsLoaded], None]
    ) -> None:
        self._live, self._send = live, send
        self._arrived: queue.Queue[Received] = queue.Queue()
        self._held: Received | None = None  # the newest weights; their tensors until others came
        live.progress("building the engine")
        decode = partial(Tokenizer(config.model.path).decode, special=True)
        assert world.engine_group is not None
        self._group = world.engine_group
        self._engine, specs = build_engine(config, device=world.device, group=self._group, decode=decode)
        self._receiver = make_receiver(
            world,
            config,
            run_dir,
            specs=specs,
            deliver=lambda version, fetch: self._arrived.put(fetch()),
            failed=live.failed,
        )
        self._receiver.start()

    def handle(self, message: AnyMessage) -> None:
        """What rank 0 says, on the inbox's thread; what it tells the leader the leader's plans say."""
        match message:
            case LoadFromDisk(version=version, checksums=checksums):
                assert isinstance(self._receiver, DiskReceiver)
                self._receiver.take(version, checksums)

    def run(self) -> None:
        """Until the leader closes the engine."""
        follow(
            engine=self._engine,
            group=self._group,
            load=self._load,
            reload=self._reload,
            progress=self._live.progress,
        )

    def close(self, timeout_s: float) -> None:
        """After the senders' end."""
        self._receiver.join(timeout_s=timeout_s)

    def _load(self, version: int) -> None:
        self._live.progress(f"waiting for weights {version}")
        first = self._held is None
        loaded = load_next(self._engine, version, self._take)
        if not first and self._held is not None:  # only the first weights are loaded again, by the probe
            self._held = replace(self._held, tensors={})
        self._receiver.release(version)
        self._send(loaded)

    def _take(self) -> Received:
        """Wait for the next weights; those before are forgotten."""
        self._held = self._arrived.get()
        return self._held

    def _reload(self, version: int) -> None:
        assert self._held is not None
        tensors = self._held.tensors
        self._engine.load_weights(disturbed(tensors) if version == DISTURBED else tensors, version)


def run_engine_worker(world: World, config: Config, run_dir: RunDir, live: Liveness, signals: StopSignals) -> None:
    """Until the leader closes the engine and rank 0 says Bye."""
    rank = EngineWorkerRank(
        world=world, config=config, run_dir=run_dir, live=live, send=lambda message: mail.send(0, message)
    )
    mail = Mail(peers=(0,), group=world.ctl, deliver=lambda peer, message: rank.handle(message), failed=live.lost)
    signals.on_first(lambda number: mail.send(0, StopRequested(signal=number)))
    rank.run()
    live.progress("ending")
    rank.close(config.run.shutdown_s)
    farewell(mail, timeout_s=config.run.shutdown_s)


def load_next(
    engine: Engine, version: int, arrived: Callable[[], Received], clock: Callable[[], float] = time.perf_counter
) -> WeightsLoaded:
    """Load the weights that arrive next, which must be of this version; what rank 0 is told of it.

    The engine stands still while it waits for them.
    """
    start = clock()
    received = arrived()
    if received.version != version:
        raise RuntimeError(f"the leader's plan says weights {version}, {received.version} arrived")
    engine.load_weights(received.tensors, version)
    pause_s = clock() - start
    return WeightsLoaded(version=version, checksums=received.checksums, receive_s=received.receive_s, pause_s=pause_s)
