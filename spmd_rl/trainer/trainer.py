"""The training step: a share of a batch in, new weights and the batch's metrics out.

Given a model of `spmd_rl.model` in its master precision, the mesh of the trainer ranks (None: this process alone) and
plain settings.  Promises: the same update whatever the number of ranks and micro-batches, since every optimizer step
has one global token denominator; ranks with nothing to do take part; no optimizer step from a non-finite loss or
gradient, nor from a batch without a loss token.  All public methods are collectives of all trainer ranks.

Knows nothing of queues, versions other than the number it is told, engines, or how weights travel.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmd_rl.losses import Loss, LossSums, Rows
from spmd_rl.trainer.export import export
from spmd_rl.trainer.metrics import Totals
from spmd_rl.trainer.microbatch import STAND_IN, MicroBatch, Minibatch, Share, cut
from spmd_rl.trainer.optimizer import adamw, local_gradients, square_sum, warmed_up
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.trainer.sharding import LogProbs, recompute_layers, reshard, shard


class Trainer:
    """Owns the sharded policy and its optimizer."""

    def __init__(
        self,
        *,
        model: nn.Module,  # a causal LM of spmd_rl.model, whole, on `device`
        mesh: DeviceMesh | None,  # axes ("dp_replicate", "dp_shard"); None: not sharded, one process
        group: ProcessGroup | None,  # all ranks of the mesh
        device: torch.device,
        loss: Loss,  # built from losses.LOSSES
        learning_rate: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        grad_clip: float = 1.0,
        micro_batch_tokens: int = 4096,
        temperature: float = 1.0,  # of sampling
        num_minibatches: int = 1,
        num_epochs: int = 1,
        activation_checkpointing: bool = False,
        compute_dtype: torch.dtype | None = None,  # None: bfloat16 on CUDA, float32 elsewhere
        reshard_after_forward: bool
        | None = None,  # None: on CUDA only; False also keeps gradients whole until the last
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature must be > 0 to train on what it sampled, is {temperature}")
        cuda = device.type == "cuda"
        self.device = device
        self.ranks = TrainerRanks(group=group, device=device)
        self.num_replicas = 1 if mesh is None else mesh["dp_replicate"].size()
        self.loss = loss
        self.learning_rate, self.warmup_steps, self.grad_clip = learning_rate, warmup_steps, grad_clip
        self.micro_batch_tokens, self.temperature = micro_batch_tokens, temperature
        self.num_minibatches, self.num_epochs = num_minibatches, num_epochs
        self.num_steps = 0  # optimizer steps so far
        self.sharded = mesh is not None
        self.sync_once = not (cuda if reshard_after_forward is None else reshard_after_forward)
        if activation_checkpointing:
            recompute_layers(model)
        self.policy = LogProbs(model)
        if mesh is not None:
            dtype = compute_dtype or (torch.bfloat16 if cuda else torch.float32)
            shard(self.policy, mesh, compute_dtype=dtype, reshard_after_forward=not self.sync_once)
        self.optimizer = adamw(model.parameters(), learning_rate=learning_rate, betas=betas, weight_decay=weight_decay)

    @property
    def model(self) -> nn.Module:
        return self.policy.model

    # ---- the step

    def step(self, share: Share, n: int) -> dict[str, float]:
        """Train version `n` on this rank's share; the metrics are the same on all ranks.

        RuntimeError, naming tickets, instead of an optimizer step from a non-finite loss or gradient.
        """
        started = time.perf_counter()
        minibatches = cut(share, num_minibatches=self.num_minibatches, micro_batch_tokens=self.micro_batch_tokens)
        work = self._agree(minibatches)
        proximals = self._proximals(work)
        totals, norms, num_tokens, num_forwards, rate = Totals(self.device), [], 0, 0, 0.0
        for _ in range(self.num_epochs):
            for (micro_batches, tokens), proximal in zip(work, proximals, strict=True):
                rate = warmed_up(self.learning_rate, self.num_steps, self.warmup_steps)
                norms.append(self._optimizer_step(micro_batches, proximal, tokens, n, rate, totals))
                num_tokens += tokens
                num_forwards += len(micro_batches)
        metrics = totals.reduce(self.ranks, num_tokens)
        step_s = self.ranks.max(torch.tensor(time.perf_counter() - started, device=self.device)).item()
        return metrics | {
            "grad_norm": sum(norms) / max(len(norms), 1),
            "learning_rate": rate,
            "optimizer_steps": float(len(norms)),
            "empty_step": float(not norms),
            "num_microbatches": float(num_forwards),
            "step_s": step_s,
            "tokens_per_s": metrics["input_tokens"] / step_s,
        }

    def _agree(self, minibatches: list[Minibatch]) -> list[tuple[list[MicroBatch], int]]:
        """Micro-batches and global number of loss tokens of each minibatch that has any.

        Every rank gets the number of micro-batches of the rank with the most, at least one.
        """
        tokens = torch.tensor([m.num_loss_tokens for m in minibatches], dtype=torch.int64, device=self.device)
        counts = torch.tensor([len(m.micro_batches) for m in minibatches], dtype=torch.int64, device=self.device)
        tokens, counts = self.ranks.sum(tokens).tolist(), self.ranks.max(counts).tolist()
        return [
            (m.micro_batches + [STAND_IN] * (max(count, 1) - len(m.micro_batches)), total)
            for m, count, total in zip(minibatches, counts, tokens, strict=True)
            if total
        ]

    @torch.no_grad()
    def _proximals(self, work: list[tuple[list[MicroBatch], int]]) -> list[list[Tensor | None]]:
        """Log-probs of all micro-batches under the weights at the start of the batch.

        The forwards are those of the first minibatch, so its ratio is exactly 1.  With a single optimizer step the
        current log-probs are the proximal ones: None, and nothing is computed twice.
        """
        if self.num_minibatches * self.num_epochs == 1:
            return [[None] * len(micro_batches) for micro_batches, _ in work]
        return [[self._log_probs(m)[0] for m in micro_batches] for micro_batches, _ in work]

    def _optimizer_step(
        self,
        micro_batches: list[MicroBatch],
        proximals: list[Tensor | None],
        num_tokens: int,
        n: int,
        rate: float,
        totals: Totals,
    ) -> float:
        """Accumulate, check, clip, step; returns the gradient norm before clipping."""
        losses = []
        for i, (micro, proximal) in enumerate(zip(micro_batches, proximals, strict=True)):
            last = i == len(micro_batches) - 1
            losses.append(self._forward_backward(micro, proximal, num_tokens, n, last=last, totals=totals))
        gradients = local_gradients(self.model.parameters())
        squares, loss = square_sum(gradients, self.ranks, self.num_replicas, torch.stack(losses).sum())
        norm = squares.sqrt().item()
        if not (math.isfinite(norm) and math.isfinite(loss.item())):
            raise RuntimeError(self._blame(micro_batches, proximals, losses, num_tokens, n, norm))
        if norm > self.grad_clip:
            torch._foreach_mul_(gradients, self.grad_clip / norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return norm

    def _forward_backward(
        self, micro: MicroBatch, proximal: Tensor | None, num_tokens: int, n: int, *, last: bool, totals: Totals | None
    ) -> Tensor:
        """One micro-batch into the gradients; returns its summed loss, detached.

        FSDP averages gradients over the ranks, hence the factor: sum over ranks / num ranks · num ranks / tokens.
        """
        if self.sharded and self.sync_once:
            self.policy.set_requires_gradient_sync(last)
            self.policy.set_reshard_after_backward(last)
        current, entropy = self._log_probs(micro)
        if micro.is_stand_in:
            total = current.sum() * 0.0
            total.backward()
            return total.detach()
        result, rows = self._loss_of(micro, current, proximal)
        (result.total * (self.ranks.num / num_tokens)).backward()
        if totals is not None:
            on_version = self._tensor(micro.versions) == n
            totals.add(result, rows, entropy, on_version, len(micro.token_ids))
        return result.total.detach()

    def _loss_of(self, micro: MicroBatch, current: Tensor, proximal: Tensor | None) -> tuple[LossSums, Rows]:
        rows = Rows(
            current=current,
            proximal=current.detach() if proximal is None else proximal,
            behavior=self._tensor(micro.behavior),
            advantages=self._tensor(micro.advantages),
            sequence=self._tensor(micro.sequence),
        )
        return self.loss(rows), rows

    def _log_probs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        ids, rows, targets = (self._tensor(a) for a in (micro.token_ids, micro.rows, micro.targets))
        return self.policy(ids, micro.cu_seqlens, rows, targets, self.temperature)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _blame(
        self,
        micro_batches: list[MicroBatch],
        proximals: list[Tensor | None],
        losses: list[Tensor],
        num_tokens: int,
        n: int,
        norm: float,
    ) -> str:
        """Which rollouts made it non-finite: the first bad loss of each rank, or the first bad micro-batch alone."""
        bad = next((m.tickets for m, loss in zip(micro_batches, losses, strict=True) if not loss.isfinite()), ())
        tickets = self.ranks.gather(bad)
        if tickets:
            return f"non-finite loss while training version {n}: no optimizer step; rollouts with tickets {tickets}"
        for micro, proximal in zip(micro_batches, proximals, strict=True):
            self.optimizer.zero_grad()
            self._forward_backward(micro, proximal, num_tokens, n, last=True, totals=None)
            gradients = local_gradients(self.model.parameters())
            squares, _ = square_sum(gradients, self.ranks, self.num_replicas, torch.zeros((), device=self.device))
            if not squares.isfinite():
                tickets = self.ranks.gather(micro.tickets)
                break
        return (
            f"gradient norm {norm} while training version {n}: no optimizer step; the losses are finite; "
            f"rollouts with tickets {tickets or 'unknown: no micro-batch alone shows it'}"
        )

    # ---- what else the weights are for

    @torch.no_grad()
    def score(
        self,
        token_ids: np.ndarray,  # [T] ints, the same on all ranks
    ) -> np.ndarray:  # [T] float32
        """Log-prob of each token given those before it, at temperature 1; the first is 0."""
        ids = torch.from_numpy(np.asarray(token_ids, np.int64)).to(self.device)
        scores = np.zeros(len(ids), np.float32)
        if len(ids) > 1:
            rows = torch.arange(len(ids) - 1, device=self.device)
            logprobs, _ = self.policy(ids[:-1], [0, len(rows)], rows, ids[1:], 1.0)
            reshard(self.policy)
            scores[1:] = logprobs.float().cpu().numpy()
        return scores

    def named_parameters(self) -> dict[str, Tensor]:
        """By name in the model, tied parameters once: DTensors where sharded.  Their memory stays where it is."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def named_shards(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's shard), in the order of `named_parameters`."""
        for name, parameter in self.named_parameters().items():
            yield name, parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def state_dict(self) -> dict[str, object]:
        """Model, optimizer and step count for torch.distributed.checkpoint; loading fills its tensors in place."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "num_steps": torch.tensor(self.num_steps)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """What any number of trainer ranks saved, resharded by torch.distributed.checkpoint."""
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.num_steps = int(state["num_steps"])

    def export(self, folder: Path, source: Path, dtype: torch.dtype | None = None) -> None:
        """Write an ordinary Hugging Face folder, with config and tokenizer from `source`."""
        export(self.model, self.ranks, folder=folder, source=source, dtype=dtype)
