"""The inference rank's life: work in, whole episodes next to the engine, rollouts out.

The main thread runs one event loop with the episodes; the engine, the weights and every peer have threads of their own.
What comes and goes are messages, on rank 0 too, where orchestrator and engine share the process: one path for all.
Knows nothing of gates, batches or what its rollouts are for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import assert_never

import numpy as np

from spmd_rl.config import Config
from spmd_rl.distributed.liveness import Liveness
from spmd_rl.distributed.mail import Mail, farewell
from spmd_rl.distributed.stop_signals import StopSignals
from spmd_rl.distributed.world import World
from spmd_rl.engine.thread import EngineThread
from spmd_rl.envs.environment import Environment
from spmd_rl.model.causal_lm import distances, load_config, vocab_size
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.packing import packing
from spmd_rl.packing.messages import (
    AnyMessage,
    AskCounters,
    AttemptFailed,
    Bye,
    CancelGroup,
    Counters,
    FromEngine,
    LoadFromDisk,
    MayLoad,
    PinVersion,
    ProbeSampled,
    RolloutFinished,
    SampleProbe,
    StartGroup,
    StopRequested,
    ToEngine,
    VersionPinned,
    WeightsLoaded,
)
from spmd_rl.ranks.build_engine import build_engine, make_receiver
from spmd_rl.ranks.episodes import Episodes
from spmd_rl.ranks.probe_sampler import BEFORE_SWAP, ProbeSampler
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.types import FailedAttempt, Rollout, Sampling
from spmd_rl.weights.disk import DiskReceiver
from spmd_rl.weights.wire import Fetch

Send = Callable[[FromEngine], None]


class InferenceRank:
    """One engine and its episodes: `handle` takes messages, `send` gives them.  Belongs to one event loop."""

    def __init__(
        self,
        *,
        world: World,
        config: Config,
        run_dir: RunDir,
        live: Liveness,
        send: Send,
        environments: Mapping[str, Environment],
    ) -> None:
        self._send, self._live = send, live
        self._loop = asyncio.get_running_loop()
        self._probes = config.run.probe_every != 0
        self._first: Fetch | None = None  # the first weights, until they have been probed
        self._to_probe: dict[int, asyncio.Event] = {}  # versions to come; set right before they are swapped in
        self._arrived = -1  # the newest version to be swapped in
        self._probing: set[asyncio.Task[None]] = set()
        self._waits_for_word = config.staleness.on_update == "drain" and config.weights.mode != "disk"
        self._in_place = config.weights.receive == "in_place"
        self._may_swap = threading.Semaphore(0)
        self.stopped = asyncio.Event()
        tokenizer = Tokenizer(config.model.path, config.model.template)
        engine, specs = build_engine(
            config, device=world.device, group=world.engine_group, decode=partial(tokenizer.decode, special=True)
        )
        self._engine = EngineThread(
            engine=engine,
            loop=self._loop,
            failed=live.failed,
            on_update="continue" if config.staleness.on_update == "drain" else config.staleness.on_update,
            progress=lambda doing: live.progress(doing, thread="engine"),
        )
        self._episodes = make_episodes(
            config,
            environments,
            tokenizer,
            self._engine,
            self._finished,
            lambda attempt: send(AttemptFailed(attempt=attempt)),
        )
        self._sampler = ProbeSampler(
            engine=self._engine,
            sampling=run_sampling(config, tokenizer)["train"],
            encode=tokenizer.encode,
            max_seq_len=config.inference.max_seq_len,
            distances=distances(load_config(config.model.path)),
            recomputes=config.inference.kv_on_update == "recompute",
            seed=config.run.seed,
        )
        self._engine.start()
        self._receiver = make_receiver(
            world, config, run_dir, specs=specs, deliver=self._weights_arrived, failed=live.failed
        )
        self._receiver.start()

    def handle(self, message: ToEngine) -> None:
        """What rank 0 asks for."""
        match message:
            case StartGroup(work=work):
                self._episodes.start(work)
            case CancelGroup(first_ticket=first, size=size, purpose=purpose):
                self._episodes.cancel(range(first, first + size), purpose)
            case SampleProbe(number=number, version=version):
                self._start_probe(number, version)
            case LoadFromDisk(version=version, checksums=checksums):
                assert isinstance(self._receiver, DiskReceiver)
                self._receiver.take(version, checksums)
            case MayLoad():
                self._may_swap.release()
            case PinVersion(number=number, upto=upto):
                self._engine.pin(upto, partial(self._pinned, number))
            case AskCounters(number=number):
                self._send(Counters(number=number, counts=self._counts()))
            case Bye():
                self.stopped.set()
            case _:
                assert_never(message)

    def close(self, timeout_s: float) -> None:
        """After Bye and the senders' end."""
        self._engine.close(timeout_s)
        self._may_swap.release()
        self._receiver.join(timeout_s=timeout_s)

    def _counts(self) -> dict[str, int | float]:
        engine, stats = self._engine.engine, self._engine.stats
        return {
            **asdict(stats),
            "kv_used": engine.kv_used,
            "version": engine.version,
        }

    def _finished(self, rollout: Rollout) -> None:
        self._send(RolloutFinished(rollout=packing.pack([rollout])))

    def _start_probe(self, number: int, version: int | None) -> None:
        """Of a version to come in small, or of the one that is there in full: rank 0 hears what was sampled."""
        arrived = None
        if version is not None:
            self._to_probe[version] = arrived = asyncio.Event()
            if self._arrived >= version:  # before this was asked
                arrived.set()
        task = self._loop.create_task(self._sample_probe(number, version, arrived))
        self._probing.add(task)
        task.add_done_callback(self._probe_ended)

    async def _sample_probe(self, number: int, version: int | None, arrived: asyncio.Event | None) -> None:
        if arrived is None or version is None:
            first, self._first = self._first, None
            assert first is not None  # rank 0 asks once, when they have come
            sample = await self._sampler.at_start(lambda: first().tensors)
        else:
            await arrived.wait()
            sample = await self._sampler.at(version)
        answer = ProbeSampled(
            number=number,
            version=self._engine.version,
            num_tokens=sample.num_tokens,
            sequences=packing.pack(sample.rollouts, np.ones(len(sample.rollouts), np.float32)),
            scores=sample.scores,
            choices=sample.choices,
        )
        self._send(answer)

    def _probe_ended(self, task: asyncio.Task[None]) -> None:
        self._probing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._live.failed(error)

    def _pinned(self, number: int, version: int, held_s: float) -> None:  # on the engine's thread
        message = VersionPinned(number=number, version=version, held_s=held_s)
        self._loop.call_soon_threadsafe(self._send, message)

    def _weights_arrived(self, version: int, fetch: Fetch) -> None:
        """On the receiver's thread: what can be done beside the engine's steps, then a swap between two of them.

        The swap is acknowledged.  Where the version is to be probed, a sequence begins before it.
        """
        if not self._in_place:
            self._engine.engine.prepare(fetch().tensors, version)
        if self._waits_for_word and self._engine.version >= 0:
            self._may_swap.acquire()  # unblocked by rank 0's word, once nothing runs that is of the version before
        if self._probes and self._engine.version < 0:
            self._first = fetch

        def swapped(pause_s: float) -> None:  # on the engine's thread
            self._receiver.release(version)
            received = fetch()
            loaded = WeightsLoaded(
                version=version, checksums=received.checksums, receive_s=received.receive_s, pause_s=pause_s
            )
            self._loop.call_soon_threadsafe(self._send, loaded)

        self._arrived, after = version, 0
        if (arrived := self._to_probe.pop(version, None)) is not None:
            self._loop.call_soon_threadsafe(arrived.set)
            after = BEFORE_SWAP
        self._engine.load(lambda: fetch().tensors, version, swapped, after=after)


