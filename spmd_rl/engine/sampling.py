"""Sampling, vectorised over the requests of a step.

Each request draws its own uniform numbers, number i for its i-th token, from a counter-based generator keyed by its
seed alone; a token is the inverse of the cumulative distribution at that number.  So what a request samples depends on
its seed and its logits, never on its neighbours.  Knows nothing of models or caches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.types import Sampling

BLOCK = 256  # vocabulary entries summed at once, so that no [n, V] cumulative sum is needed


class Uniforms:
    """The uniform numbers of one request: element i of numpy's Philox stream with the seed as key."""

    def __init__(self, seed: int) -> None:
        self._stream = np.random.Philox(key=seed % 2**64)
        self._ready: list[float] = []

    def next(self) -> float:
        """In [0, 1), 53 bits."""
        if not self._ready:
            self._ready = ((self._stream.random_raw(64) >> np.uint64(11)) * 2.0**-53).tolist()[::-1]
        return self._ready.pop()


def check(sampling: Sampling) -> None:
    """ValueError for settings that mean nothing."""
    for name, value, fine in (
        ("max_tokens", sampling.max_tokens, sampling.max_tokens >= 1),
        ("temperature", sampling.temperature, sampling.temperature >= 0),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1),
        ("top_k", sampling.top_k, sampling.top_k >= 0),
    ):
        if not fine:
            raise ValueError(f"sampling.{name} = {value} is out of range")


def check_request(request_id: int, prompt: np.ndarray, sampling: Sampling, *, vocab: int, max_seq_len: int) -> None:
    """ValueError, naming the numbers, for a request that no engine with these bounds can serve."""
    check(sampling)
    ids = np.asarray(prompt)
    if ids.ndim != 1 or len(ids) == 0 or ids.dtype.kind not in "iu":
        raise ValueError(f"request {request_id}: a prompt is [T] ints, T > 0; got {ids.dtype} of shape {ids.shape}")
    if ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(f"request {request_id}: ids {ids.min()} to {ids.max()} outside [0, {vocab})")
    if len(ids) + sampling.max_tokens > max_seq_len:
        raise ValueError(
            f"request {request_id}: {len(ids)} prompt + {sampling.max_tokens} new tokens > max_seq_len {max_seq_len}"
        )


def sample(
    logits: Tensor,  # [n, V]
    samplings: Sequence[Sampling],  # [n]
    uniforms: Sequence[float],  # [n], unused for greedy rows
) -> tuple[Tensor, Tensor]:
    """[n] int64 tokens, [n] float32 log-probs: temperature-scaled, before top-p and top-k (greedy: temperature 1).

    RuntimeError for logits that are not finite.
    """
    z = logits.float()
    temperatures = [s.temperature or 1.0 for s in samplings]
    if any(t != 1.0 for t in temperatures):
        z = z / torch.tensor(temperatures, device=z.device)[:, None]
    top = z.amax(-1, keepdim=True)
    weights = (z - top).exp_()
    lse = weights.sum(-1).log_().add_(top[:, 0])
    if not bool(lse.isfinite().all()):
        raise RuntimeError("logits are not finite: weights or activations have overflowed")
    greedy = [s.temperature == 0 for s in samplings]
    cut = [i for i, s in enumerate(samplings) if not greedy[i] and (s.top_p < 1 or s.top_k > 0)]
    if all(greedy):
        tokens = z.argmax(-1)
    else:
        u = torch.tensor(uniforms, dtype=torch.float64, device=z.device)
        tokens = _invert(weights, u) if len(cut) < len(samplings) else torch.zeros_like(lse, dtype=torch.long)
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=z.device), z.argmax(-1), tokens)
        if cut:
            rows = torch.tensor(cut, device=z.device)
            tokens[rows] = _sample_cut(z[rows], [samplings[i] for i in cut], u[rows])
    return tokens, z.gather(1, tokens[:, None])[:, 0] - lse


def _invert(weights: Tensor, u: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds u times the total; float64 sums, never an entry of weight 0."""
    num, width = weights.shape
    if width <= 4 * BLOCK:
        return _first_above(weights, u)
    if width % BLOCK:
        weights = F.pad(weights, (0, -width % BLOCK))
    blocks = weights.view(num, -1, BLOCK)
    cdf = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    target = _below(u * cdf[:, -1], cdf[:, -1])
    block = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
    every = torch.arange(num, device=weights.device)
    before = torch.where(block > 0, cdf[every, block - 1], 0.0)
    inner = blocks[every, block].cumsum(-1, dtype=torch.float64)
    within = torch.searchsorted(inner, _below(target - before, inner[:, -1])[:, None], right=True)[:, 0]
    return block * BLOCK + within


def _below(target: Tensor, total: Tensor) -> Tensor:
    """Rounding may put the target on the total, where no entry is left."""
    return torch.minimum(target, total * (1 - 1e-15))


def _sample_cut(z: Tensor, samplings: Sequence[Sampling], u: Tensor) -> Tensor:
    """top-k, then top-p on what it left: the fewest most likely tokens that reach top_p."""
    ordered, order = z.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(-1, dtype=torch.float64)
    vocab = z.shape[1]
    top_k = torch.tensor([s.top_k or vocab for s in samplings], device=z.device)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=z.device)
    probs = probs.masked_fill(torch.arange(vocab, device=z.device) >= top_k[:, None], 0.0)
    mass_before = probs.cumsum(-1) - probs
    probs = probs.masked_fill((mass_before >= top_p[:, None] * probs.sum(-1, keepdim=True)) & (mass_before > 0), 0.0)
    return order.gather(1, _first_above(probs, u)[:, None])[:, 0]


def _first_above(probs: Tensor, u: Tensor) -> Tensor:
    cdf = probs.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, _below(u * cdf[:, -1], cdf[:, -1])[:, None], right=True)[:, 0]
