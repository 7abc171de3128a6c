"""Reads a GGUF file: metadata as Python values, tensors as float32 arrays.

Just enough of GGUF v2 and v3 for the tensor types in `_BLOCKS`; any other raises.  Knows nothing of any model.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Gguf:
    """One file: `metadata`, the `shapes` of its tensors, and `tensor(name)`."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, "r")
        self._at = 0
        if bytes(self._bytes[:4]) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file")
        _, version, num_tensors, num_metadata = self._read("4sIQQ")
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version {version} is not supported")
        self.metadata: dict[str, Any] = {self._string(): self._value(*self._read("I")) for _ in range(num_metadata)}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, tuple[int, int]] = {}  # (tensor type, offset in bytes)
        for _ in range(num_tensors):
            name = self._string()
            (num_dims,) = self._read("I")
            self.shapes[name] = self._read(f"{num_dims}Q")[::-1]  # the file has the fastest dim first
            self._kinds[name] = self._read("IQ")
        alignment: int = self.metadata.get("general.alignment", 32)
        self._data_start = -(-self._at // alignment) * alignment

    def tensor(self, name: str) -> np.ndarray:
        """float32 in the tensor's shape."""
        kind, offset = self._kinds[name]
        if kind not in _BLOCKS:
            raise ValueError(f"{name}: GGML tensor type {kind} is not supported")
        block_len, block_bytes, decode = _BLOCKS[kind]
        shape = self.shapes[name]
        start, num_bytes = self._data_start + offset, math.prod(shape) // block_len * block_bytes
        blocks = np.asarray(self._bytes[start : start + num_bytes]).reshape(-1, block_bytes)
        return decode(blocks).astype(np.float32).reshape(shape)

    def _read(self, form: str) -> tuple[Any, ...]:
        out = struct.unpack_from("<" + form, self._bytes.data, self._at)
        self._at += struct.calcsize("<" + form)
        return out

    def _string(self) -> str:
        (length,) = self._read("Q")
        text: bytes = self._read(f"{length}s")[0]
        return text.decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._read(_SCALARS[kind])[0]
        item, length = self._read("IQ")
        if item in _SCALARS:
            return list(self._read(f"{length}{_SCALARS[item]}"))
        return [self._value(item) for _ in range(length)]


def _half(columns: np.ndarray) -> np.ndarray:  # [num_blocks, 2] bytes
    return columns.copy().view(np.float16).astype(np.float32)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """fp16 scale, 32 int8."""
    return _half(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """fp16 scale, fp16 minimum, 16 bytes whose low nibbles are the values 0 … 15 and whose high ones are 16 … 31."""
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    values: np.ndarray = _half(blocks[:, :2]) * nibbles.astype(np.float32) + _half(blocks[:, 2:4])
    return values


_BLOCKS: dict[int, tuple[int, int, Callable[[np.ndarray], np.ndarray]]] = {  # type: (values, bytes, decode)
    0: (1, 4, lambda blocks: blocks.view(np.float32)),
    1: (1, 2, lambda blocks: blocks.view(np.float16)),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
}
