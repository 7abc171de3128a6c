"""The training step: a share of a batch in, new weights and the batch's metrics out.

Given the models of a rank, the group of the trainer ranks (None: this process alone) and plain settings.  Promises:
the same update whatever the number of ranks and micro-batches, since every optimizer step has one global denominator;
ranks with nothing to do take part; no optimizer step from a non-finite loss, gradient or weight, nor from a batch whose
denominator is 0.  All public methods are collectives of all trainer ranks.

Knows nothing of queues, versions other than the number it is told, engines, or how weights travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from spmd_rl.model.routes import choices, sorted_choices
from spmd_rl.model.stored_names import StoredNames
from spmd_rl.objective.losses import Rows, k1, penalized
from spmd_rl.objective.objective import Objective, Sums
from spmd_rl.trainer.critic import Credit, Credited, credit, value_losses
from spmd_rl.trainer.experts import Routing, auxiliary_loss, check_router_loss
from spmd_rl.trainer.flops import Flops, peak_memory_bytes
from spmd_rl.trainer.hf_folder import export, export_adapter
from spmd_rl.trainer.metrics import Totals
from spmd_rl.trainer.microbatch import STAND_IN, Aggregation, MicroBatch, Minibatch, Share, cut
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.optimizer import adamw, local, square_sum, warmed_up
from spmd_rl.trainer.proximal import loglinear
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.trainer.sharding import LogProbs
from spmd_rl.trainer.token_advantages import standardize
from spmd_rl.types import GuardError


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Start:
    """What is computed of a micro-batch before the first optimizer step of its batch."""

    proximal: Tensor | None = None  # [N]; None: from the current log-probs
    reference: Tensor | None = None  # [N]
    advantages: Tensor | None = None  # [N]; None: those of the batch
    credited: Credited | None = None


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Work:
    """One minibatch as all ranks agreed on it: as many micro-batches everywhere."""

    micro_batches: list[MicroBatch]
    num_tokens: int  # loss tokens, of all ranks
    skipped_share: float  # of the denominator, of all ranks: sequences with advantage 0


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Stepped:
    """What one optimizer step came to."""

    norms: list[float]  # of the gradient, before clipping: of the policy, and of a critic with a body of its own
    weight_norm: float
    denominator: float  # 0: no step was taken
    router_loss: float | None = None  # before the step, unweighted


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Spread:
    """What the auxiliary loss of the routers needs of all tokens of an optimizer step before the first backward."""

    total: Tensor  # see Routing.balance, of all ranks
    weight: Tensor  # [] of the loss in the sums that are divided by the denominator: coefficient · denominator


class Trainer:
    """Owns the models and their optimizer."""

    def __init__(
        self,
        *,
        models: Models,
        group: ProcessGroup | None,  # all trainer ranks
        objective: Objective,
        aggregation: Aggregation,  # of objective.AGGREGATIONS
        credit: Credit | None = None,  # needed where the models have a critic
        penalty: float = 0.0,  # β of the KL to the reference in the rewards, where they are standardized with it
        learning_rate: float = 1e-6,
        critic_learning_rate: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,  # batches
        grad_clip: float = 1.0,
        micro_batch_tokens: int = 4096,
        share_prefix: bool = False,  # what the members of a group begin with alike is computed once
        pack: bool = True,  # False: one sequence a forward, for models that carry state from token to token
        temperature: float = 1.0,  # of sampling
        num_minibatches: int = 1,
        num_epochs: int = 1,
        interpolate_proximal: bool = False,  # no forward for it where a batch has several optimizer steps
        router_aux_coef: float = 0.0,  # of the loss that spreads tokens over experts; costs a forward more
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be > 0 to train on what it sampled, is {temperature}")
        self.models, self.device = models, models.device
        self.ranks = TrainerRanks(group=group, device=self.device, counts=models.counts)
        self.objective, self.aggregation, self.credit, self.penalty = objective, aggregation, credit, penalty
        self.warmup_steps, self.grad_clip = warmup_steps, grad_clip
        self.micro_batch_tokens, self.temperature = micro_batch_tokens, temperature
        self.share_prefix, self.pack = share_prefix, pack
        self.num_minibatches, self.num_epochs = num_minibatches, num_epochs
        self.interpolate_proximal = interpolate_proximal
        self.num_steps = 0  # optimizer steps so far
        self.has_critic = bool(models.critic_parameters)
        if self.has_critic != (credit is not None):
            raise ValueError("a critic needs `credit`, and the other way round")
        if models.reference is None and (penalty or (credit is not None and credit.kl_coefficient)):
            raise ValueError("a KL in the rewards needs a reference")
        critic = set(models.critic_parameters)
        policy = [p for p in models.trained.parameters() if p not in critic]
        self.optimizer, self.rates = adamw(
            [(policy, learning_rate), (models.critic_parameters, critic_learning_rate)],
            betas=betas,
            weight_decay=weight_decay,
        )
        self.router_aux_coef = router_aux_coef
        if router_aux_coef:
            check_router_loss(models.model)
        self.routing = Routing(models.model)
        self.flops = Flops(models.model, self.device, models.compute_dtype)
        self._stored_names: dict[Path, StoredNames] = {}

    @property
    def model(self) -> PreTrainedModel:
        return self.models.model

    # ---- the step

    def step(self, share: Share, n: int) -> dict[str, float]:
        """Train version `n` on this rank's share; the metrics are the same on all ranks.

        RuntimeError, naming tickets, instead of an optimizer step from a non-finite loss, gradient or weight.
        """
        return self.train(self.cut(share), n)

    def cut(self, share: Share) -> list[Minibatch]:
        """This rank's part of each optimizer step of a batch."""
        every = self.has_critic or self.penalty or self.router_aux_coef
        return cut(
            share,
            num_minibatches=self.num_minibatches,
            micro_batch_tokens=self.micro_batch_tokens,
            aggregation=self.aggregation,
            skip_zero=not (every or self.objective.needs_every_sequence),
            share_prefix=self.share_prefix,
            pack=self.pack,
        )

    def train(self, minibatches: Sequence[Minibatch], n: int) -> dict[str, float]:
        """`step` on what is cut already."""
        work = self._agree(minibatches)
        starts = self._start(work)
        totals = Totals(self.device, critic=self.has_critic, experts=self.routing.shape)
        steps, rate = [], warmed_up(1.0, n, self.warmup_steps)
        rounds = [(w, s) for _ in range(self.num_epochs) for w, s in zip(work, starts, strict=True)]
        for i, (minibatch, start) in enumerate(rounds):
            steps.append(self._optimizer_step(minibatch, start, n, i / len(rounds), rate, totals))
        metrics = totals.reduce(
            self.ranks,
            num_tokens=sum(w.num_tokens for w in work),
            denominator=sum(stepped.denominator for stepped in steps),
            num_epochs=self.num_epochs,
        )
        taken = [stepped for stepped in steps if stepped.denominator]
        flops = self.flops.of([m for w, _ in rounds for m in w.micro_batches])
        peak_bytes = torch.tensor(peak_memory_bytes(self.device), dtype=torch.float64, device=self.device)
        num_stand_ins = sum(m.is_stand_in for w, _ in rounds for m in w.micro_batches)
        sums = torch.tensor([flops / self.flops.peak, num_stand_ins], dtype=torch.float64, device=self.device)
        peak_s, num_padding = self.ranks.total(sums).tolist()
        return metrics | {
            **{
                name: sum(stepped.norms[i] for stepped in taken) / max(len(taken), 1)
                for i, name in enumerate(("grad_norm", "critic_grad_norm")[: 1 + (self.models.critic is not None)])
            },
            **{
                name: sum(stepped.router_loss or 0.0 for stepped in taken) / max(len(taken), 1)
                for name in ("router_loss",)[: self.router_aux_coef != 0]
            },
            "weight_norm": taken[-1].weight_norm if taken else 0.0,
            "learning_rate": rate * self.rates[0],
            "optimizer_steps": float(len(taken)),
            "empty_steps": float(max(1, len(steps)) - len(taken)),
            "num_microbatches": float(sum(len(w.micro_batches) for w, _ in rounds)),
            "padding_share": num_padding / max(metrics["input_tokens"] + num_padding, 1),
            "peak_s": peak_s / self.ranks.num,
            "peak_memory_bytes": self.ranks.max(peak_bytes).item(),
        }

    def _agree(self, minibatches: Sequence[Minibatch]) -> list[Work]:
        """Every rank gets the number of micro-batches of the rank with the most; minibatches without a token go."""
        mine = [(m.num_loss_tokens, m.skipped_share) for m in minibatches]
        sums = self.ranks.total(torch.tensor(mine, dtype=torch.float64, device=self.device)).tolist()
        counts = torch.tensor([len(m.micro_batches) for m in minibatches], dtype=torch.int64, device=self.device)
        return [
            Work(
                micro_batches=m.micro_batches + [STAND_IN] * (max(count, 1) - len(m.micro_batches)),
                num_tokens=int(tokens),
                skipped_share=skipped,
            )
            for m, count, (tokens, skipped) in zip(minibatches, self.ranks.max(counts).tolist(), sums, strict=True)
            if tokens
        ]

    @torch.no_grad()
    def _start(self, work: list[Work]) -> list[list[Start]]:
        """Forwards under the weights at the start of the batch, where anything needs them.

        The policy's are those of the first minibatch, so its ratio is exactly 1.  With a single optimizer step the
        current log-probs are the proximal ones, and nothing is computed twice.
        """
        models = self.models
        micro_batches = [m for w in work for m in w.micro_batches]
        proximals = self.num_minibatches * self.num_epochs > 1 and not self.interpolate_proximal
        pays = self.penalty != 0 or (self.credit is not None and self.credit.kl_coefficient != 0)
        of_policy: list[tuple[Tensor | None, Tensor | None]] = [(None, None)] * len(micro_batches)
        references: list[Tensor | None] = [None] * len(micro_batches)
        if proximals or pays or models.policy.value_head is not None:
            of_policy = [(logprobs, values) for logprobs, _, values in map(self._forward, micro_batches)]
        if models.reference is not None:
            references = [self._forward(m, models.reference)[0] for m in micro_batches]
            models.drop(models.reference)
        values = [v for _, v in of_policy]
        if models.critic is not None:
            values = [self._values(m) for m in micro_batches]
        kls: list[Tensor | None] = [None] * len(micro_batches)
        if pays:
            pairs = zip(of_policy, references, strict=True)
            kls = [k1(p, r) for (p, _), r in pairs if p is not None and r is not None]
        advantages, credited = self._advantages(micro_batches, values, kls)
        starts = iter(
            Start(proximal=logprobs if proximals else None, reference=reference, advantages=a, credited=c)
            for (logprobs, _), reference, a, c in zip(of_policy, references, advantages, credited, strict=True)
        )
        return [[next(starts) for _ in w.micro_batches] for w in work]

    def _advantages(
        self, micro_batches: list[MicroBatch], values: list[Tensor | None], kls: list[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Credited | None]]:
        """Of each micro-batch: the advantages that are not those of the batch, and what its values are trained with."""
        credited: list[Credited | None] = [None] * len(micro_batches)
        advantages: list[Tensor | None] = [None] * len(micro_batches)
        for i, (micro, of_states, kl) in enumerate(zip(micro_batches, values, kls, strict=True)):
            if self.credit is not None and not micro.is_stand_in:
                assert of_states is not None
                credited[i] = earned = credit(micro, of_states, self.credit, kl)
                advantages[i] = earned.advantages
            elif self.penalty and not micro.is_stand_in:
                assert kl is not None
                given, sequence = self._tensor(micro.advantages), self._tensor(micro.sequence)
                advantages[i] = penalized(given, kl, sequence, self.penalty)
        return standardize(advantages, self.ranks) if self.has_critic or self.penalty else advantages, credited

    def _optimizer_step(
        self, work: Work, starts: list[Start], n: int, progress: float, rate: float, totals: Totals
    ) -> Stepped:
        """Accumulate sums, then divide by the denominator that they come with: check, clip, step."""
        losses, denominators, last = [], [], len(work.micro_batches) - 1
        spread = self._spread(work, starts, n, progress) if self.router_aux_coef else None
        for i, (micro, start) in enumerate(zip(work.micro_batches, starts, strict=True)):
            loss, part = self._forward_backward(micro, start, n, progress, last=i == last, totals=totals, spread=spread)
            losses.append(loss)
            denominators.append(part)
        gradients = self.models.gradients()
        ranks, sums = self.ranks, torch.stack([torch.stack(losses).double().sum(), torch.stack(denominators).sum()])
        squares = [square_sum(tensors, ranks) for tensors in (self.models.trained.parameters(), *gradients)]
        sums = sums if ranks.counts else torch.zeros_like(sums)
        loss, part, w_squares, *g_squares = ranks.sum(torch.cat([sums, torch.stack(squares)])).tolist()
        denominator = part + work.skipped_share
        # FSDP averages gradients over its ranks: mean · number of ranks / denominator
        factor = self.models.num_averaged / denominator if denominator else 0.0
        norms, weight_norm = [math.sqrt(squares) * factor for squares in g_squares], math.sqrt(w_squares)
        if not all(map(math.isfinite, (*g_squares, w_squares, loss))):
            fault = GuardError if math.isfinite(weight_norm) else RuntimeError  # such weights are not to be kept
            raise fault(self._blame(work.micro_batches, starts, losses, n, progress, norms, weight_norm))
        if denominator:
            for some, norm in zip(gradients, norms, strict=True):
                bounded = min(1.0, self.grad_clip / norm) if norm else 1.0
                torch._foreach_mul_([local(g) for g in some], factor * bounded)
            for group, full in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate * full
            self.optimizer.step()
            self.num_steps += 1
        self.optimizer.zero_grad()
        router_loss = None if spread is None else float(auxiliary_loss(spread.total))
        return Stepped(norms=norms, weight_norm=weight_norm, denominator=denominator, router_loss=router_loss)

    @torch.no_grad()
    def _spread(self, work: Work, starts: list[Start], n: int, progress: float) -> Spread:
        """One forward of each micro-batch: the loss is a product of means over all tokens, of all ranks."""
        total, part = self.routing.nothing(self.device), torch.zeros((), dtype=torch.float64, device=self.device)
        for micro, start in zip(work.micro_batches, starts, strict=True):
            with self.routing.watched() as routed:
                current, entropy, values = self._forward(micro)
            if not micro.is_stand_in:
                total += self.routing.balance(routed, self._num_here(micro))
                values = values if self.models.critic is None else torch.zeros_like(current)
                part += self._objective(micro, start, current, entropy, values, n, progress)[0].denominator
        denominator = self.ranks.total(part) + work.skipped_share
        return Spread(total=self.ranks.sum(total), weight=self.router_aux_coef * denominator)

    def _num_here(self, micro: MicroBatch) -> int:
        return self.models.policy.num_here(micro.cu_seqlens, micro.parents)

    def _forward_backward(
        self,
        micro: MicroBatch,
        start: Start,
        n: int,
        progress: float,
        *,
        last: bool,
        totals: Totals | None,
        spread: Spread | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One micro-batch into the gradients; returns its summed loss and its part of the denominator, detached."""
        self.models.last_backward(last)
        with self.routing.watched() as routed:
            current, entropy, values = self._forward(micro)
        if self.models.critic is not None:
            values = self._values(micro)
        if micro.is_stand_in:
            total = (current.sum() + entropy.sum() + (0.0 if values is None else values.sum())) * 0.0
            total.backward()
            return (nothing := total.detach().double()), nothing
        result, rows, of_values = self._objective(micro, start, current, entropy, values, n, progress)
        total = result.total
        if spread is not None:
            part = self.routing.balance(routed, self._num_here(micro))
            total = total + spread.weight * auxiliary_loss(spread.total, part)
        total.backward()
        if totals is not None:
            if self.routing.experts:
                totals.add_load(self.routing.load(routed, self._num_here(micro)))
            # proximal log-probs that are interpolated are those of the version before the first step alone
            known = progress == 0 or (start.proximal is not None and progress * self.num_epochs < 1 - 1e-9)
            compared = (self._tensor(micro.versions) == n) & known
            sizes = len(micro.token_ids), micro.num_shared
            totals.add(result, rows, entropy, compared, *sizes, values, of_values)
        return result.total.detach(), result.denominator

    def _objective(
        self,
        micro: MicroBatch,
        start: Start,
        current: Tensor,
        entropy: Tensor,
        values: Tensor | None,
        n: int,
        progress: float,
    ) -> tuple[Sums, Rows, Tensor | None]:
        behavior, proximal, of_values = self._tensor(micro.behavior), start.proximal, None
        if proximal is None:
            proximal = loglinear(current.detach(), behavior, self._tensor(micro.versions), n, progress)
        advantages = self._tensor(micro.advantages) if start.advantages is None else start.advantages
        if start.credited is not None:
            assert values is not None and self.credit is not None
            of_values = value_losses(values, start.credited, self.credit)
        rows = Rows(
            current=current,
            proximal=proximal,
            behavior=behavior,
            advantages=advantages,
            sequence=self._tensor(micro.sequence),
        )
        result = self.objective(
            rows,
            entropy=entropy,
            scale=self._tensor(micro.scale),
            share=self._tensor(micro.share),
            reference=start.reference,
            beside=of_values,
        )
        return result, rows, of_values

    def _forward(self, micro: MicroBatch, policy: LogProbs | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        ids, rows, targets = (self._tensor(a) for a in (micro.token_ids, micro.rows, micro.targets))
        run = policy or self.models.policy
        found: tuple[Tensor, Tensor, Tensor | None]
        found = run(ids, micro.cu_seqlens, rows, targets, self.temperature, micro.parents)
        return found

    def _values(self, micro: MicroBatch) -> Tensor:
        ids, rows = self._tensor(micro.token_ids), self._tensor(micro.rows)
        assert self.models.critic is not None
        values: Tensor = self.models.critic(ids, micro.cu_seqlens, rows, micro.parents)
        return values

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _blame(
        self,
        micro_batches: list[MicroBatch],
        starts: list[Start],
        losses: list[Tensor],
        n: int,
        progress: float,
        norms: list[float],
        weight_norm: float,
    ) -> str:
        """Which rollouts made it non-finite: the first bad loss of each rank, or the first bad micro-batch alone."""
        bad = next((m.tickets for m, loss in zip(micro_batches, losses, strict=True) if not loss.isfinite()), ())
        tickets = self.ranks.gather(bad)
        if not math.isfinite(weight_norm):
            return f"non-finite weights in version {n}: no optimizer step; first seen with rollouts {tickets}"
        if tickets:
            return f"non-finite loss while training version {n}: no optimizer step; rollouts with tickets {tickets}"
        for micro, start in zip(micro_batches, starts, strict=True):
            self.optimizer.zero_grad()
            self._forward_backward(micro, start, n, progress, last=True, totals=None)
            if not self.ranks.sum(square_sum(chain(*self.models.gradients()), self.ranks)).isfinite():
                tickets = self.ranks.gather(micro.tickets)
                break
        norm = next(norm for norm in norms if not math.isfinite(norm))
        return (
            f"gradient norm {norm} while training version {n}: no optimizer step; the losses are finite; "
            f"rollouts with tickets {tickets or 'unknown: no micro-batch alone shows it'}"
        )

    # ---- what else the weights are for

    def score(
        self,
        token_ids: np.ndarray,  # [T] ints, the same on all ranks
        temperature: float = 1.0,
    ) -> np.ndarray:  # [T] float32
        """Log-prob of each token given those before it, alone in a forward; the first is 0."""
        scores = np.zeros(len(token_ids), np.float32)
        if len(token_ids) > 1:
            ids = torch.from_numpy(np.asarray(token_ids, np.int64)).to(self.device)
            scores[1:] = self.models.score(ids, temperature).cpu().numpy()
        return scores

    def score_probe(
        self,
        share: Share,  # the same on all ranks, each ticket once, no advantage 0
    ) -> dict[str, np.ndarray]:  # [T] float32 each, but for choices
        """What engines sampled: `packed` as it would be trained, each sequence `alone`, and that at temperature 1.

        The first two at the temperature of sampling; packed is 0 off the loss mask.  `choices` as those of an engine,
        of each sequence alone; where ranks share its tokens they are not known.
        """
        sequences, scored = np.split(share.token_ids, share.cu_seqlens[1:-1]), []
        experts = [] if self.models.policy.context is not None else self.routing.experts
        for sequence in sequences:
            with choices(experts) as seen:
                scores = self.score(sequence, self.temperature)
            scored.append((scores, sorted_choices(seen, len(experts), len(sequence))))
        alone, chosen = map(np.concatenate, zip(*scored, strict=True))
        plain = alone if self.temperature == 1 else np.concatenate([self.score(sequence) for sequence in sequences])
        return {"packed": self._score_packed(share), "alone": alone, "plain": plain, "choices": chosen}

    @torch.no_grad()
    def _score_packed(self, share: Share) -> np.ndarray:  # [T] float32
        scores = np.zeros(len(share.token_ids), np.float32)
        starts = dict(zip(share.ticket.tolist(), share.cu_seqlens.tolist(), strict=False))
        for micro in chain.from_iterable(part.micro_batches for part in self.cut(share)):
            logprobs, _, _ = self._forward(micro)
            begin = np.array([starts[ticket] for ticket in micro.tickets])
            scores[begin[micro.sequence] + micro.positions] = logprobs.float().cpu().numpy()
        self.models.drop(self.models.policy)
        return scores

    def state_dict(self) -> dict[str, object]:
        """Models, optimizer and step count for torch.distributed.checkpoint; loading fills its tensors in place.

        The optimizer's by name of the parameter: its groups depend on the mesh, and their settings are the config's.
        """
        optimizer = {name: dict(self.optimizer.state[p]) for name, p in self.models.named_trained()}
        return self.models.state_dict() | {"optimizer": optimizer, "num_steps": torch.tensor(self.num_steps)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What any number of trainer ranks saved, resharded by torch.distributed.checkpoint."""
        self.models.load_state_dict(state)
        for name, parameter in self.models.named_trained():
            for key, value in self.optimizer.state[parameter].items():
                value.copy_(state["optimizer"][name][key])
        self.num_steps = int(state["num_steps"])

    def export(self, folder: Path, source: Path, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Write an ordinary Hugging Face folder, with config and tokenizer from `source`; its tensors, see `export`."""
        self.models.refresh()
        if self.ranks.index == 0 and source not in self._stored_names:
            self._stored_names[source] = StoredNames(source)
        names = self._stored_names.get(source)
        dtypes = None if dtype is None else self.models.dtypes(dtype)
        return export(
            self.models.named_parameters(), self.ranks, folder=folder, source=source, names=names, dtypes=dtypes
        )

    def export_adapter(self, folder: Path, source: Path) -> None:
        """Write what LoRA added to the model in `source` as a PEFT folder."""
        self.models.refresh()
        assert self.models.lora is not None
        export_adapter(self.models.additions(), self.ranks, folder=folder, lora=self.models.lora, base=source)
