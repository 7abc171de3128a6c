"""Everything that one rank tells another, one frozen class each.

Arrays are fields; their shapes and dtypes stand beside them.  `frame.py` turns a message into bytes and back, and
refuses what is missing, unknown or of another type.  Knows nothing of ranks' lives, groups or threads.
"""

from __future__ import annotations

import msgspec
import numpy as np

from spmd_rl.packing.packing import Packed
from spmd_rl.types import FailedAttempt, GroupWork

Number = int | float
Files = dict[str, list[int]]  # size in bytes and CRC-32 by name, of what a trainer rank wrote


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one rank tells another."""


class Answer(Message, frozen=True):
    """What several ranks say to one question."""

    @property
    def key(self) -> int:
        """What the question is known by, among those of this kind."""
        raise NotImplementedError


class OfVersion(Answer, frozen=True):
    """An answer that every rank of its kind gives for each version."""

    version: int

    @property
    def key(self) -> int:
        return self.version


class OfQuestion(Answer, frozen=True):
    """An answer to the question of this number."""

    number: int

    @property
    def key(self) -> int:
        return self.number


class Bye(Message, frozen=True):
    """To and from every rank: the last message of its direction."""


# ---- from the orchestrator to ranks of engines


class StartGroup(Message, frozen=True):
    """Play all members of a group."""

    work: GroupWork


class CancelGroup(Message, frozen=True):
    """Give up the rollouts with the tickets first_ticket … first_ticket + size - 1."""

    first_ticket: int
    size: int
    purpose: str  # "train" | "eval"


class LoadFromDisk(Message, frozen=True):
    """A version is written: load it."""

    version: int
    checksums: list[int]  # of what was written


class MayLoad(Message, frozen=True):
    """Nothing runs any more that an older version sampled: load the version that has been received."""

    version: int


class PinVersion(Message, frozen=True):
    """Load no version above `upto` (or above the version already loaded or received).  None lifts the pin."""

    number: int  # of the question
    upto: int | None


class AskCounters(Message, frozen=True):
    """Answer with `Counters`."""

    number: int  # of the question


class SampleProbe(Message, frozen=True):
    """Sample sequences for the probe."""

    number: int  # of the probe
    version: int | None  # a version to come, in small; None: the version of now, in full


# ---- from ranks of engines to the orchestrator


class RolloutFinished(Message, frozen=True):
    """An episode ended, well or badly."""

    rollout: Packed  # of one


class AttemptFailed(Message, frozen=True):
    """An attempt of an episode raised; it may be tried again."""

    attempt: FailedAttempt


class WeightsLoaded(OfVersion, frozen=True):
    """A rank of an engine computes with a version."""

    checksums: list[int]  # of what it received, of all senders
    receive_s: float
    pause_s: float  # that the engine stood still


class VersionPinned(OfQuestion, frozen=True):
    """An engine loads no version above this one until it is told otherwise."""

    version: int
    held_s: float  # that weights have waited since the pin before


class Counters(OfQuestion, frozen=True):
    """What an engine has counted since it was built."""

    counts: dict[str, Number]  # by the names of EngineStats, with `kv_used` and `version`


class ProbeSampled(OfQuestion, frozen=True):
    """What an engine sampled for the probe, and its own forward over it."""

    version: int
    num_tokens: int  # that the engine sampled for it, those thrown away included
    sequences: Packed
    scores: np.ndarray  # [T] float32, at temperature 1; 0 for the first token of each sequence
    choices: np.ndarray  # [T, layers · k] int16, experts of each token in that forward; [., 0] where they are not known


# ---- from the orchestrator to trainer ranks


class TrainBatch(Message, frozen=True):
    """Take an optimizer step on this rank's share of a batch, then publish the weights."""

    index: int  # the version that is trained
    save: bool  # a checkpoint afterwards
    share: Packed


class ScoreProbe(Message, frozen=True):
    """Compute the log-probs of these sequences at the version of now."""

    number: int  # of the probe
    sequences: Packed


class FinishTraining(Message, frozen=True):
    """Export the model, save a checkpoint, and end."""

    export: bool
    save: bool


# ---- from trainer ranks to the orchestrator


class StepDone(OfVersion, frozen=True):
    """The batch is trained: this rank holds `version`."""

    metrics: dict[str, Number]


class BatchRefused(Message, frozen=True):
    """A guard refused a batch before it moved a weight: the trainers keep `version`."""

    version: int
    text: str  # of the error


class WeightsSent(OfVersion, frozen=True):
    """A sender has sent its part of a version."""

    checksums: list[int]
    sent_bytes: int
    send_s: float
    update_norm: float  # of its part of the change, as the engines see it


class CheckpointWritten(OfVersion, frozen=True):
    """This rank's part of a checkpoint is on disk."""

    files: Files


class TrainingFinished(OfVersion, frozen=True):
    """The model is exported and the last checkpoint is on disk, as far as they were asked for."""

    files: Files  # of the checkpoint; none where none was asked for


class ProbeScored(OfQuestion, frozen=True):
    """[T] float32 log-probs of the sequences of a probe, by the trainers' forward."""

    version: int
    packed: np.ndarray  # as it would be trained, at the temperature of sampling; 0 off the loss mask
    alone: np.ndarray  # each sequence in a forward of its own, at that temperature
    plain: np.ndarray  # the same at temperature 1
    choices: np.ndarray  # [T, layers · k] int16, as an engine's, alone; -1 for last tokens
    seconds: float


# ---- from any rank to the orchestrator


class StopRequested(Message, frozen=True):
    """A signal asked this rank to stop."""

    signal: int


ToEngine = StartGroup | CancelGroup | LoadFromDisk | MayLoad | PinVersion | AskCounters | SampleProbe | Bye
ToTrainer = TrainBatch | ScoreProbe | FinishTraining | Bye
FromEngine = RolloutFinished | AttemptFailed | WeightsLoaded | VersionPinned | Counters | ProbeSampled
FromTrainer = StepDone | BatchRefused | WeightsSent | CheckpointWritten | TrainingFinished | ProbeScored
ToOrchestrator = FromEngine | FromTrainer | StopRequested | Bye
AnyMessage = ToEngine | ToTrainer | ToOrchestrator
