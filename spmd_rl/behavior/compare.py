"""The ways in which a run computes with a model, each against the plain model of `transformers`.

Given a folder with a small model, and its plain model.  A way is the run's own code: the trainer's micro-batches and
their gradients, the native engine's prefill, decode and swap of weights.  Gives differences in nats (of gradients:
relative).  Knows nothing of limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from spmd_rl.behavior import plain
from spmd_rl.behavior.samples import Rollouts, tokens
from spmd_rl.engine.native import NativeEngine
from spmd_rl.model.attention import Segments, token_positions
from spmd_rl.model.causal_lm import build, head, run_body
from spmd_rl.model.logprobs import token_logprobs
from spmd_rl.trainer.flops import Flops
from spmd_rl.trainer.hf_folder import export
from spmd_rl.trainer.microbatch import MicroBatch, cut
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.types import Completion, Sampling
from spmd_rl.weights.layout import weights_of
from spmd_rl.weights.low_rank import Lora

CPU = torch.device("cpu")
PREFILL = 16  # prompt tokens of a step, so that prompts take several
PROMPTS = ((37, 3), (5, 2), (2, 1))  # tokens, replies to it
REPLY, SWAP_AFTER = 24, 12  # tokens of a reply, steps before the weights change
TEMPERATURES = (1.0, 0.7)  # of replies in turn
LONGEST = 128


def micro_batches(rollouts: Rollouts, *, pack: bool, share_prefix: bool) -> list[MicroBatch]:
    """As the trainer cuts them: all in one forward, or one a forward."""
    (whole,) = cut(
        rollouts,
        num_minibatches=1,
        micro_batch_tokens=4096,
        aggregation=lambda num: (1.0, 1.0),
        skip_zero=False,
        share_prefix=share_prefix,
        pack=pack,
    )
    return whole.micro_batches


def trained(models: Models, rollouts: Rollouts, pull: Tensor, *, pack: bool, share_prefix: bool) -> Tensor:
    """[N] log-probs of the loss tokens, in order; their sum times `pull` is in the gradients."""
    found = torch.empty(len(pull), dtype=torch.float64)
    at = np.flatnonzero(rollouts.loss_mask)
    for micro in micro_batches(rollouts, pack=pack, share_prefix=share_prefix):
        ids, rows, targets = (torch.from_numpy(x) for x in (micro.token_ids, micro.rows, micro.targets))
        logprobs, _, _ = models.policy(ids, micro.cu_seqlens, rows, targets, 1.0, micro.parents)
        rows = np.array(micro.tickets)[micro.sequence]  # tickets count the rollouts
        places = torch.from_numpy(np.searchsorted(at, rollouts.cu_seqlens[rows] + micro.positions))
        (logprobs * pull[places].to(logprobs.dtype)).sum().backward()
        found[places] = logprobs.detach().double()
    return found


def alone(folder: Path) -> Models:
    """The trainer's modules of one process."""
    policy = build(folder, device=CPU, dtype=torch.float32, weights=True)
    Flops(policy, CPU, torch.float32)  # counted at every start
    return Models(policy=policy, mesh=None, device=CPU)


def exported(models: Models, source: Path, folder: Path) -> PreTrainedModel:
    """The model that a run writes at its end, as plain transformers reads it."""
    models.refresh()
    export(
        models.named_parameters(),
        TrainerRanks(group=None, device=CPU),
        folder=folder,
        source=source,
        dtypes=None,
    )
    return plain.load(folder)


def adapted(folder: Path, targets: Sequence[str]) -> Models:
    """With random additions."""
    policy = build(folder, device=CPU, dtype=torch.float32, weights=True)
    models = Models(policy=policy, lora=Lora(rank=4, alpha=8.0, targets=tuple(targets)), mesh=None, device=CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name.endswith("lora_b"):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return models


@torch.no_grad()
def after_another(models: Models, first: Tensor, second: Tensor) -> Tensor:  # [T - 1]
    """Log-probs of a sequence packed after another in a forward whose layers carry a state over: a planted fault."""
    attend = Segments([0, len(first), len(first) + len(second)])
    ids = torch.cat([first, second])
    hidden = run_body(models.model, ids, token_positions(attend.spans, CPU), attend)
    return token_logprobs(hidden[len(first) : -1], head(models.model), second[1:])[0].double()


def gradients(models: Models) -> dict[str, Tensor]:
    return {name: p.grad for name, p in models.model.named_parameters() if p.grad is not None}


def sent(model: PreTrainedModel) -> dict[str, Tensor]:
    """What an update consists of, by name."""
    return {name: tensor.detach() for name, tensor in weights_of(model).items()}


def sampled(folder: Path, later: Path, vocab: int) -> list[tuple[np.ndarray, Completion, float]]:
    """(prompt, reply, temperature) of the native engine, whose weights become those of `later` under way.

    A prompt longer than a step's chunk, several replies to one, keys and values recomputed after the swap.
    """
    engine = NativeEngine(
        model=build(folder, device=CPU, dtype=torch.float32, weights=False),
        device=CPU,
        max_slots=8,
        max_seq_len=LONGEST,
        prefill_budget=PREFILL,
    )
    engine.load_weights(sent(build(folder, device=CPU, dtype=torch.float32, weights=True)), 0)
    asked: list[tuple[np.ndarray, float]] = []
    for number, (length, replies) in enumerate(PROMPTS):
        prompt = tokens(length, vocab, 1000 + number)
        asked += [(prompt, TEMPERATURES[len(asked) + i & 1]) for i in range(replies)]
    for i, (prompt, temperature) in enumerate(asked):
        engine.submit(i, prompt, Sampling(max_tokens=REPLY, temperature=temperature, seed=i))
    done: dict[int, Completion] = {}
    for step in range(4 * REPLY):
        if step == SWAP_AFTER:
            engine.load_weights(sent(build(later, device=CPU, dtype=torch.float32, weights=True)), 1)
        done |= dict(engine.step())
        if len(done) == len(asked):
            break
    return [(prompt, done[i], temperature) for i, (prompt, temperature) in enumerate(asked)]


@torch.no_grad()
def engine_difference(folder: Path, later: Path, models: tuple[PreTrainedModel, PreTrainedModel]) -> float:
    """Most nats between a sampled token's log-prob and the plain model's of its version."""
    distances = []
    for prompt, reply, temperature in sampled(folder, later, models[0].config.get_text_config().vocab_size):
        ids = torch.from_numpy(np.concatenate([prompt, reply.token_ids])).long()
        each = torch.stack([plain.token_logprobs(m, ids, temperature)[len(prompt) - 1 :] for m in models])
        expected = each[torch.from_numpy(reply.versions).long(), torch.arange(len(reply.token_ids))]
        distances.append((expected - torch.from_numpy(reply.logprobs)).abs().max().item())
    return plain.largest(distances)
