"""The live policy as every part sees it: one number, and whoever wants to know is told when it moves.

Promises: the version rises by exactly one at a time; a bump is one assignment and one round of calls.
Belongs to one event loop.  Knows nothing of weights, gates or trainers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Policy:
    """`version` = number of completed optimizer batches whose weights every engine has loaded."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._callbacks: list[Callable[[], None]] = []
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def advance(self, version: int) -> None:
        """Move to `version`, which must be the next one."""
        if version != self.version + 1:
            raise RuntimeError(f"policy is at version {self.version} and was advanced to {version}: not the next one")
        self.version = version
        for callback in self._callbacks:
            callback()
        still = []
        for wanted, future in self._waiting:
            if wanted > version:
                still.append((wanted, future))
            elif not future.done():
                future.set_result(None)
        self._waiting = still

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have `callback` called after every advance, in order of registration."""
        self._callbacks.append(callback)

    async def reached(self, version: int) -> None:
        """Wait until `version` or a later one is live.  Unblocked by `advance`."""
        if self.version < version:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((version, future))
            await future
