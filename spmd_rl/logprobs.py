"""Log-probs of tokens and entropy of their distributions, without ever holding [tokens, vocab].  Pure."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


def token_logprobs(
    hidden: Tensor,  # [N, d]
    weight: Tensor,  # [V, d]
    targets: Tensor,  # [N] ints
    temperature: float = 1.0,
    chunk: int = 256,
) -> tuple[Tensor, Tensor]:  # [N], [N] float32 (float64 for float64 inputs)
    """Log-prob of each target and entropy of each row's distribution, softmax(hidden @ weight.T / temperature).

    Beside the gradients it holds 2 · chunk · V + 5 N floats at most, forward and backward (full logits: 4 N · V).  Both
    outputs have exact gradients for hidden and weight.  A weight whose rows are split over the ranks of a group (a
    DTensor) is used where it lies.
    Example: logits [2, 1, 0, -1] have entropy 0.9475 at T = 1, 0.4554 at 0.5, 1.1526 at 1.5.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, is {temperature} (greedy samples are scored at 1)")
    group, first = None, 0
    if isinstance(weight, DTensor):
        group, num_rows = weight.device_mesh.get_group(), -(-weight.shape[0] // weight.device_mesh.size())
        weight, first = weight.to_local(), weight.device_mesh.get_local_rank() * num_rows
    return _TokenLogprobs.apply(hidden, weight, targets.long() - first, 1.0 / temperature, chunk, group)


class _TokenLogprobs(torch.autograd.Function):
    """With a group, w has this rank's rows of the whole weight and targets count from its first."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        h: Tensor,
        w: Tensor,
        t: Tensor,
        inv_temp: float,
        chunk: int,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        exact = _accumulate_dtype(h)
        logit, mean, lse = (torch.zeros(len(h), dtype=exact, device=h.device) for _ in range(3))
        here = (t >= 0) & (t < len(w))
        for rows, z, p in _blocks(h, w, inv_temp, chunk):
            top = z.amax(-1)
            torch.sub(z, top[:, None], out=p).exp_()
            total = p.sum(-1)
            lse[rows] = top + total.log()
            logit[rows] = z.gather(1, t[rows, None].clamp(0, len(w) - 1))[:, 0] * here[rows]
            mean[rows] = z.mul_(p).sum(-1) / total  # of the logits, under the policy
        if group is not None:
            parts = lse.new_empty(group.size(), len(lse))
            dist.all_gather(list(parts.unbind()), lse, group=group)
            mean *= (lse - parts.logsumexp(0)).exp()
            lse = parts.logsumexp(0)
            dist.all_reduce(logit, group=group)
            dist.all_reduce(mean, group=group)
        entropy = lse - mean
        ctx.save_for_backward(h, w, t, lse, entropy)
        ctx.inv_temp, ctx.chunk, ctx.group = inv_temp, chunk, group
        ctx.set_materialize_grads(False)
        return logit - lse, entropy

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, d_logprob: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        h, w, t, lse, entropy = ctx.saved_tensors
        exact = _accumulate_dtype(h)
        here = ((t >= 0) & (t < len(w))).to(exact)
        dh = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(w, dtype=exact) if ctx.needs_input_grad[1] else None
        for rows, z, p in _blocks(h, w, ctx.inv_temp, ctx.chunk):
            torch.exp(z.sub_(lse[rows, None]), out=p)
            slope = torch.zeros_like(lse[rows]) if d_logprob is None else d_logprob[rows]
            if d_entropy is None:  # d logprob_t / dz_j = [j = t] - p_j
                dz = p.mul_(-slope[:, None])
            else:  # d H / dz_j = -p_j (log p_j + H)
                dz = z.add_(entropy[rows, None]).mul_(-d_entropy[rows, None]).sub_(slope[:, None]).mul_(p)
            dz.scatter_add_(1, t[rows, None].clamp(0, len(w) - 1), (slope * here[rows])[:, None])
            dz = dz.to(h.dtype)
            if dh is not None:
                dh[rows] = (dz @ w).mul_(ctx.inv_temp)
            if dw is not None:
                if dw.dtype == dz.dtype:
                    dw.addmm_(dz.t(), h[rows], alpha=ctx.inv_temp)
                else:
                    dw.add_(dz.t() @ h[rows], alpha=ctx.inv_temp)
        if ctx.group is not None and dh is not None:
            dist.all_reduce(dh, group=ctx.group)
        return dh, None if dw is None else dw.to(w.dtype), None, None, None, None


def _blocks(h: Tensor, w: Tensor, inv_temp: float, chunk: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their logits [chunk, V], as much memory beside them), in the same two blocks of memory every time."""
    exact = _accumulate_dtype(h)
    memory = torch.empty(2, min(chunk, len(h)), len(w), dtype=exact, device=h.device)
    for a in range(0, len(h), chunk):
        rows = slice(a, min(a + chunk, len(h)))
        z, beside = memory[:, : rows.stop - a].unbind()
        if exact == h.dtype:
            torch.addmm(z, h[rows], w.t(), beta=0, alpha=inv_temp, out=z)  # with beta 0 what is in z does not matter
        else:
            z.copy_(h[rows] @ w.t()).mul_(inv_temp)
        yield rows, z, beside


def _accumulate_dtype(h: Tensor) -> torch.dtype:
    return torch.float64 if h.dtype == torch.float64 else torch.float32
