import asyncio

import pytest

from spmd_rl.metrics.interval import MetricsLoop
from spmd_rl.orchestrator.ledger import Ledger
from tests.clock import run_virtual


def test_numbers_come_at_a_fixed_interval_while_training_stands_still():
    async def main():
        loop, lines = asyncio.get_running_loop(), []
        metrics = MetricsLoop(interval_s=10.0, collect={"now": loop.time}, emit=lines.append)
        running = asyncio.create_task(metrics.run())
        await asyncio.sleep(35)
        running.cancel()
        return lines

    assert run_virtual(main()) == [{"now": t, "late_s": 0.0} for t in (10.0, 20.0, 30.0)]


def test_a_blocked_loop_makes_a_tick_late_and_never_doubles_it():
    async def main():
        loop, lines = asyncio.get_running_loop(), []

        def block() -> None:
            loop._now += 27.0

        loop.call_at(9.0, block)
        metrics = MetricsLoop(interval_s=10.0, collect={"now": loop.time}, emit=lines.append)
        running = asyncio.create_task(metrics.run())
        await asyncio.sleep(55)
        running.cancel()
        return lines

    assert [(line["now"], line["late_s"]) for line in run_virtual(main())] == [(36.0, 26.0), (40.0, 0.0), (50.0, 0.0)]


def test_a_broken_ledger_ends_the_loop():
    async def main():
        ledger = Ledger()
        ledger.admit(8)
        metrics = MetricsLoop(
            interval_s=1.0,
            collect={},
            emit=lambda line: None,
            checks=[lambda: ledger.assert_closed(in_flight=4, waiting=2)],
        )
        await metrics.run()

    with pytest.raises(RuntimeError, match=r"admitted 8 != 6 = .* \+ waiting 2 \+ in flight 4"):
        run_virtual(main())
