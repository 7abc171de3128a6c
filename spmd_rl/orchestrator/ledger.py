"""Where every rollout and every sampled token went, in two equations.

    rollouts:  admitted  = trained + filtered + dropped + failed + skipped + left over + waiting + in flight
    tokens:    generated = trained + filtered + dropped + failed + skipped + left over + wasted  + waiting + in flight

Rollouts `in flight` are admitted and not yet settled, `waiting` are settled and not yet trained: both are counted by
others, which is what makes the first equation a check.  Tokens of an ended episode are `waiting` until it is settled
and trained or given up; `generated` is what the engines themselves report for ended attempts.  Tokens in flight are
the rest: of episodes that had not ended when the engines reported.  A run that ends well has none.

Given: counts.  Promises: `assert_closed` raises with all numbers when an equation does not hold.
Knows nothing of rollouts, groups or engines.
"""

from __future__ import annotations

OUTCOMES = ("trained", "filtered", "dropped", "failed", "skipped", "left_over")


class Ledger:
    """Evaluation rollouts never enter it."""

    def __init__(self) -> None:
        self.admitted = 0
        self.rollouts = dict.fromkeys(OUTCOMES, 0)
        self.generated_tokens = 0  # reported by engines, of ended attempts
        self.wasted_tokens = 0  # retries, restarts, aborts
        self.waiting_tokens = 0  # of ended episodes that have met no end yet
        self.tokens = dict.fromkeys(OUTCOMES, 0)

    def admit(self, rollouts: int) -> None:
        self.admitted += rollouts

    def generate(self, tokens: int) -> None:
        """An engine reports the sampled tokens of an attempt that ended, whatever became of it."""
        self.generated_tokens += tokens

    def end(self, tokens: int, wasted_tokens: int) -> None:
        """An episode ended with `tokens` of its own and `wasted_tokens` of attempts that were thrown away."""
        self.waiting_tokens += tokens
        self.wasted_tokens += wasted_tokens

    def waste(self, tokens: int) -> None:
        """Tokens of ended episodes will not be used: their group starts again."""
        self.waiting_tokens -= tokens
        self.wasted_tokens += tokens

    def settle(self, outcome: str, rollouts: int, tokens: int) -> None:
        """Rollouts that had ended met their end: one of OUTCOMES."""
        self.rollouts[outcome] += rollouts
        self.tokens[outcome] += tokens
        self.waiting_tokens -= tokens

    def assert_closed(self, *, in_flight: int, waiting: int) -> None:
        """The rollouts add up, given what the gate holds."""
        settled = sum(self.rollouts.values())
        if self.admitted != settled + waiting + in_flight or min(in_flight, waiting) < 0:
            raise RuntimeError(
                f"rollout ledger: admitted {self.admitted} != {settled + waiting + in_flight} = "
                f"{_sum(self.rollouts)} + waiting {waiting} + in flight {in_flight}"
            )

    @property
    def accounted_tokens(self) -> int:
        """The right side of the second equation."""
        return sum(self.tokens.values()) + self.wasted_tokens + self.waiting_tokens

    def assert_tokens_closed(self, reported: int = 0) -> None:
        """The tokens add up, with what engines `reported` since the restore; exact once every attempt has ended."""
        if (generated := self.generated_tokens + reported) != self.accounted_tokens:
            raise RuntimeError(
                f"token ledger: generated {generated} != {self.accounted_tokens} "
                f"= {_sum(self.tokens)} + wasted {self.wasted_tokens} + waiting {self.waiting_tokens}"
            )

    def assert_generated(self, accounted: int, reported: int) -> None:
        """In between: what was `accounted` for before the engines `reported` their counts is among those counts."""
        if accounted > self.generated_tokens + reported:
            raise RuntimeError(
                f"token ledger: {accounted} tokens are accounted for, engines generated only "
                f"{self.generated_tokens + reported}: {_sum(self.tokens)} + wasted {self.wasted_tokens} + waiting "
                f"{self.waiting_tokens}"
            )

    def close_tokens(self) -> None:
        """After a resume: what was generated and lost with the old process is not counted; this one starts closed."""
        self.generated_tokens = self.accounted_tokens

    def state(self) -> dict[str, object]:
        """JSON that `restore` takes."""
        return {
            "admitted": self.admitted,
            "rollouts": dict(self.rollouts),
            "generated_tokens": self.generated_tokens,
            "wasted_tokens": self.wasted_tokens,
            "waiting_tokens": self.waiting_tokens,
            "tokens": dict(self.tokens),
        }

    def summary(self, *, in_flight: int, waiting: int, reported: int) -> dict[str, object]:
        """Every entry of both equations, for a reader; what is accounted for since engines `reported` was generated."""
        generated = max(self.generated_tokens + reported, self.accounted_tokens)
        return self.state() | {
            "rollouts": {**self.rollouts, "waiting": waiting, "in_flight": in_flight},
            "generated_tokens": generated,
            "in_flight_tokens": generated - self.accounted_tokens,
        }

    def restore(self, state: dict[str, object]) -> None:
        for name in self.state():
            value = state[name]
            setattr(self, name, {**getattr(self, name), **value} if isinstance(value, dict) else value)


def _sum(parts: dict[str, int]) -> str:
    return " + ".join(f"{name.replace('_', ' ')} {count}" for name, count in parts.items())
