"""Rewards as pure functions of the reply and what is known about the task.

A judge gives a float, 1.0 for right and 0.0 for wrong.  Several parts become one reward by `weighted_sum`; None says
that a part does not apply to this task.  A NaN raises, and so may a judge: the caller drops that sample and counts
it, since a reward that nobody measured must not be averaged.  Knows nothing of models, tokens or rollouts.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction

import numpy as np

from spmd_rl.user_code import shown

_START = r"(?<![A-Za-z_\d^])(?<!\d\.)"  # no number begins within a word, another number or an exponent
_NUMBER = re.compile(
    rf"(?P<minus>(?<![\w)\]}}])-(?=[$€£.\d\\]))?(?:\\?[$€£]\s?)?(?:"
    rf"(?P<whole>{_START}\d+)[ ](?P<part>\d+)/(?P<of>\d+)(?![\d/])"  # 1 1/2
    rf"|(?P<over>(?<!/){_START}\d+)[ ]?/[ ]?(?P<under>\d+)(?![\d/]|\.\d)"  # 1/2
    r"|\\[dt]?frac\s*(?:\{(?P<top>\d+)\}|(?P<top1>\d))\s*(?:\{(?P<bottom>\d+)\}|(?P<bottom1>\d))"
    rf"|(?P<base>{_START}\d+)\s?(?:\^|\*\*)\s?\{{?(?P<up>\d+)\}}?(?!\w)"  # 2^5
    r"|(?P<power>(?<![\w)\]}])[\w)\]}]++\s?(?:\^|\*\*)\s?\{?-?\w++\}?)"
    rf"|{_START}(?P<digits>\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE](?P<exponent>[+-]?\d+)(?!\w)|\s?(?:×|\*|x|\\times|\\cdot)\s?10(?:\^|\*\*)\{?(?P<ten>-?\d+)\}?)?)",
    re.ASCII,
)
_THOUSANDS = re.compile(
    r"(?<=\d)(?:,|\{,\}|\\[,!;]|_|\N{NARROW NO-BREAK SPACE}|\N{NO-BREAK SPACE})(?=\d{3}(?!\d))", re.ASCII
)
_VULGAR = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
    "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip
_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{FULLWIDTH HYPHEN-MINUS}": "-", "\N{FRACTION SLASH}": "/"})
_LONGEST = 4000  # digits of a number that is read

Number = Decimal | Fraction


def numbers(text: str) -> list[Number]:
    """The numbers written in a text: "1,234 - 5 is 1229.0." gives 1234, 5, 1229.0.

    Also .5, 1e5, 2 × 10^3, 2^5, 1/2, 1 1/2, \\frac{1}{2} and digits of other scripts; currencies and percent signs are
    left out.  A minus is a sign where it does not stand behind a number or a word.  Powers of letters (x^2) and digits
    within words (H2O, m2) are no numbers.
    """
    text = _plain_digits(text)
    return [value for match in _NUMBER.finditer(text) if (value := _value(match)) is not None]


def number_of(answer: object) -> Number:
    """The number that an answer is: 18, "18", "$1,234", "18 apples".  ValueError where there is none, or several."""
    if isinstance(answer, bool) or not isinstance(answer, int | float | str):
        raise ValueError(f"the answer {answer!r} is not a number")
    found = numbers(answer if isinstance(answer, str) else f"{answer:f}" if isinstance(answer, float) else str(answer))
    if len(found) != 1 or (isinstance(answer, float) and not math.isfinite(answer)):
        raise ValueError(f"the answer {answer!r} is not a number")
    return found[0]


def last_number_equals(
    reply: str, answer: int | float | str, *, tolerance: float = 0.0, relative: float = 0.0
) -> float:
    """1.0 if the last number of the reply is the answer: models end with it, after whatever else they say.

    It may be off by `tolerance`, or by `relative` times the answer.  ValueError for an answer that is not a number.
    """
    right, found = Fraction(number_of(answer)), numbers(reply)
    most = max(Fraction(str(tolerance)), Fraction(str(relative)) * abs(right))
    return float(bool(found) and abs(Fraction(found[-1]) - right) <= most)


def _plain_digits(text: str) -> str:
    """ASCII digits and signs, without marks between thousands."""
    text = "".join(f" {_VULGAR[c]} " if c in _VULGAR else c for c in text.translate(_SIGNS))
    text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() and not c.isascii() else c for c in text)
    return _THOUSANDS.sub("", text)


def _value(match: re.Match[str]) -> Number | None:
    groups = match.groupdict()
    sign = -1 if groups["minus"] else 1
    if groups["power"] or len(match[0]) > _LONGEST:
        return None
    if groups["digits"]:
        exponent = int(groups["exponent"] or groups["ten"] or 0)
        if abs(exponent) > _LONGEST:
            return None
        return sign * Decimal(groups["digits"]).scaleb(exponent) if exponent else sign * Decimal(groups["digits"])
    if groups["base"]:
        base, up = int(groups["base"]), int(groups["up"])
        return sign * Decimal(base**up) if up * max(1, base.bit_length()) < 4 * _LONGEST else None
    whole = int(groups["whole"] or 0)
    top = int(groups["part"] or groups["over"] or groups["top"] or groups["top1"])
    bottom = int(groups["of"] or groups["under"] or groups["bottom"] or groups["bottom1"])
    return sign * (whole + Fraction(top, bottom)) if bottom else None


def fill(template: str, values: Mapping[str, object], *, needed: Sequence[str] = ()) -> str:
    """The template with {name} replaced for every name of `values`; all other braces stay as they are.

    ValueError where it lacks one of the names in `needed`.
    """
    if missing := [name for name in needed if f"{{{name}}}" not in template]:
        raise ValueError(f"the prompt {template[:80]!r} does not contain {{{missing[0]}}}")
    if not values:
        return template
    names = "|".join(map(re.escape, sorted(values, key=len, reverse=True)))
    return re.sub(rf"\{{({names})\}}", lambda match: str(values[match[1]]), template)


def thought_out(reply: str) -> str:
    """The reply after its thinking: what follows the last </think>."""
    return reply.rpartition("</think>")[2]


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