def make_episodes(
    config: Config,
    environments: Mapping[str, Environment],
    tokenizer: Tokenizer,
    engine: EngineThread,
    finished: Callable[[Rollout], None],
    failed: Callable[[FailedAttempt], None],
) -> Episodes:
    """Episodes of the run's environments with the run's sampling."""
    return Episodes(
        envs=environments,
        generate=engine.generate,
        engine_version=lambda: engine.version,
        sampling=run_sampling(config, tokenizer),
        max_seq_len=config.inference.max_seq_len,
        seed=config.run.seed,
        max_retries=config.rollout.max_retries,
        finished=finished,
        failed=failed,
        decode=tokenizer.decode,
        vocab_size=vocab_size(config.model.path),
    )


def run_sampling(config: Config, tokenizer: Tokenizer) -> dict[str, Sampling]:
    """Of the run's tokens, by purpose."""
    return {
        purpose: Sampling(
            max_tokens=config.rollout.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop_ids=tokenizer.stop_ids,
        )
        for purpose, settings in (("train", config.rollout), ("eval", config.eval))
    }


async def run_inference(
    world: World,
    config: Config,
    run_dir: RunDir,
    live: Liveness,
    signals: StopSignals,
    environments: Mapping[str, Environment],
) -> None:
    """An inference rank other than 0, until rank 0 says stop."""
    live.progress("building the engine")
    loop = asyncio.get_running_loop()
    rank = InferenceRank(
        world=world,
        config=config,
        run_dir=run_dir,
        live=live,
        send=lambda message: mail.send(0, message),
        environments=environments,
    )

    def deliver(peer: int, message: AnyMessage) -> None:
        assert isinstance(message, ToEngine)
        loop.call_soon_threadsafe(rank.handle, message)

    mail = Mail(peers=(0,), group=world.ctl, deliver=deliver, failed=live.lost)
    signals.on_first(lambda number: mail.send(0, StopRequested(signal=number)))
    live.progress("waiting for work")
    live.watch(loop)
    await rank.stopped.wait()
    live.watch(None)
    live.progress("ending")
    rank.close(config.run.shutdown_s)
    farewell(mail, timeout_s=config.run.shutdown_s)
