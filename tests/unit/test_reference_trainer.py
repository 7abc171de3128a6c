"""The trainer's whole way, cut and packed and shared, against plain forwards of one sequence after another in float64.

The other side is transformers' own model and attention, tests/reference.py and torch's AdamW: nothing of the package.
"""

import copy
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from spmd_rl.demo import tiny_model
from spmd_rl.model.causal_lm import build
from spmd_rl.objective.objective import AGGREGATIONS
from spmd_rl.packing import packing
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.trainer import Trainer
from spmd_rl.types import Rollout
from tests import reference
from tests.reference import Choice, Segment
from tests.unit.test_reference import objective_of

CPU = torch.device("cpu")
TEMPERATURE, RATE, BETAS = 1.3, 1e-3, (0.9, 0.95)
ADVANTAGES = [0.8, -1.1, 0.0, 1.5, -0.4, 0.6, -0.9]
UNUSABLE = 5

CASES: dict[str, tuple[Choice, dict[str, Any]]] = {
    "decoupled, KL, entropy, groups share prompts": (
        Choice(kl="k3", beta=0.2, entropy=0.05),
        {"num_minibatches": 2, "num_epochs": 2, "share_prefix": True},
    ),
    "gspo": (
        Choice(loss="gspo", clip_low=0.05, clip_high=0.05, aggregation="sequence_mean"),
        {"num_minibatches": 2},
    ),
    "ppo, mean of rollouts": (Choice(loss="ppo", clip_dual=1.5, aggregation="sequence_mean"), {"num_epochs": 2}),
    "cispo, constant": (Choice(loss="cispo", clip_low=1.0, clip_high=0.3, aggregation="constant"), {"pack": False}),
    "reinforce, rejection": (
        Choice(loss="reinforce", level="sequence", reject="off_policy_negative", reject_above=0.0),
        {"num_minibatches": 3},
    ),
    "mask, KL in the rewards": (
        Choice(correction="mask", level="geometric", low=0.8, high=1.2, kl="k1", beta=0.3, kl_in="reward"),
        {"num_epochs": 3, "share_prefix": True},
    ),
    "REINFORCE++, KL in the rewards": (Choice(), {"num_minibatches": 2, "num_epochs": 2, "penalty": 0.4}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.make(folder)
    return folder


def rollouts() -> list[Rollout]:
    """Seven of three prompts: one, two and three turns, what a tool said between them, two contexts in two of them."""
    random, made = np.random.default_rng(3), []
    turns = [[5], [3, 4], [6], [2, 2, 3], [7, 1], [4], [1, 5]]
    for i, lengths in enumerate(turns):
        one = Rollout(env="e", task_id="t", ticket=i, group_id=i // 3)
        prompt = np.random.default_rng(i // 3).integers(3, 60, 6)
        one.append(prompt)
        for turn, n in enumerate(lengths):
            if turn and i in (3, 6):
                one.new_segment()
                one.append(prompt[:4])
            elif turn:
                one.append(random.integers(3, 60, 2))
            one.append(random.integers(3, 60, n), np.zeros(n), np.zeros(n))
        made.append(one)
    return made


def spans(one: Rollout) -> list[slice]:
    return [slice(a, b) for a, b in itertools.pairwise([0, *one.segments, len(one.token_ids)])]


def moved(model: nn.Module) -> nn.Module:
    """Away from the reference, the same way on both sides."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def plain(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def logprobs(model: nn.Module, one: Rollout, span: slice) -> tuple[Tensor, Tensor]:
    """Of the loss tokens of one context, and the entropy of their distributions."""
    ids, mask = torch.tensor(one.token_ids[span].astype(np.int64)), torch.tensor(one.loss_mask[span])
    log = (model(ids[None], use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
    entropy = -(log.exp() * log).sum(-1)
    return log[:-1].gather(1, ids[1:, None])[:, 0][mask[1:]], entropy[:-1][mask[1:]]


def sampled_by_another(folder: Path) -> list[Rollout]:
    """With behavior log-probs some 0.15 nats off the policy's, in float32 as they travel."""
    model, random, made = moved(plain(folder)), np.random.default_rng(5), rollouts()
    with torch.no_grad():
        for one in made:
            found = np.concatenate([logprobs(model, one, span)[0].numpy() for span in spans(one)])
            one.behavior_logprobs[one.loss_mask] = found + random.normal(0.01, 0.15, len(found))
    return made


class Plain:
    """One optimizer step after another on the plain model."""

    def __init__(self, folder: Path, batch: list[Rollout], choice: Choice, penalty: float) -> None:
        self.model, self.before = moved(plain(folder)), plain(folder)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)
        self.batch, self.choice = batch, choice
        with torch.no_grad():
            self.proximal = [[logprobs(self.model, one, span)[0] for span in spans(one)] for one in batch]
            self.reference = [[logprobs(self.before, one, span)[0] for span in spans(one)] for one in batch]
        self.advantages = [
            [torch.full_like(p, np.float32(a)) for p in parts]
            for a, parts in zip(ADVANTAGES, self.proximal, strict=True)
        ]
        self.norms, self.totals, self.denominators = [], 0.0, 0.0
        if penalty:
            self.standardize(penalty)

    def standardize(self, penalty: float) -> None:
        """Each context ends in its rollout's reward; of the usable rollouts alone."""
        usable = [i for i in range(len(self.batch)) if i != UNUSABLE]
        distances = [(p - r).tolist() for i in usable for p, r in zip(self.proximal[i], self.reference[i], strict=True)]
        rewards = [float(np.float32(ADVANTAGES[i])) for i in usable for _ in self.proximal[i]]
        found = iter(reference.reinforce_pp(rewards, distances, penalty))
        for i in usable:
            self.advantages[i] = [torch.tensor(next(found), dtype=torch.float64) for _ in self.proximal[i]]

    def step(self, members: list[int]) -> None:
        data = [[self.segment(i, part) for part in range(len(spans(self.batch[i])))] for i in members if i != UNUSABLE]
        total, denominator = reference.sums(data, self.choice)
        self.optimizer.zero_grad()
        (total / denominator).backward()
        self.norms.append(sum(float(p.grad.square().sum()) for p in self.model.parameters()) ** 0.5)
        self.totals, self.denominators = self.totals + total.item(), self.denominators + denominator
        self.optimizer.step()

    def segment(self, i: int, part: int) -> Segment:
        one = self.batch[i]
        span = spans(one)[part]
        current, entropy = logprobs(self.model, one, span)
        return Segment(
            current=current,
            proximal=self.proximal[i][part],
            behavior=torch.tensor(one.behavior_logprobs[span][one.loss_mask[span]], dtype=torch.float64),
            reference=self.reference[i][part],
            entropy=entropy,
            advantage=self.advantages[i][part],
        )


def ours(folder: Path, choice: Choice, **settings: object) -> Trainer:
    def load() -> nn.Module:
        return build(folder, device=CPU, dtype=torch.float64, weights=True)

    needs_reference = bool(choice.beta or settings.get("penalty"))
    return Trainer(
        models=Models(policy=moved(load()), reference=load() if needs_reference else None, mesh=None, device=CPU),
        group=None,
        objective=objective_of(choice),
        aggregation=partial(AGGREGATIONS[choice.aggregation], longest=choice.longest),
        learning_rate=RATE,
        betas=BETAS,
        grad_clip=1e9,
        temperature=TEMPERATURE,
        micro_batch_tokens=24,
        **settings,
    )


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_step_is_that_of_plain_forwards(folder: Path, case: str) -> None:
    choice, settings = CASES[case]
    batch = sampled_by_another(folder)
    num, whole_groups = settings.get("num_minibatches", 1), settings.get("share_prefix", False)
    cut = packing.minibatches(np.array([one.group_id for one in batch]), num, whole_groups=whole_groups)
    usable = [i != UNUSABLE for i in range(len(batch))]
    packed = packing.by_segment(packing.pack(copy.deepcopy(batch), np.array(ADVANTAGES), usable, cut))
    trainer, expected = ours(folder, choice, **settings), Plain(folder, batch, choice, settings.get("penalty", 0.0))
    metrics = trainer.step(packed, 1)
    for _ in range(settings.get("num_epochs", 1)):
        for m in range(num):
            expected.step(np.flatnonzero(cut == m).tolist())
    assert metrics["loss"] == pytest.approx(expected.totals / expected.denominators, rel=2e-6)  # norms are float32
    assert metrics["grad_norm"] == pytest.approx(np.mean(expected.norms), rel=2e-6)
    assert metrics["num_microbatches"] > num * settings.get("num_epochs", 1)
    weights, state = dict(expected.model.named_parameters()), expected.optimizer.state
    for name, parameter in trainer.model.named_parameters():
        moment, theirs = trainer.optimizer.state[parameter]["exp_avg"], state[weights[name]]["exp_avg"]
        assert (moment - theirs).norm() <= 2e-5 * theirs.norm(), name
        off = (parameter - weights[name]).norm() / parameter.numel() ** 0.5
        assert off <= 2e-3 * RATE, name  # AdamW moves a weight by some RATE in a step, noise near zero too
