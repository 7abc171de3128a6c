"""The attention of one engine step over the cache: the next token of every decoding row, and chunks of prefixes.

float32 on the CPU is computed in numpy, which multiplies many small matrices twice as fast as torch.  Knows nothing of
sampling or versions.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from spmd_rl.engine.cache import Prefix, Slab
from spmd_rl.model.attention import Rule, causal_attention


class _Rows:
    """The next tokens of n neighbouring rows of a slab, one each."""

    def __init__(self, slab: Slab, first: int, num: int, start: int, held: list[int], device: torch.device) -> None:
        self.num, self.start = num, start
        self._slab, self._rows = slab, slice(first, first + num)
        self._length = max(held) + 1
        self._even = min(held) == max(held)
        self._held = torch.tensor(held, device=device)
        self._every = torch.arange(num, device=device)
        self._on_cpu = device.type == "cpu"
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule
    ) -> Tensor:  # q [1, H, n, D], k and v [1, H_kv, n, D] -> [1, n, H, D]
        mask = None if self._even else self._mask(rule, q.dtype)
        oldest = rule.oldest(self._length - 1) if self._even else 0
        cached = self._slab.kv[layer]  # [2, rows, H_kv, capacity, D]
        new, seen = (k[0].transpose(0, 1), v[0].transpose(0, 1)), slice(oldest, self._length)
        q = q.view(k.shape[1], -1, self.num, q.shape[3]).permute(2, 0, 1, 3)  # queries of a key head: positions
        sinks = None if rule.sinks is None else rule.sinks.view(*q.shape[1:3], 1)
        if self._on_cpu and q.dtype == torch.float32:
            arrays = cached.numpy()[:, self._rows]
            for array, its in zip(arrays, new, strict=True):
                array[self._every.numpy(), :, self._held.numpy()] = its.numpy()
            masked, of_sinks = None if mask is None else mask.numpy(), None if sinks is None else sinks.numpy()
            out = _attend_in_numpy(q.numpy(), arrays[0, :, :, seen], arrays[1, :, :, seen], masked, of_sinks, rule)
        else:
            cached = cached[:, self._rows]
            for mine, its in zip(cached, new, strict=True):
                mine[self._every, :, self._held] = its
            out = _attend(q, cached[0, :, :, seen], cached[1, :, :, seen], mask, sinks, rule)
        return out.reshape(1, self.num, -1, q.shape[3])

    def _mask(self, rule: Rule, dtype: torch.dtype) -> Tensor:
        seen = rule.window, rule.chunk
        if seen not in self._masks:
            hidden = rule.hidden(self._held[:, None], torch.arange(self._length, device=self._held.device))
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[seen] = mask[:, None, None]
        return self._masks[seen]


def _attend(
    q: Tensor,  # [n, H_kv, H / H_kv, D]
    keys: Tensor,  # [n, H_kv, L, D]
    values: Tensor,  # [n, H_kv, L, D]
    mask: Tensor | None,  # [n, 1, 1, L]
    sinks: Tensor | None,  # [H_kv, H / H_kv, 1]
    rule: Rule,
) -> Tensor:  # like q
    if rule.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=rule.scale)
    scores = q @ keys.transpose(2, 3) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(len(q), -1, -1, 1)], 3)
    weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, q.dtype)).to(q.dtype)
    return weights[..., : keys.shape[2]] @ values


def _attend_in_numpy(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray | None, sinks: np.ndarray | None, rule: Rule
) -> Tensor:
    """The same of arrays."""
    scores = (q * rule.scale) @ keys.swapaxes(2, 3)
    if rule.softcap is not None:
        scores = rule.softcap * np.tanh(scores / rule.softcap)
    if mask is not None:
        scores += mask
    most = scores.max(-1, keepdims=True)
    if sinks is not None:
        most = np.maximum(most, sinks)
    scores -= most
    weights = np.exp(scores, out=scores)
    total = weights.sum(-1, keepdims=True)
    weights /= total if sinks is None else total + np.exp(sinks - most)
    return torch.from_numpy(weights @ values)


class StepAttention:
    """`Attend` of one step: first the next tokens of decoding rows, slab by slab, then chunks of prefixes."""

    def __init__(
        self,
        rows: Seq[tuple[Slab, int, int]],  # slab, first row, number of rows
        chunks: Seq[tuple[Prefix, int, int]],  # prefix, first token, end
        device: torch.device,
    ) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self._rows: list[_Rows] = []
        self._chunks: list[tuple[Prefix, int, int, int]] = []
        for slab, first, num in rows:
            sequences = slab.sequences[first : first + num]
            held = [len(s.tokens) - 1 for s in sequences]
            self._rows.append(_Rows(slab, first, num, len(self.positions), held, device))
            self.token_ids += [s.tokens[-1] for s in sequences]
            self.positions += held
        for prefix, begin, end in chunks:
            self._chunks.append((prefix, begin, end, len(self.positions)))
            self.token_ids += prefix.tokens[begin:end]
            self.positions += range(begin, end)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        outs = []
        for rows in self._rows:
            if rows.num == q.shape[2]:
                outs.append(rows.attend(layer, q, k, v, rule))
                continue
            rows_q, rows_k, rows_v = (x.narrow(2, rows.start, rows.num) for x in (q, k, v))
            outs.append(rows.attend(layer, rows_q, rows_k, rows_v, rule))
        for prefix, begin, end, start in self._chunks:
            own = slice(start, start + end - begin)
            kept = prefix.hold(layer, k[0, :, own], v[0, :, own], begin)[:, None, :, :end]
            outs.append(causal_attention(q[:, :, own], kept[0], kept[1], rule).transpose(1, 2))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)
