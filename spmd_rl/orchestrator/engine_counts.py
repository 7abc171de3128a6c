"""Tokens as the engines count them, against the ledger: no token is accounted for that no engine has sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from spmd_rl.metrics.engine_rates import EngineFigures
from spmd_rl.orchestrator.answers import Answers
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.packing.messages import AskCounters, Counters, Message


class EngineCounts:
    """`ask` for the counters of all engines; `audit` the ledger by them."""

    def __init__(
        self,
        *,
        engines: Sequence[int],
        send: Callable[[int, Message], None],
        answers: Answers,
        ledger: Ledger,
        sampled_beside: Callable[[], int],  # tokens of evaluations and probes, which the ledger does not count
        ended_by: Callable[[int], int],  # rollouts that ended so far, by engine
        figures: EngineFigures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines, self._send, self._answers, self._ledger = engines, send, answers, ledger
        self._sampled_beside, self._ended_by, self._figures, self._clock = sampled_beside, ended_by, figures, clock
        self._number = 0
        self._tokens, self._counted_at = 0, clock()  # of all engines, by their last count

    @property
    def reported(self) -> int:
        """Tokens that engines sampled for training, by their last count."""
        return self._tokens - self._sampled_beside()

    @property
    def age_s(self) -> float:
        """Seconds since the last count."""
        return self._clock() - self._counted_at

    async def ask(self) -> int:
        """Ask and wait for all engines; `reported` as of now."""
        self._number += 1
        for engine in self._engines:
            self._send(engine, AskCounters(number=self._number))
        answers = await self._answers.all(Counters, self._number, self._engines)
        counts = {engine: answer.counts for engine, answer in zip(self._engines, answers, strict=True)}
        self._figures.count({engine: {**own, "rollouts": self._ended_by(engine)} for engine, own in counts.items()})
        self._tokens, self._counted_at = sum(int(own["tokens"]) for own in counts.values()), self._clock()
        return self.reported

    async def audit(self) -> None:
        """Assert that no token is accounted for that no engine has counted.  Waits for the engines."""
        accounted, beside = self._ledger.accounted_tokens, self._sampled_beside()
        await self.ask()
        self._ledger.assert_generated(accounted + beside, self._tokens)
