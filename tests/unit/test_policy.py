import asyncio

import pytest

from spmd_rl.orchestrator.policy import Policy
from tests.clock import run_virtual


def test_a_bump_tells_every_listener_once_in_order():
    policy, heard = Policy(3), []
    policy.on_change(lambda: heard.append(("first", policy.version)))
    policy.on_change(lambda: heard.append(("second", policy.version)))
    policy.advance(4)
    assert heard == [("first", 4), ("second", 4)]


@pytest.mark.parametrize("version", [3, 5, 2])
def test_a_version_is_never_skipped_or_repeated(version):
    with pytest.raises(RuntimeError, match=f"version 3 and was advanced to {version}"):
        Policy(3).advance(version)


def test_reached_waits_for_its_version_and_no_longer():
    async def main():
        policy = Policy()
        await policy.reached(0)
        waiter = asyncio.create_task(policy.reached(2))
        abandoned = asyncio.create_task(policy.reached(2))
        policy.advance(1)
        await asyncio.sleep(0)
        assert not waiter.done()
        abandoned.cancel()
        policy.advance(2)
        await waiter

    run_virtual(main())
