"""The trainer rank's life: batches in, optimizer steps, weights out.

The main thread takes messages from rank 0 in the order in which they were sent, the same on all trainer ranks, so that
their collectives meet.  Sending weights overlaps what comes next.  Knows nothing of gates, queues or environments.
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import assert_never

from spmd_rl.config import Config
from spmd_rl.distributed.liveness import Liveness
from spmd_rl.distributed.mail import Mail, farewell
from spmd_rl.distributed.stop_signals import StopSignals
from spmd_rl.distributed.world import World
from spmd_rl.files import disk_space
from spmd_rl.model.causal_lm import engine_dtype, exact_dtype
from spmd_rl.packing import packing
from spmd_rl.packing.messages import (
    AnyMessage,
    BatchRefused,
    Bye,
    CheckpointWritten,
    Files,
    FinishTraining,
    FromTrainer,
    ProbeScored,
    ScoreProbe,
    StepDone,
    StopRequested,
    ToTrainer,
    TrainBatch,
    TrainingFinished,
    WeightsSent,
)
from spmd_rl.ranks.build_trainer import make_trainer
from spmd_rl.storage import checkpoint
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.types import GuardError
from spmd_rl.weights.adapter import AdapterSender
from spmd_rl.weights.disk import DiskSender
from spmd_rl.weights.layout import manifest
from spmd_rl.weights.sender import WeightSender
from spmd_rl.weights.wire import SendReport

Send = Callable[[FromTrainer], None]


class TrainerRank:
    """One rank's share of the trainer.  All trainer ranks call its methods together."""

    def __init__(self, *, world: World, config: Config, run_dir: RunDir, live: Liveness, send: Send) -> None:
        self._world, self._config, self._run_dir, self._live, self._send = world, config, run_dir, live, send
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

    def run(self, messages: queue.Queue[ToTrainer]) -> None:
        """Publish the first weights, then do what rank 0 asks for until it says Bye."""
        self.publish()
        ended = False
        while not ended:
            self._live.progress("waiting for a batch")
            start = time.monotonic()
            message = messages.get()
            ended = self.handle(message, time.monotonic() - start)

    def handle(self, message: ToTrainer, waited_s: float) -> bool:
        """Do what rank 0 asks for; True once it has said Bye."""
        match message:
            case TrainBatch():
                if not self._gave_up:
                    self._train(message, waited_s)
            case ScoreProbe():
                if not self._gave_up:
                    self._score_probe(message)
            case FinishTraining(export=export, save=save):
                self.finish(export=export, save=save)
            case Bye():
                return True
            case _:
                assert_never(message)
        return False

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
            self._save(TrainingFinished)
            self._saved()
        else:
            self._send(TrainingFinished(version=self.version, files={}))
        if self._sender:
            self._sender.close()

    def _train(self, message: TrainBatch, waited_s: float) -> None:
        """One batch: step, publish, tell rank 0; then what may come after a step."""
        index = message.index
        if index != self.version:
            raise RuntimeError(f"batch {index} arrived at version {self.version}")
        self._live.progress(f"training batch {index}")
        start = time.monotonic()
        share = packing.by_segment(message.share)
        num_steps = self._trainer.num_steps
        try:
            stepped = self._trainer.step(share, index)
        except RuntimeError as error:
            error.add_note(f"the batch is {self._run_dir.batches / f'step_{index}.safetensors'}")
            error.add_note(f"python -m spmd_rl replay {self._run_dir.path} --step {index}")
            if not isinstance(error, GuardError) or self._trainer.num_steps != num_steps:
                raise  # the weights are of no version
            self._gave_up = True
            text = "".join(traceback.format_exception(error)).rstrip()
            self._send(BatchRefused(version=self.version, text=text))
            return
        metrics = {f"trainer/{name}": value for name, value in stepped.items()}
        self.version += 1
        metrics["trainer/hold_s"] = self.publish()
        metrics["trainer/step_s"] = time.monotonic() - start
        metrics["trainer/wait_s"] = waited_s
        self._send(StepDone(version=self.version, metrics=metrics))
        if message.save:
            self._save(CheckpointWritten)

    def _score_probe(self, message: ScoreProbe) -> None:
        """What an engine sampled at this version."""
        self._live.progress(f"scoring the probe at version {self.version}")
        start = time.monotonic()
        scores = self._trainer.score_probe(message.sequences)
        seconds = time.monotonic() - start
        self._send(ProbeScored(number=message.number, version=self.version, seconds=seconds, **scores))

    def _save(self, answer: type[CheckpointWritten | TrainingFinished]) -> None:
        """Returns once the state is copied; rank 0 hears when it is on disk."""
        self._saved()
        folder = checkpoint.aside(self._run_dir.checkpoints, self.version) / "trainer"
        self._live.progress(f"saving version {self.version}", writes=folder)
        self._written.clear()
        saving = checkpoint.save_trainer(self._trainer.state_dict(), folder, self._world.ckpt)
        saving.add_done_callback(partial(self._tell_saved, answer, self.version, folder))

    def _saved(self) -> None:
        """Wait for the newest checkpoint: there is one at a time."""
        self._live.progress("writing a checkpoint", writes=self._run_dir.checkpoints)
        self._written.wait()

    def _tell_saved(
        self, answer: type[CheckpointWritten | TrainingFinished], version: int, folder: Path, saving: Future[None]
    ) -> None:
        """On the thread that wrote it; what is raised here nobody would hear of."""
        try:
            saving.result()
            index = self._world.trainer_ranks.index(self._world.rank)
            files: Files = checkpoint.sums(folder, index, read=self._live.reads_back)
        except BaseException as error:
            self._live.failed(disk_space.blamed(error, self._run_dir.checkpoints))
            return
        self._send(answer(version=version, files=files))
        self._written.set()

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
        specs, index = manifest(parameters, dtype=models.dtypes(dtype)), world.sender_ranks.index(world.rank)
        if self._config.lora.sync == "adapter":
            assert models.lora is not None
            return AdapterSender(
                frozen=models.frozen(),
                additions=models.additions(),
                merged=parameters,
                specs=specs,
                lora=models.lora,
                exact=exact_dtype(self._config.model.path, dtype),
                index=index,
                num_senders=len(world.sender_ranks),
                meta_group=world.wts_meta[world.rank],
                payload_group=world.wts[world.rank],
                failed=self._live.failed,
                sent=self._sent,
            )
        return WeightSender(
            parameters=parameters,
            specs=specs,
            index=index,
            num_senders=len(world.sender_ranks),
            meta_group=world.wts_meta[world.rank],
            payload_group=world.wts[world.rank],
            delta=weights.mode == "delta",
            anchor_every=weights.anchor_every,
            failed=self._live.failed,
            sent=self._sent,
        )

    def _sent(self, report: SendReport) -> None:
        """On the sender's thread."""
        self._send(
            WeightsSent(
                version=report.version,
                checksums=list(report.checksums),
                sent_bytes=report.sent_bytes,
                send_s=report.send_s,
                update_norm=report.update_norm,
            )
        )


def run_trainer(
    world: World,
    config: Config,
    run_dir: RunDir,
    live: Liveness,
    signals: StopSignals,
    version: int,
    restored: Path | None,
) -> None:
    """Until rank 0 says Bye.  Starts with `version`, of the checkpoint in `restored` where there is one."""
    messages: queue.Queue[ToTrainer] = queue.Queue()

    def deliver(peer: int, message: AnyMessage) -> None:
        assert isinstance(message, ToTrainer)
        messages.put(message)

    mail = Mail(peers=(0,), group=world.ctl, deliver=deliver, failed=live.lost)
    signals.on_first(lambda number: mail.send(0, StopRequested(signal=number)))
    rank = TrainerRank(
        world=world, config=config, run_dir=run_dir, live=live, send=lambda message: mail.send(0, message)
    )
    if restored:
        rank.restore(version, restored)
    rank.run(messages)
    live.progress("ending")
    farewell(mail, timeout_s=config.run.shutdown_s)
