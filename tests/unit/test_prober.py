"""Who is asked for a probe, when, and what trainers are given to score."""

import asyncio

import numpy as np
import pytest

from spmd_rl.metrics.probe import Limits
from spmd_rl.orchestrator.answers import Answers
from spmd_rl.orchestrator.prober import AUTO, Prober
from spmd_rl.packing import packing
from spmd_rl.packing.messages import Message, ProbeSampled, ProbeScored, SampleProbe
from spmd_rl.types import Disagreement, Rollout

ENGINES, TRAINERS = (0, 3), (5, 6)


class Bench:
    """Engines that answer when told to, two trainers that score at once, the second otherwise by `off`."""

    def __init__(self, every: int = AUTO) -> None:
        self.asked: list[tuple[int, int, int | None]] = []
        self.scored: list[list[int]] = []  # lengths of sequences, by call
        self.now, self.off = 0.0, 0.0
        self.answers = Answers()
        self.prober = Prober(
            engines=ENGINES,
            trainers=TRAINERS,
            send=self.send,
            answers=self.answers,
            every=every,
            limits=Limits(exact=True),
            recomputes=True,
            clock=lambda: self.now,
        )

    def send(self, rank: int, message: Message) -> None:
        if isinstance(message, SampleProbe):
            self.asked.append((rank, message.number, message.version))
        elif rank == TRAINERS[-1]:  # all have been asked
            self.score(message.number, message.sequences)

    def answer(self, version: int, *lengths: int) -> None:
        """The newest engine that was asked has sampled sequences of these lengths, a prompt of one token each."""
        engine, number, _ = self.asked[-1] if len(self.asked) > 2 else self.asked[len(self.scored)]
        rollouts = [Rollout(env="probe", task_id="", ticket=i) for i in range(len(lengths))]
        for rollout, length in zip(rollouts, lengths, strict=True):
            rollout.append(np.array([1]))
            rollout.append(np.full(length - 1, 2), np.full(length - 1, -1.0), np.full(length - 1, version))
        packed = packing.pack(rollouts, np.ones(len(lengths), np.float32))
        scores = np.full(len(packed.token_ids), -1.0, np.float32)
        sampled = ProbeSampled(
            number=number,
            version=version,
            num_tokens=sum(lengths),
            sequences=packed,
            scores=scores,
            choices=np.empty((0, 0), np.int16),
        )
        self.prober.sampled(sampled)
        self.answers.add(engine, sampled)

    def score(self, number: int, packed: packing.Packed) -> None:
        self.scored.append(np.diff(packed.cu_seqlens).tolist())
        assert packed.ticket.tolist() == list(range(len(packed))) and packed.advantage.all()
        scores = np.full(len(packed.token_ids), -1.0, np.float32)
        for rank, off in zip(TRAINERS, (0.0, self.off), strict=True):
            scored = ProbeScored(
                number=number,
                version=7,
                packed=scores + np.float32(off),
                alone=scores,
                plain=scores,
                choices=np.empty((0, 0), np.int16),
                seconds=0.5,
            )
            self.answers.add(rank, scored)

    async def start(self) -> dict[str, float]:
        job = asyncio.ensure_future(self.prober.at_start(7))
        for lengths in ((3, 9, 5), (4, 8, 6)):
            await asyncio.sleep(0)
            self.answer(7, *lengths)
            for _ in range(3):
                await asyncio.sleep(0)
        return await job

    async def probe(self, version: int, held_s: float = 0.0) -> dict[str, float]:
        self.answer(version, 7)
        number, sampled = await self.prober.sample(version)
        return await self.prober.compare(number, sampled, version, held_s=held_s)


def test_all_engines_are_asked_at_the_start_and_then_one_in_turn_beside_a_short_and_a_long_sequence():
    async def main() -> None:
        bench = Bench(every=1)
        values = await bench.start()
        assert bench.asked == [(0, 1, None), (3, 2, None)] and bench.scored == [[3, 9, 5], [4, 8, 6]]
        assert (values["probe/engines"], values["probe/tokens"]) == (2, 15)
        for version, engine in ((8, 0), (9, 3), (10, 0)):
            bench.prober.plan(version)
            assert bench.asked[-1][::2] == (engine, version) and bench.prober.is_planned(version)
            values = await bench.probe(version)
            assert bench.scored[-1] == [4, 8, 7] and values["probe/tokens"] == 6
        assert bench.prober.sampled_tokens == 17 + 18 + 3 * 7 and bench.prober.in_flight == 0

    asyncio.run(main())


def test_what_a_probe_costs_is_the_wait_and_the_scoring_and_decides_when_the_next_one_is_due():
    async def main() -> None:
        bench = Bench()
        await bench.start()
        bench.prober.plan(8)
        bench.prober.plan(9)  # the one before is not compared yet
        assert [version for *_, version in bench.asked] == [None, None, 8]
        assert (await bench.probe(8, held_s=1.5))["probe/cost_s"] == 2.0
        bench.now = 199.0
        bench.prober.plan(9)
        assert not bench.prober.is_planned(9)
        bench.now = 200.0
        bench.prober.plan(10)
        assert bench.prober.is_planned(10)

    asyncio.run(main())


def test_one_trainer_rank_that_scores_otherwise_is_enough():
    async def main() -> None:
        bench = Bench(every=1)
        bench.off = 0.25
        with pytest.raises(Disagreement, match=r"the engine of rank 0 .* at version 7 .* up to 0\.25"):
            await bench.start()

    asyncio.run(main())
