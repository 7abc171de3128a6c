"""Whether two mathematical expressions are equal, by `math-verify` (extra `math`).

    self._workers = Workers(timeout_s=10.0)
    reward = await self._workers.call(math_equals, reply, answer)

To be called through `Workers` only: sympy may take for ever on a short expression.  math-verify's own time limits are
off, since they use alarms, which fail outside a main thread; the limit is that of the workers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

MARKS = ("$", "\\(", "\\[", "\\boxed")  # an answer with one of them says itself where its mathematics is
_THOUSANDS = re.compile(r"(?<=\d)\\[ ,!;](?=\d{3}(?!\d))")
_SCIENTIFIC = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)[eE]([+-]?\d+)\s*")


def math_equals(reply: str, answer: str | Sequence[str]) -> float:
    r"""1.0 if the last expression of the reply equals the answer, or one of several: "so $\frac{2}{4}$" is "0.5".

    The answer may be bare LaTeX (2\sqrt{3}, x^2 + 3, (1, 2)), stand in $…$, \(…\) or \boxed{…}, or be the end of a
    text.  Of several \boxed the last one counts, or all of them together.  Raises ValueError, with the answer, where
    that has no expression.
    """
    answers = [answer] if isinstance(answer, str) else answer
    return max(float(_equals(reply, _gold(one))) for one in answers)


def warm_up() -> None:
    """Import and use what a first call would otherwise spend its time on."""
    math_equals("$1$", "1")


def _equals(reply: str, gold: list[Any]) -> bool:
    math_verify = _math_verify()
    first, mark, last = _THOUSANDS.sub("", reply).rpartition("\\boxed")
    readings = [f"{first}{mark}{last}", *([mark + last] if "\\boxed" in first else [])]
    return any(
        math_verify.verify(gold, math_verify.parse(text, parsing_timeout=None), timeout_seconds=None)
        for text in readings
    )


@cache
def _gold(answer: str) -> list[Any]:
    text = _THOUSANDS.sub("", answer)
    if match := _SCIENTIFIC.fullmatch(text):
        text = f"{match[1]} \\times 10^{{{match[2]}}}"
    readings = [text, f"${text}$"] if any(mark in text for mark in MARKS) else [f"${text}$", text]
    parsed = (_math_verify().parse(reading, parsing_timeout=None) for reading in readings)
    if not (gold := next(filter(None, parsed), None)):
        raise ValueError(f"no mathematical expression in the answer {answer!r}")
    return gold


@cache
def _math_verify() -> ModuleType:
    import logging

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit
    return math_verify
