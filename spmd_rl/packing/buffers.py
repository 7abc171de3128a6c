"""Memory used again once nobody holds a view on it: pages touched once are as fast as a copy, fresh ones are not.

numpy gives every view the owner of its memory as base, so the owner's reference count says whether views are left.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

_ALIGN = 8


class Buffers:
    """Up to `keep` pieces of memory.  Any thread may take one."""

    def __init__(self, *, keep: int = 4) -> None:
        self._keep = keep
        self._owners: list[np.ndarray] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> np.ndarray:
        """[num_bytes] uint8 that nobody else uses."""
        size = 1 << max(12, (num_bytes - 1).bit_length())  # so that what is of about one size shares memory
        with self._lock:
            for index in range(len(self._owners)):
                if len(self._owners[index]) == size and sys.getrefcount(self._owners[index]) == 2:
                    return self._owners[index][:num_bytes]
            owner = np.empty(size, np.uint8)
            self._owners = [*self._owners[1 - self._keep :], owner]
            return owner[:num_bytes]


def aligned(num_bytes: int) -> int:
    """What an array takes up among others in one piece of memory, in messages and in packed rollouts."""
    return -(-num_bytes // _ALIGN) * _ALIGN
