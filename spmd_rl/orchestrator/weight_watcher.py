"""New weights exist → every engine has them → the version rises.  The one place that advances the policy.

Given `announced` (waits for the next version that the trainer announces; None = there will be none), `reload` (returns
once every inference rank has acknowledged checksum and swap) and the policy.
Promises: versions are never skipped or repeated; a failing reload raises and the version stays.
Knows nothing of how weights move, nor of who reads the version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from spmd_rl.orchestrator.policy import Policy


class WeightWatcher:
    """`run` as a task."""

    def __init__(
        self,
        *,
        announced: Callable[[], Awaitable[int | None]],
        reload: Callable[[int], Awaitable[None]],
        policy: Policy,
    ) -> None:
        self._announced, self._reload, self._policy = announced, reload, policy

    async def run(self) -> None:
        """Waits for: the trainer's announcement, then all acknowledgements.  Ends when nothing more is announced."""
        while (version := await self._announced()) is not None:
            if version != self._policy.version + 1:
                raise RuntimeError(f"version {version} announced while version {self._policy.version} is live")
            await self._reload(version)
            self._policy.advance(version)
