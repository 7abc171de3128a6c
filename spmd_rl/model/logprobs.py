"""Log-probs of tokens and entropy of their distributions, without ever holding [tokens, vocab].  Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """Logits of hidden states h: y = scale * (h W^T + bias), or softcap * tanh(y / softcap) where there is one."""

    weight: Tensor  # [V, d]
    bias: Tensor | None = None  # [V]
    scale: float = 1.0
    softcap: float | None = None
    dtype: torch.dtype | None = None  # that products are computed in and of logits; None: the weight's

    def logits(self, hidden: Tensor) -> Tensor:  # [..., d] -> [..., V]
        """All of them, for a weight that is whole."""
        bias = None if self.bias is None else self.cast(self.bias)
        return self.finish(F.linear(self.cast(hidden), self.cast(self.weight), bias))

    def cast(self, tensor: Tensor) -> Tensor:
        """To what products are computed in."""
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def finish(self, products: Tensor) -> Tensor:
        """Logits from h W^T + bias; in float32 at least where they are scaled or capped."""
        if self.scale == 1.0 and self.softcap is None:
            return products
        y = products.to(_accumulate_dtype(products)) * self.scale
        return y if self.softcap is None else self.softcap * torch.tanh(y / self.softcap)


def token_logprobs(
    hidden: Tensor,  # [N, d]
    head: Head,
    targets: Tensor,  # [N] ints
    temperature: float = 1.0,
    chunk: int = 256,
) -> tuple[Tensor, Tensor]:  # [N], [N] float32 (float64 for float64 inputs)
    """Log-prob of each target and entropy of each row's distribution, softmax(logits / temperature).

    Beside the gradients it holds 2 · chunk · V + 5 N floats at most, forward and backward (full logits: 4 N · V); 3 ·
    chunk · V backward through a softcap; a copy of the weight where head.dtype is another than the weight's.  Both
    outputs have exact gradients for hidden, weight and bias.  A head whose rows are split over the ranks of a group
    (DTensors) is used where it lies.
    Example: logits [2, 1, 0, -1] have entropy 0.9475 at T = 1, 0.4554 at 0.5, 1.1526 at 1.5.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, is {temperature} (greedy samples are scored at 1)")
    weight: Tensor = head.weight
    bias, group, first = head.bias, None, 0
    if isinstance(weight, DTensor):
        group, num_rows = weight.device_mesh.get_group(), -(-weight.shape[0] // weight.device_mesh.size())
        first = weight.device_mesh.get_local_rank() * num_rows
        weight = weight.to_local()
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
    hidden, weight, bias = head.cast(hidden), head.cast(weight), None if bias is None else head.cast(bias)
    if head.softcap is None:
        inner, outer = head.scale / temperature, None
    else:
        inner, outer = head.scale / head.softcap, head.softcap / temperature
    arguments = (hidden, weight, bias, targets.long() - first, inner, outer, chunk, group)
    found: tuple[Tensor, Tensor] = _TokenLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]  # torch has no types for it
    return found


class _TokenLogprobs(torch.autograd.Function):  # its ctx is Any: torch types nothing of what is kept on one
    """z = inner * (h w^T + b), or outer * tanh of that.

    With a group, w and b have this rank's rows of the whole head and targets count from its first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        w: Tensor,
        b: Tensor | None,
        t: Tensor,
        inner: float,
        outer: float | None,
        chunk: int,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        exact = _accumulate_dtype(h)
        logit, mean, lse = (torch.zeros(len(h), dtype=exact, device=h.device) for _ in range(3))
        here = (t >= 0) & (t < len(w))
        for rows, z, p, _ in _blocks(h, w, b, inner, outer, chunk):
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
        ctx.save_for_backward(h, w, b, t, lse, entropy)
        ctx.inner, ctx.outer, ctx.chunk, ctx.group = inner, outer, chunk, group
        ctx.set_materialize_grads(False)
        return logit - lse, entropy

    @staticmethod
    def backward(
        ctx: Any, d_logprob: Tensor | None, d_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None, None, None]:
        h, w, b, t, lse, entropy = ctx.saved_tensors
        exact = _accumulate_dtype(h)
        here = ((t >= 0) & (t < len(w))).to(exact)
        dh = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(w, dtype=exact) if ctx.needs_input_grad[1] else None
        db = torch.zeros_like(b, dtype=exact) if ctx.needs_input_grad[2] else None
        for rows, z, p, slope in _blocks(h, w, b, ctx.inner, ctx.outer, ctx.chunk, with_slope=True):
            torch.exp(z.sub_(lse[rows, None]), out=p)
            pull = torch.zeros_like(lse[rows]) if d_logprob is None else d_logprob[rows]
            if d_entropy is None:  # d logprob_t / dz_j = [j = t] - p_j
                dz = p.mul_(-pull[:, None])
            else:  # d H / dz_j = -p_j (log p_j + H)
                dz = z.add_(entropy[rows, None]).mul_(-d_entropy[rows, None]).sub_(pull[:, None]).mul_(p)
            dz.scatter_add_(1, t[rows, None].clamp(0, len(w) - 1), (pull * here[rows])[:, None])
            if slope is not None:
                dz.mul_(slope)
            if db is not None:
                db.add_(dz.sum(0), alpha=ctx.inner)
            dz = dz.to(h.dtype)
            if dh is not None:
                dh[rows] = (dz @ w).mul_(ctx.inner)
            if dw is not None:
                if dw.dtype == dz.dtype:
                    dw.addmm_(dz.t(), h[rows], alpha=ctx.inner)
                else:
                    dw.add_(dz.t() @ h[rows], alpha=ctx.inner)
        if ctx.group is not None and dh is not None:
            dist.all_reduce(dh, group=ctx.group)
        dw, db = None if dw is None else dw.to(w.dtype), None if db is None else db.to(b.dtype)
        return dh, dw, db, None, None, None, None, None


def _blocks(
    h: Tensor, w: Tensor, b: Tensor | None, inner: float, outer: float | None, chunk: int, *, with_slope: bool = False
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """(rows, their z [chunk, V], as much memory beside them, dz/dy of outer tanh(y)), in the same memory every time."""
    exact = _accumulate_dtype(h)
    num = 3 if with_slope and outer is not None else 2
    memory = torch.empty(num, min(chunk, len(h)), len(w), dtype=exact, device=h.device)
    for a in range(0, len(h), chunk):
        rows = slice(a, min(a + chunk, len(h)))
        z, beside, *slope = memory[:, : rows.stop - a].unbind()
        if exact == h.dtype:  # with beta 0 what is in z does not matter
            torch.addmm(z if b is None else b, h[rows], w.t(), beta=0 if b is None else inner, alpha=inner, out=z)
        else:
            z.copy_(h[rows] @ w.t())
            (z if b is None else z.add_(b)).mul_(inner)
        if outer is not None:
            z.tanh_()
            if slope:
                torch.mul(z, z, out=slope[0]).sub_(1).mul_(-outer)
            z.mul_(outer)
        yield rows, z, beside, slope[0] if slope else None


def _accumulate_dtype(h: Tensor) -> torch.dtype:
    return torch.float64 if h.dtype == torch.float64 else torch.float32
