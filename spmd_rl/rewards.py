"""Rewards as pure functions of the reply and what is known about the task.

A judge gives a float, 1.0 for right and 0.0 for wrong.  Several parts become one reward by `weighted_sum`; None says
that a part does not apply to this task.  A NaN raises, and so may a judge: the caller drops that sample and counts
it, since a reward that nobody measured must not be averaged.  Knows nothing of models, tokens or rollouts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal

import numpy as np

from spmd_rl.user_code import shown

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:\.\d+)?", re.ASCII)


def numbers(text: str) -> list[Decimal]:
    """The numbers written in a text: "1,234 - 5 is 1229.0." gives 1234, 5, 1229.0."""
    return [Decimal(n) for n in _NUMBER.findall(_THOUSANDS.sub("", text.replace("\N{MINUS SIGN}", "-")))]


def last_number_equals(
    reply: str, answer: int | float | str, *, tolerance: float = 0.0, relative: float = 0.0
) -> float:
    """1.0 if the last number of the reply is the answer: models end with it, after whatever else they say.

    It may be off by `tolerance`, or by `relative` times the answer.
    """
    found, right = numbers(reply), Decimal(str(answer).replace(",", ""))
    most = max(Decimal(str(tolerance)), Decimal(str(relative)) * abs(right))
    return float(bool(found) and abs(found[-1] - right) <= most)


def matches(reply: str, pattern: str) -> float:
    """1.0 if the whole reply has this form, blanks around it aside; a dot stands for line ends too."""
    return float(re.fullmatch(pattern, reply.strip(), re.DOTALL) is not None)


def after(text: str, mark: str) -> str:
    """What follows the last mark: the "42" of "so it is 42\\n#### 42" after "####"; all of a text without it."""
    return text.rpartition(mark)[2].strip()


def between(reply: str, start: str, end: str) -> str | None:
    """What stands between the last pair of marks, such as <answer> and </answer>; None where there is no pair."""
    head, found_end, _ = reply.rpartition(end)
    _, found_start, inner = head.rpartition(start)
    return inner.strip() if found_end and found_start else None


def exact(reply: str, answer: str) -> float:
    """1.0 if the reply is the answer, blanks around it aside."""
    return float(reply.strip() == answer.strip())


def contains_word(reply: str, word: str) -> float:
    """1.0 if the word stands in the reply, with no letter or digit directly beside it."""
    return float(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", reply) is not None)


def share_of(reply: str, wanted: str, *, length: int) -> float:
    """How much of a reply of `length` characters consists of the wanted ones: "aXe", "aeiou", 4 gives 0.5."""
    return sum(character in wanted for character in reply) / length


def weighted_sum(parts: Mapping[str, float | None], weights: Mapping[str, float] | None = None) -> float:
    """The reward of named parts; weights default to 1, and a part that is None adds nothing."""
    apply = applicable(parts)
    if not apply:
        raise ValueError(f"no part of the reward applies: {shown(parts)}")
    if weights is not None and (missing := [name for name in apply if name not in weights]):
        raise ValueError(f"reward part {missing[0]!r} has no weight; weights: {dict(weights)}")
    factors = {name: 1.0 if weights is None else number(weights[name], f"weight of {name!r}") for name in apply}
    return number(sum(value * factors[name] for name, value in apply.items()), "sum of the reward's parts")


def applicable(parts: Mapping[str, float | None]) -> dict[str, float]:
    """The parts that apply, as floats: what is logged by name."""
    if names := [name for name in parts if not isinstance(name, str)]:
        raise TypeError(f"the name of a reward part is a string, not {shown(names[0])}")
    return {name: number(value, f"reward part {name!r}") for name, value in parts.items() if value is not None}


def number(value: object, what: str = "reward") -> float:
    """A finite number of Python or numpy as a float; True is 1.  TypeError or ValueError for anything else."""
    if not isinstance(value, (bool, int, float, np.bool_, np.integer, np.floating)):
        raise TypeError(f"{what} = {shown(value)}: neither a number nor parts by name")
    try:
        converted = float(value)
    except OverflowError:  # an int of more than 308 digits
        converted = math.inf
    if math.isnan(converted):
        raise ValueError(f"{what} is NaN")
    if math.isinf(converted):
        raise ValueError(f"{what} = {shown(value)}: not a finite number")
    return converted
