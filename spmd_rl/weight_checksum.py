"""A checksum of weights that sees where each word is.  Pure."""

from __future__ import annotations

import torch
from torch import Tensor

_ROW_WORDS = 1 << 15  # words that a checksum keeps at work: 256 KiB stay in the cache
_MULTIPLIER = -7046029254386353131  # odd, so that no word's weight vanishes modulo 2^64


def checksum(data: Tensor) -> Tensor:  # [N] uint8, N a multiple of 8 → [] int64
    """Sum of the int64 words, each times an odd weight of its position, modulo 2^64.

    With rows of M words: weight(row k of K, column m) = R^(K - k) * (2 m + 1), R odd; in a last, shorter row 2 m + 1.
    One changed word always changes the sum, as odd weights have an inverse; swapped words do because weights differ.
    """
    words = data.view(torch.int64)
    weights = torch.arange(1, 2 * _ROW_WORDS, 2, device=data.device)
    num_rows = len(words) // _ROW_WORDS
    rest = words[num_rows * _ROW_WORDS :]
    total = (rest * weights[: len(rest)]).sum()
    if num_rows:
        row_sum = torch.zeros(_ROW_WORDS, dtype=torch.int64, device=data.device)
        for row in words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS).unbind():
            torch.add(row, row_sum, alpha=_MULTIPLIER, out=row_sum)
        total += (row_sum * weights).sum() * _MULTIPLIER
    return total


def tensor_checksum(tensor: Tensor) -> Tensor:  # [] int64
    """Of any tensor's bytes, zeros after them."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    aligned = len(data) % 8 == 0 and data.storage_offset() % 8 == 0
    return checksum(data if aligned else torch.nn.functional.pad(data, (0, -len(data) % 8)).clone())
