"""The trainer rank's life: batches in, optimizer steps, weights out.

The main thread takes messages from rank 0 in the order in which they were sent, the same on all trainer ranks, so that
their collectives meet.  Sending weights overlaps what comes next.  Knows nothing of gates, queues or environments.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from spmd_rl.config import Config
from spmd_rl.distributed.liveness import Liveness
from spmd_rl.distributed.stop_signals import StopSignals
from spmd_rl.distributed.transport import Inbox, Kind, Message, Outbox
from spmd_rl.distributed.world import World
from spmd_rl.files import disk_space
from spmd_rl.model.causal_lm import engine_dtype, exact_dtype
from spmd_rl.packing import packing
from spmd_rl.ranks.build_trainer import make_trainer
from spmd_rl.storage import checkpoint
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.types import GuardError
from spmd_rl.weights.adapter import AdapterSender
from spmd_rl.weights.disk import DiskSender
from spmd_rl.weights.layout import manifest
from spmd_rl.weights.sender import WeightSender
from spmd_rl.weights.wire import SendReport


class TrainerRank:
    """One rank's share of the trainer.  All trainer ranks call its methods together."""

    def __init__(self, *, world: World, config: Config, run_dir: RunDir, live: Liveness, outbox: Outbox) -> None:
        self._world, self._config, self._run_dir, self._live, self._outbox = world, config, run_dir, live, outbox
        self.version = 0
        self._gave_up = False  # on the batch of this version, before it moved a weight: nothing more is trained
        self._written = threading.Event()  # the newest checkpoint, if any, is on disk and rank 0 was told
        self._written.set()
        live.progress("loading the model")
        self._trainer = make_trainer(
            config, device=world.device, mesh=world.mesh, group=world.train, context=world.context
        )
        self._sender = self._make_sender()

    def restore(self, version: int, folder: Path) -> None:
        """Weights and optimizer of the checkpoint at `version`."""
        state = self._trainer.state_dict()
        checkpoint.load_trainer(state, folder / "trainer", self._world.ckpt)
        self._trainer.load_state_dict(state)
        self.version = version

    def publish(self) -> float:
        """Send the weights of this version; the seconds that the trainer was held."""
        by_disk = self._config.weights.mode == "disk"
        self._live.progress(f"publishing weights {self.version}", writes=self._run_dir.weights if by_disk else None)
        self._trainer.models.refresh()
        return self._sender.publish(self.version) if self._sender else 0.0

    def handle(self, message: Message, waited_s: float) -> None:
        """What rank 0 asks for, but STOP."""
        match message.kind:
            case Kind.PROBE if not self._gave_up:
                self._score_probe(message)
            case Kind.BATCH if not self._gave_up:
                self._train(message, waited_s)

    def finish(self, *, export: bool, save: bool) -> None:
        """The model as a Hugging Face folder, the last checkpoint; then the engines learn that this is the end."""
        if export:
            self._live.progress("exporting the model", writes=self._run_dir.model)
            source = Path(self._config.model.path)
            self._trainer.export(self._run_dir.model, source)
            if self._config.lora.rank:
                self._live.progress("exporting the adapter", writes=self._run_dir.adapter)
                self._trainer.export_adapter(self._run_dir.adapter, source)
        if save:
            self._save(final=True)
            self._saved()
        else:
            self._reply(Kind.SAVED, final=True, files={})
        if self._sender:
            self._sender.close()

    def _train(self, message: Message, waited_s: float) -> None:
        """One batch: step, publish, tell rank 0; then what may come after a step."""
        index = message.words["index"]
        if index != self.version:
            raise RuntimeError(f"batch {index} arrived at version {self.version}")
        self._live.progress(f"training batch {index}")
        start = time.monotonic()
        share = packing.by_segment(packing.from_arrays(message.arrays, message.words["words"]))
        num_steps = self._trainer.num_steps
        try:
            stepped = self._trainer.step(share, index)
        except RuntimeError as error:
            error.add_note(f"the batch is {self._run_dir.batches / f'step_{index}.safetensors'}")
            error.add_note(f"python -m spmd_rl replay {self._run_dir.path} --step {index}")
            if not isinstance(error, GuardError) or self._trainer.num_steps != num_steps:
                raise  # the weights are of no version
            self._gave_up = True
            self._reply(Kind.GAVE_UP, text="".join(traceback.format_exception(error)).rstrip())
            return
        metrics = {f"trainer/{name}": value for name, value in stepped.items()}
        self.version += 1
        metrics["trainer/hold_s"] = self.publish()
        metrics["trainer/step_s"] = time.monotonic() - start
        metrics["trainer/wait_s"] = waited_s
        self._reply(Kind.STEP, metrics=metrics)
        if message.words["save"]:
            self._save(final=False)

    def _score_probe(self, message: Message) -> None:
        """What an engine sampled at this version."""
        self._live.progress(f"scoring the probe at version {self.version}")
        start = time.monotonic()
        share = packing.from_arrays(message.arrays, message.words["words"])
        scores = self._trainer.score_probe(share)
        words = {"number": message.words["number"], "version": self.version, "seconds": time.monotonic() - start}
        self._outbox.put(Message(Kind.PROBED, words, scores))

    def _save(self, *, final: bool) -> None:
        """Returns once the state is copied; rank 0 hears when it is on disk."""
        self._saved()
        folder = checkpoint.aside(self._run_dir.checkpoints, self.version) / "trainer"
        self._live.progress(f"saving version {self.version}", writes=folder)
        self._written.clear()
        saving = checkpoint.save_trainer(self._trainer.state_dict(), folder, self._world.ckpt)
        saving.add_done_callback(partial(self._tell_saved, {"version": self.version, "final": final}, folder))

    def _saved(self) -> None:
        """Wait for the newest checkpoint: there is one at a time."""
        self._live.progress("writing a checkpoint", writes=self._run_dir.checkpoints)
        self._written.wait()

    def _tell_saved(self, words: dict[str, int | bool], folder: Path, saving: Future[None]) -> None:
        """On the thread that wrote it; what is raised here nobody would hear of."""
        try:
            saving.result()
            index = self._world.trainer_ranks.index(self._world.rank)
            files = checkpoint.sums(folder, index, read=self._live.reads_back)
        except BaseException as error:
            self._live.failed(disk_space.blamed(error, self._run_dir.checkpoints))
            return
        self._outbox.put(Message(Kind.SAVED, {**words, "files": files}))
        self._written.set()

    def _reply(self, kind: Kind, **words: object) -> None:
        self._outbox.put(Message(kind, {"version": self.version, **words}))

    def _make_sender(self) -> WeightSender | AdapterSender | DiskSender | None:
        world, weights, models = self._world, self._config.weights, self._trainer.models
        dtype = engine_dtype(self._config.model.dtype, world.device)
        if weights.mode == "disk":
            source = Path(self._config.model.path)
            return DiskSender(
                weights=self._run_dir.weights,
                export=lambda folder: self._trainer.export(folder, source, dtype),
                kept=self._config.weights_kept,
                reports=world.rank == world.trainer_ranks[0],
                sent=self._sent,
            )
        if world.rank not in world.sender_ranks:
            return None
        parameters = models.named_parameters()
        common = {
            "specs": manifest(parameters, dtype=models.dtypes(dtype)),
            "index": world.sender_ranks.index(world.rank),
            "num_senders": len(world.sender_ranks),
            "meta_group": world.wts_meta[world.rank],
            "payload_group": world.wts[world.rank],
            "failed": self._live.failed,
            "sent": self._sent,
        }
        if self._config.lora.sync == "adapter":
            exact = exact_dtype(self._config.model.path, dtype)
            weights_of = {"frozen": models.frozen(), "additions": models.additions(), "merged": parameters}
            return AdapterSender(**common, **weights_of, lora=models.lora, exact=exact)
        delta, anchor_every = weights.mode == "delta", weights.anchor_every
        return WeightSender(**common, parameters=parameters, delta=delta, anchor_every=anchor_every)

    def _sent(self, report: SendReport) -> None:
        words = {name: getattr(report, name) for name in ("version", "sent_bytes", "send_s", "update_norm")}
        self._outbox.put(Message(Kind.SENT, {**words, "checksums": list(report.checksums)}))


def run_trainer(
    world: World,
    config: Config,
    run_dir: RunDir,
    live: Liveness,
    signals: StopSignals,
    version: int,
    restored: Path | None,
) -> None:
    """Until rank 0 says stop.  Starts with `version`, of the checkpoint in `restored` where there is one."""
    messages: queue.Queue[Message] = queue.Queue()
    outbox = Outbox(peer=0, group=world.ctl, failed=live.lost)
    inbox = Inbox(peer=0, group=world.ctl, deliver=messages.put, failed=live.lost)
    signals.on_first(lambda number: outbox.put(Message(Kind.ASKED, {"signal": number})))
    rank = TrainerRank(world=world, config=config, run_dir=run_dir, live=live, outbox=outbox)
    if restored:
        rank.restore(version, restored)
    rank.publish()
    while True:
        live.progress("waiting for a batch")
        start = time.monotonic()
        message = messages.get()
        if message.kind == Kind.STOP:
            break
        rank.handle(message, time.monotonic() - start)
    rank.finish(export=message.words["export"], save=message.words["save"])
    live.progress("ending")
    outbox.put(Message(Kind.STOP))
    outbox.close(timeout_s=config.run.shutdown_s)
    inbox.join(timeout_s=config.run.shutdown_s)
