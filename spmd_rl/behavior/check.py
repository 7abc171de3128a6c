"""Whether a model is computed exactly: each way of a run against the plain model, beside planted faults.

Given a config and which ways the run takes; builds small models in a folder of its own.  "Exact" means that nothing
differs by more than LIMIT, and that every fault planted in the plain model moves log-probs at least MARGIN times as
far: where faults cannot be seen, nothing is proved.  Whatever an architecture raises becomes the line of a refusal.
Knows nothing of folders of weights, caches or the run's config.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from spmd_rl.behavior import compare, faults, plain, ranks
from spmd_rl.behavior.samples import Rollouts, randomize, rollouts
from spmd_rl.behavior.shrink import decoder_layers, shrunk, unseen
from spmd_rl.model.causal_lm import hidden_states, load_config, packs
from spmd_rl.model.text_part import text_config
from spmd_rl.trainer.models import Models

LIMIT = 1e-3  # nats, or of a gradient's norm
MARGIN = 100.0
LONGEST = 300  # characters of another library's error


Computed = tuple[Tensor, dict[str, Tensor]]  # [N] log-probs of all loss tokens, and gradients by parameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Ways:
    """What a run does with the model, beside training it."""

    engine: bool = True  # samples with the native engine
    share_prefix: bool = False
    tensor_parallel: bool = False
    context_parallel: bool = False
    lora: tuple[str, ...] = ()  # layers that are added to


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was found of one model."""

    model_type: str
    differences: dict[str, float] = field(default_factory=dict)  # by way
    faults: dict[str, float] = field(default_factory=dict)  # nats, by what was planted
    refusal: str = ""  # why the model is not trained, a line; "": exact
    lasting: bool = True  # False: something else than the model may have failed, a full disk, say
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """For a reader who asks whether the model can be trained."""
        if self.refusal:
            return f"{self.model_type}: {self.refusal}"
        least = min(self.faults, key=self.faults.__getitem__)
        ways = ", ".join(f"{way} {value:.0e}" for way, value in self.differences.items())
        return (
            f"{self.model_type}, exact: {ways}; least planted fault {self.faults[least]:.2g} ({least}); "
            f"{self.seconds:.1f} s"
        )


