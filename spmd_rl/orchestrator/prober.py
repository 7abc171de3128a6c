"""Asks engines and trainers for the two halves of a probe: in full at the start, then in small, in turn, now and then.

A probe of a version is in two parts.  An engine samples at it, which it does while the trainers hold that version: the
batch that would be trained next waits.  Then the trainers score what was sampled, before they train.  Both hold
training up, and are counted.  How often is a setting, or as often as costs SHARE of the time, from the first version
after the start on.
Given how to ask.  Knows nothing of batches, gates or weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from spmd_rl.metrics.probe import Limits, Sampled, Scored, assert_agreed, behind, compare, ends_of, together
from spmd_rl.orchestrator.answers import Answers
from spmd_rl.packing.messages import Message, ProbeSampled, ProbeScored, SampleProbe, ScoreProbe
from spmd_rl.packing.packing import Packed
from spmd_rl.types import Rollout

SHARE = 0.01  # of the time, that probes may hold training up
AUTO = -1  # `every`: as often as costs SHARE


class Prober:
    """`at_start` once; `plan` a version before the batch that makes it is sent, then `sample` at it and `compare`."""

    def __init__(
        self,
        *,
        engines: Sequence[int],
        trainers: Sequence[int],
        send: Callable[[int, Message], None],
        answers: Answers,
        every: int,  # versions; 0: never; AUTO
        limits: Limits,
        recomputes: bool,  # keys and values of running sequences, under new weights
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines, self._trainers, self._clock = tuple(engines), tuple(trainers), clock
        self._send, self._answers = send, answers
        self._every, self._limits, self._recomputes = every, limits, recomputes
        self._number = 0
        self._turn = 0
        self._beside: list[Rollout] = []  # a short and a long sequence
        self._due: dict[int, tuple[int, int]] = {}  # version: number and engine, asked
        self._due_at: float | None = clock()  # by AUTO; None: not known yet
        self.sampled_tokens = 0  # by engines for probes
        self.in_flight = 0  # engines that sample

    def sampled(self, answer: ProbeSampled) -> None:
        """An engine has sampled what it was asked for."""
        self.sampled_tokens += answer.num_tokens
        self.in_flight -= 1

    async def at_start(self, version: int) -> dict[str, float]:
        """Every engine, in full, before anything is trained.  Waits for engines and trainers; the worst as metrics."""
        start = self._clock()
        asked = [(self._ask(engine, None), engine) for engine in self._engines]
        compared: list[dict[str, float]] = []
        for number, engine in asked:
            sampled = await self._sampled(number, engine)
            self._beside = ends_of(sampled.packed)
            self._score(number, sampled.packed)
            values, _ = await self._compare(number, sampled, version)
            compared.append(values)
        return together(compared) | {"probe/engines": len(asked), "probe/cost_s": self._clock() - start}

    def plan(self, version: int) -> None:
        """Before the batch that makes it is sent: if it is due, an engine begins a sequence before it swaps."""
        if self._is_due(version):
            engine = self._engines[self._turn % len(self._engines)]
            self._turn += 1
            self._due[version] = self._ask(engine, version), engine
            self._due_at = None

    def is_planned(self, version: int) -> bool:
        return version in self._due

    async def sample(self, version: int) -> tuple[int, Sampled]:
        """What an engine sampled at a planned version, which the trainers now score next.  Waits for the engine."""
        number, engine = self._due.pop(version)
        sampled = await self._sampled(number, engine)
        self._score(number, behind(self._beside, sampled.packed))
        return number, sampled

    async def compare(self, number: int, sampled: Sampled, version: int, *, held_s: float) -> dict[str, float]:
        """Waits for the trainers' scores; metrics.  `held_s`: that they waited for the engine."""
        values, seconds = await self._compare(number, sampled, version)
        cost_s = held_s + seconds
        self._due_at = self._clock() + cost_s / SHARE
        return values | {"probe/engines": 1, "probe/cost_s": cost_s}

    async def ended(self) -> None:
        """Waits for what is sampled at a version that nothing is trained at."""
        for number, engine in self._due.values():
            await self._sampled(number, engine)
        self._due.clear()

    def _is_due(self, version: int) -> bool:
        if self._every == AUTO:
            return self._due_at is not None and self._clock() >= self._due_at
        return self._every > 0 and version % self._every == 0

    def _ask(self, engine: int, version: int | None) -> int:
        self._number += 1
        self.in_flight += 1
        self._send(engine, SampleProbe(number=self._number, version=version))
        return self._number

    async def _sampled(self, number: int, engine: int) -> Sampled:
        (answer,) = await self._answers.all(ProbeSampled, number, (engine,))
        return Sampled(rank=engine, packed=answer.sequences, scores=answer.scores, choices=answer.choices)

    def _score(self, number: int, sequences: Packed) -> None:
        for rank in self._trainers:
            self._send(rank, ScoreProbe(number=number, sequences=sequences))

    async def _compare(self, number: int, sampled: Sampled, version: int) -> tuple[dict[str, float], float]:
        """Metrics, and the seconds that the trainers took."""
        answers = await self._answers.all(ProbeScored, number, self._trainers)
        num = len(sampled.packed.token_ids)  # the last: before them is what stood beside
        own = [
            Scored(packed=one.packed, alone=one.alone, plain=one.plain, choices=one.choices).last(num)
            for one in answers
        ]
        values = compare(sampled, own, version=version, limits=self._limits, recomputes=self._recomputes)
        assert_agreed(values, rank=sampled.rank, version=version, limits=self._limits)
        return values, max(answer.seconds for answer in answers)
