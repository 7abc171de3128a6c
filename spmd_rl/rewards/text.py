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

from spmd_rl.diagnostics.user_code import shown

_START = r"(?<![A-Za-z\d^])(?<!\w_)(?<!_\{)(?<!\d\.)"  # none begins within a word, a number, an index or an exponent
_DECIMAL = r"\d++(?:\.\d++)?"
_NUMBER = re.compile(
    rf"(?P<minus>(?<![\w)\]}}])-(?=[$€£¥₹.\d\\]))?(?:\\?[$€£¥₹]\s?(?P<inner>-(?=[.\d]))?)?(?:"
    rf"(?P<whole>{_START}\d++)(?:[ ]{{1,2}}(?P<part>\d+)/(?P<of>\d+)(?![\d/])|"  # 1 1/2, 1\frac{{1}}{{2}}
    rf"\s?\\[dt]?frac\s*(?:\{{(?P<top2>\d+)\}}|(?P<top3>\d))\s*(?:\{{(?P<bottom2>\d+)\}}|(?P<bottom3>\d)))"
    rf"|(?P<over>(?<!/){_START}\d+)[ ]?/[ ]?(?P<under>\d+)(?![\d/]|\.\d)"  # 1/2
    rf"|\\[dt]?frac\s*(?:\{{\s?(?P<top>-?{_DECIMAL})\s?\}}|(?P<top1>\d))"
    rf"\s*(?:\{{\s?(?P<bottom>-?{_DECIMAL})\s?\}}|(?P<bottom1>\d))"
    rf"|(?P<unread>(?:{_START}{_DECIMAL}\s?\*?\s?)?(?:\\pi(?![a-z])|π|(?<![A-Za-z])pi(?!\w)|√\s?\(?\d++\)?|"
    r"(?<![A-Za-z])\\?sqrt\s*+(?:\[[^]]{0,9}\])?(?:\{[^{}]{0,99}\}|\([^()]{0,99}\)|\d++)|"
    r"\\[dt]?frac\s*+\{[^{}]{0,99}\}\s*+\{[^{}]{0,99}\})|[)\]]\s?(?:\^|\*\*)\s?\{?-?\w++\}?|"
    rf"{_START}\d++\.\d++\.\d[\d.]*+)"  # 1.2.3
    rf"|(?P<base>{_START}\d+)\s?(?:\^|\*\*)\s?\{{?(?P<up>-?\d+)\}}?(?!\w)"  # 2^5
    r"|(?P<power>(?<![\w)\]}])[\w)\]}]++\s?(?:\^|\*\*)\s?\{?-?\w++\}?)"
    rf"|{_START}(?!0x[\da-fA-F])(?P<digits>\d+(?:\.\d+)?|\.\d+)"
    r"(?:[eE](?P<exponent>[+-]?\d+)(?!\w)|\s?(?:×|\*|x|\\times|\\cdot)\s?10(?:\^|\*\*)\{?(?P<ten>-?\d+)\}?|"
    r"\s?(?P<times>(?i:hundred|thousand|million|billion|trillion))(?![A-Za-z]))?)",
    re.ASCII,
)
_THOUSANDS = re.compile(
    r"(?<![\d.,])[1-9]\d{0,2}(?:(?:,|\{,\}|\\[,!;]|_|['\N{RIGHT SINGLE QUOTATION MARK}"
    r"\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}\N{NO-BREAK SPACE}])\d{3})+(?!\d)",
    re.ASCII,
)
_TIMES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}  # zeros
_VULGAR = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
    "⅙": "1/6", "⅚": "5/6", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip
_SIGNS = str.maketrans({
    "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{FULLWIDTH HYPHEN-MINUS}": "-", "\N{FRACTION SLASH}": "/",
    "\N{FULLWIDTH COMMA}": ",", "\N{FULLWIDTH FULL STOP}": ".",
})  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_LONGEST = 4000  # digits of a number that is read
_BESIDE = re.compile(  # what makes of a number beside it another one
    r"[\d√π∞±+*^]|\\(?:sqrt|pi|d?frac|infty|cdot|times|log|ln|sin|cos|tan|pm)(?![a-z])|"
    r"(?<![A-Za-z\\])(?:log|ln|sin|cos|tan|sqrt|pi|[xyz])(?![A-Za-z])"
)

Number = Decimal | Fraction