def examine(config: PretrainedConfig, ways: Ways) -> Verdict:
    """Of a config of any size."""
    begun, found = time.monotonic(), _Found(ways)
    with quiet(), torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory(prefix="spmd_rl_") as folder:
        found.look(config, Path(folder))
    return Verdict(
        model_type=config.model_type,
        differences=found.differences,
        faults=found.faults,
        refusal=found.refusal,
        lasting=found.lasting,
        seconds=time.monotonic() - begun,
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, what that was raised from, …"""
    while error is not None:
        yield error
        error = error.__cause__


T = TypeVar("T")


class _Found:
    """Goes from way to way until one differs."""

    def __init__(self, ways: Ways) -> None:
        self.ways = ways
        self.differences: dict[str, float] = {}
        self.faults: dict[str, float] = {}
        self.refusal = ""
        self.lasting = True

    def look(self, config: PretrainedConfig, folder: Path) -> None:
        self._place = str(folder / "model")
        small = self._try("config.json cannot be made small", lambda: shrunk(text_config(config)))
        if small is None:
            return
        if size := unseen(small):
            name, value = size
            self.refusal = f"cannot be decided: the sequences that are tried do not reach config.{name} = {value}"
        case = self._try("config.json makes no causal LM", lambda: Case(small, folder, self.ways))
        if case is None:
            return
        self.faults = self._try("the plain model fails", lambda: case.faults) or {}
        ways: dict[str, Callable[[], Mapping[str, float]]] = {"training": case.training}
        if self.ways.share_prefix and packs(case.models[0]):  # or the run refuses the two together
            ways["share_prefix"] = case.share_prefix
        if self.ways.engine:
            ways["the native engine"] = case.engine
        spread = ["tensor_parallel"] if self.ways.tensor_parallel else []
        if self.ways.context_parallel and packs(case.models[0]):
            spread.append("context_parallel")
        if spread:
            ways["the forward on several ranks"] = lambda: case.spread(spread)
        if self.ways.lora:
            ways["LoRA"] = case.lora
        ways["the export"] = case.export
        for name, way in ways.items():
            if self.refusal:
                return
            self.differences |= self._try(f"{name} fails", way) or {}
            self._judge(case)

    def _judge(self, case: Case) -> None:
        for way, value in self.differences.items():
            if not value <= LIMIT:  # nor for NaN
                what = "of a gradient's norm" if way == "gradients" else "nats"
                place = case.where() if way in ("packed", "alone") else case.kinds
                self.refusal = f"{way}: {value:.2g} {what} off the plain model (limit {LIMIT:g}), {place}"
                return
        worst = max(self.differences.values(), default=0.0)
        for fault, moved in self.faults.items():
            if not self.refusal and not moved >= MARGIN * worst:
                self.refusal = (
                    f"cannot be decided: the planted fault {fault!r} moves log-probs by {moved:.2g} nats, the model "
                    f"itself is {worst:.2g} off"
                )

    def _try(self, what: str, do: Callable[[], T]) -> T | None:
        """None, and a refusal, where an architecture raises whatever it trips over."""
        if self.refusal:
            return None
        try:
            return do()
        except Exception as error:
            self.lasting = not any(isinstance(each, OSError | MemoryError | ranks.NoAnswer) for each in _causes(error))
            self.refusal = f"{what}: {_one_line(error)}".replace(f"{self._place}: ", "").replace(
                self._place, "the model"
            )
            return None


class Case:
    """A small model with two sets of weights, its plain counterpart, and rollouts."""

    def __init__(self, config: PretrainedConfig, folder: Path, ways: Ways) -> None:
        self.ways = ways
        self.folder, self.later = folder / "model", folder / "later"
        for seed, place in enumerate((self.folder, self.later)):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            randomize(model, seed)
            model.save_pretrained(place)
        load_config(self.folder)  # what is refused by name
        self.models: tuple[PreTrainedModel, PreTrainedModel] = plain.load(self.folder), plain.load(self.later)
        self.rollouts: Rollouts = rollouts(self.models[0].config.get_text_config().vocab_size)
        self.pull = torch.randn(int(self.rollouts.loss_mask.sum()), dtype=torch.float64)

    @cached_property
    def faults(self) -> dict[str, float]:
        found = faults.planted(self.models[0], self.folder, self.rollouts)
        with torch.no_grad():
            before = plain.reply_logprobs(self.models[1], self.rollouts)
        return found | {"weights of another version": _most(before, self.expected[0])}

    @cached_property
    def expected(self) -> Computed:
        logprobs = plain.reply_logprobs(self.models[0], self.rollouts)
        return logprobs.detach(), plain.pulled_gradients(self.models[0], logprobs, self.pull)

    @cached_property
    def trainer(self) -> Models:
        return compare.alone(self.folder)

    @property
    def kinds(self) -> str:
        """Of the model's layers."""
        text = self.models[0].config.get_text_config()
        kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
        layers = decoder_layers(self.models[0])
        names = dict.fromkeys(kinds or [type(layer).__name__ for layer in layers or ()])
        return f"layers: {', '.join(names)}"

    def training(self) -> dict[str, float]:
        packed = packs(self.trainer.model)
        if not packed:
            self.faults["a state leaks from sequence to sequence"] = self._leak()
        return self._trained("packed" if packed else "alone", pack=packed, share_prefix=False)

    @torch.no_grad()
    def _leak(self) -> float:
        """Of states alone, were this model packed: attention keeps sequences apart."""
        first, second = self.rollouts.sequences[-1], self.rollouts.sequences[0]
        leaking = compare.after_another(self.trainer, first, second)
        return _most(leaking, plain.token_logprobs(self.models[0], second))

    def share_prefix(self) -> dict[str, float]:
        found = self._trained("share_prefix", pack=True, share_prefix=True)
        return {"share_prefix": plain.largest(found.values())}

    def _trained(self, way: str, *, pack: bool, share_prefix: bool) -> dict[str, float]:
        logprobs, gradients = self.expected
        self.trainer.model.zero_grad(set_to_none=True)
        mine = compare.trained(self.trainer, self.rollouts, self.pull, pack=pack, share_prefix=share_prefix)
        return {
            way: _most(mine, logprobs),
            "gradients": plain.apart(compare.gradients(self.trainer), gradients),
        }

    def engine(self) -> dict[str, float]:
        return {"engine": compare.engine_difference(self.folder, self.later, self.models)}

    def lora(self) -> dict[str, float]:
        models = compare.adapted(self.folder, self.ways.lora)
        zeros = torch.zeros_like(self.pull)
        mine = compare.trained(models, self.rollouts, zeros, pack=packs(models.model), share_prefix=False)
        merged = compare.exported(models, self.folder, self.folder.parent / "merged")
        with torch.no_grad():
            return {"lora": _most(mine, plain.reply_logprobs(merged, self.rollouts))}

    def export(self) -> dict[str, float]:
        written = compare.exported(self.trainer, self.folder, self.folder.parent / "exported")
        with torch.no_grad():
            return {"export": _most(plain.reply_logprobs(written, self.rollouts), self.expected[0])}

    def spread(self, ways: Sequence[str]) -> dict[str, float]:
        """Over several ranks, in the ways of `ranks.MESHES`."""
        answers = ranks.answers([self.task(way) for way in ways])
        return {way: self.distance(answer) for way, answer in zip(ways, answers, strict=True)}

    def task(self, way: str) -> ranks.Task:
        return ranks.Task(folder=self.folder, rollouts=self.rollouts, pull=self.pull, way=way)

    def distance(self, answer: ranks.Answer) -> float:
        """ValueError, with why, where there is no answer."""
        if isinstance(answer, str):
            raise ValueError(answer)
        return self.apart(answer, self.expected)

    @staticmethod
    def apart(one: Computed, other: Computed) -> float:
        """Of log-probs and gradients: in nats or of a gradient's norm, whichever is more."""
        return plain.largest([_most(one[0], other[0]), plain.apart(one[1], other[1])])

    @torch.no_grad()
    def where(self) -> str:
        """The first layer whose output is another one than the plain model's."""
        ids = max(self.rollouts.sequences, key=len)
        outputs = []
        runs: list[tuple[PreTrainedModel, Callable[[], Tensor]]] = [
            (self.models[0], lambda: plain.logits(self.models[0], ids)),
            (self.trainer.model, lambda: hidden_states(self.trainer.model, ids, [0, len(ids)])),
        ]
        for model, forward in runs:
            seen: list[Any] = []  # what each layer gives, of any form
            layers = decoder_layers(model) or ()
            hooks = [layer.register_forward_hook(lambda *args, seen=seen: seen.append(args[-1])) for layer in layers]
            forward()
            for hook in hooks:
                hook.remove()
            outputs.append([out[0] if isinstance(out, tuple | list) else out for out in seen])
        text = self.models[0].config.get_text_config()
        kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
        for i, (theirs, ours) in enumerate(zip(*outputs, strict=False)):
            if _most(theirs.flatten().double(), ours.flatten().double()) > LIMIT * theirs.abs().max().item():
                kind = kinds[i] if i < len(kinds) else type((decoder_layers(self.models[0]) or [None])[i]).__name__
                return f"from layer {i} on, a layer of {kind}"
        return f"after the last layer or across sequences; {self.kinds}"


def _most(one: Tensor, other: Tensor) -> float:
    """The largest distance; NaN where there is one."""
    return (one.detach() - other.detach()).abs().max().item()


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:LONGEST]
    return text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


@contextmanager
def quiet() -> Iterator[None]:
    """What architectures warn of while they are tried is no news to the run's reader."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers_logging.set_verbosity(level)
