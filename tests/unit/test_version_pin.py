import asyncio

import pytest

from spmd_rl.orchestrator.answers import Answers
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.version_pin import VersionPin
from spmd_rl.packing.messages import PinVersion, VersionPinned


class Engines:
    """Two engines at versions of their own that answer at once, and say what they were asked."""

    def __init__(self, policy: Policy, *versions: int) -> None:
        self.policy, self.versions, self.asked = policy, list(versions), []
        self.answers = Answers()
        self.pin = VersionPin(engines=range(len(versions)), send=self.send, answers=self.answers, policy=policy)
        self.advances = True

    def send(self, rank: int, message: PinVersion) -> None:
        if rank == len(self.versions) - 1:  # all have been asked
            self.answer(message.number, message.upto)

    def answer(self, number: int, upto: int | None) -> None:
        self.asked.append(upto)
        if upto is not None:
            self.versions = [max(upto, version) for version in self.versions]
        for rank, version in enumerate(self.versions):
            held_s = 0.5 * rank if upto is None else 0.0
            self.answers.add(rank, VersionPinned(number=number, version=version, held_s=held_s))
        if min(self.versions) == max(self.versions) > self.policy.version and self.advances:
            self.policy.advance(max(self.versions))


def test_engines_are_held_where_they_are_and_let_go():
    async def main():
        engines = Engines(Policy(3), 3, 3)
        async with engines.pin.hold() as version:
            assert (version, engines.asked) == (3, [3])
        assert (engines.asked, engines.pin.stall_s) == ([3, None], 0.5)

    asyncio.run(main())


def test_an_engine_that_is_behind_goes_on_to_the_newest_one():
    async def main():
        engines = Engines(Policy(3), 4, 3)
        async with engines.pin.hold() as version:
            assert (version, engines.versions, engines.policy.version) == (4, [4, 4], 4)
        assert engines.asked == [3, 4, None]

    asyncio.run(main())


def test_an_evaluation_that_is_cut_lets_go_without_waiting():
    async def main():
        engines = Engines(Policy(3), 3, 3)
        with pytest.raises(RuntimeError, match="cut"):
            async with engines.pin.hold():
                raise RuntimeError("cut")
        assert engines.asked == [3, None]
        engines.advances = False
        engines.versions = [4, 4]  # acknowledged by nobody yet
        waiting = asyncio.create_task(engines.pin.hold().__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert engines.asked[-1] is None

    asyncio.run(main())
