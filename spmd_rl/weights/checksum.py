"""A checksum of weights that sees where each word is.  Pure."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_ROW_WORDS = 512  # 256 to 1024 run at the speed of reading memory, on CPUs
_MULTIPLIER = -7046029254386353131  # odd, so that no word's weight vanishes modulo 2^64


def checksum(data: Tensor) -> Tensor:  # [N] uint8, N a multiple of 8 → [] int64
    """Sum of the int64 words, each times an odd weight of its position, modulo 2^64.

    With rows of M words: weight(row k, column m) = R^(k + 1) * (2 m + 1), R odd; in a last, shorter row 2 m + 1.
    One changed word always changes the sum, as odd weights have an inverse; two that are swapped do because weights
    differ, unless nothing but their topmost bits does (an even difference of weights times 2^63 is 0).
    """
    words = data.view(torch.int64)
    num_rows = len(words) // _ROW_WORDS
    rows, rest = words[: num_rows * _ROW_WORDS].view(num_rows, _ROW_WORDS), words[num_rows * _ROW_WORDS :]
    of_rows, of_columns = _weights(num_rows, data.device)
    sums = rows.t() @ of_rows if data.device.type == "cpu" else (rows * of_rows[:, None]).sum(0)
    return (sums * of_columns).sum() + (rest * of_columns[: len(rest)]).sum()


def tensor_checksum(tensor: Tensor) -> Tensor:  # [] int64
    """Of any tensor's bytes, zeros after them."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    aligned = len(data) % 8 == 0 and data.storage_offset() % 8 == 0
    return checksum(data if aligned else torch.nn.functional.pad(data, (0, -len(data) % 8)).clone())


@lru_cache(maxsize=8)
def _weights(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    of_columns = torch.arange(1, 2 * _ROW_WORDS, 2, device=device)
    return torch.full((num_rows,), _MULTIPLIER, device=device).cumprod(0), of_columns
