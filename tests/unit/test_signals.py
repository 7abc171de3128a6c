"""What the orchestrator tells of itself while something stands still, on a clock that the test turns."""

import asyncio

import pytest

from tests.unit.test_orchestrator import Ranks


class SlowRanks(Ranks):
    """From the third group on rollouts end when the test says so, until `all_end`; each step takes two seconds."""

    def __init__(self, folder, **sections):
        super().__init__(folder, steps=3, eval={"every": -1}, **sections)
        self.values: dict[tuple[str, int], dict] = {}  # of lines, by kind and version
        self.held_works: list = []
        self.holds = True

    def write(self, kind, version, values) -> None:
        self.values[kind, version] = values
        super().write(kind, version, values)

    def all_end(self) -> None:
        self.holds = False
        for work in self.held_works:
            self._end(work)

    def interval(self, version) -> dict:
        """The newest line at that version."""
        line = self.values["interval", version]
        return {name: line[name] for name in ("lag", "step_age_s", "swap_age_s")}

    def _work(self, work) -> None:
        if self.holds and work.group_id > 1:
            self.held_works.append(work)
        else:
            super()._work(work)

    def _train(self, version, save) -> None:
        self.now += 2.0
        super()._train(version, save)
        self._changed.set()


def test_the_interval_tells_the_lag_of_now_and_the_age_of_the_step_and_of_the_version(tmp_path):
    async def main():
        ranks = SlowRanks(tmp_path)
        async with ranks.running() as task:
            await ranks.until(lambda: ranks.count("step")[1])  # batch 0 trained, groups of version 0 run
            ranks.now = 9.0
            ranks.orchestrator.metrics.tick()
            assert ranks.interval(1) == {"lag": 1, "step_age_s": 7.0, "swap_age_s": 7.0}
            ranks.all_end()
            assert await task == "done"
            assert ranks.interval(3) == {"lag": 0, "step_age_s": 0.0, "swap_age_s": 0.0}

    asyncio.run(main())


def test_the_depth_is_what_waits_when_a_step_ends_though_it_be_shipped_or_formed(tmp_path):
    """S = 2: three batches of two groups are there at once; of the last batch nothing is left to wait."""

    async def main():
        ranks = SlowRanks(tmp_path)
        ranks.holds = False
        async with ranks.running() as task:
            assert await task == "done"
        assert ranks.values["step", 1]["queue/out_depth"] == 4
        assert ranks.values["step", 3]["queue/out_depth"] == 0

    asyncio.run(main())


def test_weights_that_wait_for_what_runs_are_late_from_their_announcement_on(tmp_path):
    async def main():
        ranks = SlowRanks(tmp_path, staleness={"on_update": "drain", "max_staleness": 1})
        async with ranks.running() as task:
            await ranks.until(lambda: ranks.now == 2.0)
            await asyncio.sleep(0)
            ranks.now = 5.0
            ranks.orchestrator.metrics.tick()
            assert ranks.interval(0) == {"lag": 0, "step_age_s": 3.0, "swap_age_s": 5.0}
            ranks.all_end()
            assert await task == "done"
        assert ranks.values["step", 1]["weights/poll_to_reload_s"] == 3.0
        assert ranks.values["step", 3]["weights/poll_to_reload_s"] == pytest.approx(0.0)

    asyncio.run(main())
