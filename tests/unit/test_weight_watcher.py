import asyncio

import pytest

from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.weight_watcher import WeightWatcher
from tests.clock import run_virtual


def watch(announcements: list[int | None], *, reload_s: float = 2.0, fail_at: int | None = None):
    async def main():
        policy, events, loop = Policy(), [], asyncio.get_running_loop()
        policy.on_change(lambda: events.append(("live", policy.version, loop.time())))
        queue: asyncio.Queue = asyncio.Queue()
        for version in announcements:
            queue.put_nowait(version)

        async def reload(version: int) -> None:
            events.append(("reload", version, loop.time()))
            await asyncio.sleep(reload_s)
            if version == fail_at:
                raise RuntimeError(f"rank 1: checksum of version {version} differs")

        watcher = WeightWatcher(announced=queue.get, reload=reload, policy=policy)
        try:
            await watcher.run()
        finally:
            events.append(("version", policy.version, loop.time()))
        return events

    return run_virtual(main())


def test_the_version_is_live_only_after_every_engine_has_reloaded():
    events = watch([1, 2, None])
    assert events[:4] == [("reload", 1, 0.0), ("live", 1, 2.0), ("reload", 2, 2.0), ("live", 2, 4.0)]


def test_a_skipped_version_is_refused():
    with pytest.raises(RuntimeError, match="version 2 announced while version 0 is live"):
        watch([2])


def test_a_failed_reload_ends_the_watcher():
    with pytest.raises(RuntimeError, match="checksum of version 1 differs"):
        watch([1], fail_at=1)