def numbers(text: str) -> list[Number]:
    r"""The numbers written in a text: "1,234 - 5 is 1229.0." gives 1234, 5, 1229.0.

    Also .5, 1e5, 2 × 10^3, 3 million, 2^5, 1/2, 1 1/2, \frac{1}{2} and digits of other scripts; currencies and percent
    signs are left out.  A minus is a sign where it does not stand behind a number or a word.  Powers of letters (x^2),
    digits within words (H2O, m2) and what has a root, π or letters in a fraction are no numbers.
    """
    return [value for _, value in _found(_plain(text)) if value is not None]


def number_of(answer: object) -> Number:
    """The number that an answer is: 18, "18", "$1,234", "x = 18", "18 apples".

    ValueError where there is none, several, or a part of an expression (2√3, 3x, 10!).
    """
    if isinstance(answer, float | int) and not isinstance(answer, bool) and math.isfinite(answer):
        return Decimal(repr(float(answer)) if isinstance(answer, float) else int(answer))
    if isinstance(answer, str):
        text = re.sub(r"^\s*\$?\s*[A-Za-z]\s*=|\^\s*\{?\s*\\circ\s*\}?|^\s*\$?\s*\+(?=[\d.])", " ", _plain(answer))
        found = _found(text)
        if len(found) == 1 and (value := found[0][1]) is not None:
            before, after_it = text[: found[0][0].start()], text[found[0][0].end() :]
            rest = _NUMBER.sub(lambda match: " " if match["power"] else match[0], f"{before} | {after_it}")
            rest = re.sub(r"(?<=[A-Za-z])[23](?!\w)", "", rest)  # m^2 and m2 are units
            if not (_BESIDE.search(rest) or re.match(r"!|[abiknt](?![A-Za-z])", after_it)):
                return value
    raise ValueError(f"the answer {answer!r} is not a number")


def last_number_equals(
    reply: str, answer: int | float | str, *, tolerance: float = 0.0, relative: float = 0.0
) -> float:
    """1.0 if the last number of the reply is the answer: models end with it, after whatever else they say.

    It may be off by `tolerance`, or by `relative` times the answer.  ValueError for an answer that is not a number.
    """
    right, found = Fraction(number_of(answer)), _found(_plain(reply))
    if not found or (last := found[-1][1]) is None:
        return 0.0
    most = max(Fraction(str(tolerance)), Fraction(str(relative)) * abs(right))
    return float(abs(Fraction(last) - right) <= most)


def _plain(text: str) -> str:
    """ASCII digits and signs, without marks between thousands; powers with ^."""
    text = "".join(f" {_VULGAR[c]} " if c in _VULGAR else c for c in text.translate(_SIGNS))
    text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() and not c.isascii() else c for c in text)
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda match: f"^{{{match[0].translate(_RAISED)}}}", text)
    text = re.sub(r"(?<==)(\s?)-\s(?=[\d.$])", r"\1-", text)
    return _THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[0]), text)


def _found(text: str) -> list[tuple[re.Match[str], Number | None]]:
    """Where numbers stand in a plain text, and which; None for what stands there as one but is none, such as 2√3."""
    return [(match, _value(match)) for match in _NUMBER.finditer(text) if not match["power"]]


def _value(match: re.Match[str]) -> Number | None:
    groups = match.groupdict()
    sign = -1 if bool(groups["minus"]) != bool(groups["inner"]) else 1
    if groups["unread"] or len(match[0]) > _LONGEST:
        return None
    if groups["digits"]:
        exponent = int(groups["exponent"] or groups["ten"] or _TIMES.get((groups["times"] or "").lower(), 0))
        if abs(exponent) > _LONGEST:
            return None
        digits = ("-" if sign < 0 else "") + groups["digits"]
        return Decimal(f"{digits}e{exponent}" if exponent else digits)  # exact: arithmetic would round to 28 digits
    if groups["base"]:
        base, up = int(groups["base"]), int(groups["up"])
        if abs(up) * max(1, base.bit_length()) >= 4 * _LONGEST or (up < 0 and not base):
            return None
        return sign * Fraction(base) ** up if up < 0 else Decimal(sign * base**up)
    whole = int(groups["whole"] or 0)
    top = next(groups[name] for name in ("part", "over", "top", "top1", "top2", "top3") if groups[name])
    bottom = next(groups[name] for name in ("of", "under", "bottom", "bottom1", "bottom2", "bottom3") if groups[name])
    return sign * (whole + Fraction(top) / Fraction(bottom)) if Fraction(bottom) else None


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
    """The reply after its thinking: what follows the last </think>, up to a <think> that does not end."""
    return re.split("<think(?:ing)?>", re.split("</think(?:ing)?>", reply)[-1])[0]


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
