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

from spmd_rl.attention import causal_attention
from spmd_rl.engine.cache import Prefix, Slab


class _Rows:
    """The next tokens of n neighbouring rows of a slab, one each."""

    def __init__(self, slab: Slab, first: int, num: int, start: int, held: list[int], device: torch.device) -> None:
        self.num, self.start = num, start
        self._slab, self._rows = slab, slice(first, first + num)
        self._length = max(held) + 1
        self._even = min(held) == max(held)
        self._held = torch.tensor(held, device=device)
        self._every = torch.arange(num, device=device)
        self._in_numpy = device.type == "cpu" and slab.kv[0].dtype == torch.float32
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:  # q [1, H, n, D], k and v [1, H_kv, n, D] -> [1, n, H, D]
        mask = None if self._even else self._mask(window, q.dtype)
        oldest = self._length - window if self._even and window is not None and window < self._length else 0
        cached = self._slab.kv[layer]  # [2, rows, H_kv, capacity, D]
        every, held, new = self._every, self._held, (k[0].transpose(0, 1), v[0].transpose(0, 1))
        q = q.view(k.shape[1], -1, self.num, q.shape[3]).permute(2, 0, 1, 3)  # queries of a key head: positions
        attend = _attend
        if self._in_numpy:
            attend, mask = _attend_in_numpy, None if mask is None else mask.numpy()
            q, cached, every, held, *new = (x.numpy() for x in (q, cached, every, held, *new))
        cached = cached[:, self._rows]
        for mine, its in zip(cached, new, strict=True):
            mine[every, :, held] = its
        keys, values = cached[:, :, :, oldest : self._length]
        return attend(q, keys, values, mask, scale, softcap).reshape(1, self.num, -1, q.shape[3])

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            column = torch.arange(self._length, device=self._held.device)
            held = self._held[:, None]
            hidden = column > held
            if window is not None:
                hidden |= column <= held - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


def _attend(
    q: Tensor,  # [n, H_kv, H / H_kv, D]
    keys: Tensor,  # [n, H_kv, L, D]
    values: Tensor,  # [n, H_kv, L, D]
    mask: Tensor | None,  # [n, 1, 1, L]
    scale: float,
    softcap: float | None,
) -> Tensor:  # like q
    if softcap is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    scores = softcap * torch.tanh(q @ keys.transpose(2, 3) * (scale / softcap))
    weights = (scores if mask is None else scores + mask).softmax(-1, dtype=torch.float32)
    return weights.to(q.dtype) @ values


def _attend_in_numpy(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray | None, scale: float, softcap: float | None
) -> Tensor:
    """The same of arrays."""
    scores = (q * scale) @ keys.swapaxes(2, 3)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if mask is not None:
        scores += mask
    scores -= scores.max(-1, keepdims=True)
    weights = np.exp(scores, out=scores)
    weights /= weights.sum(-1, keepdims=True)
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

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        outs = []
        for rows in self._rows:
            own = (x if rows.num == x.shape[2] else x.narrow(2, rows.start, rows.num) for x in (q, k, v))
            outs.append(rows.attend(layer, *own, scale, window, softcap))
        for prefix, begin, end, start in self._chunks:
            own, kept = slice(start, start + end - begin), prefix.kv[layer]
            kept[0, :, begin:end], kept[1, :, begin:end] = k[0, :, own], v[0, :, own]
            out = causal_attention(q[:, :, own], *kept[:, None, :, :end], scale=scale, window=window, softcap=softcap)
            outs.append(out.transpose(1, 2))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)
