"""Whether two mathematical expressions are equal, by `math-verify` (extra `math`).

    self._workers = Workers(timeout_s=10.0)
    reward = await self._workers.call(math_equals, reply, answer)

To be called through `Workers` only: sympy may take for ever on a short expression.  math-verify's own time limits are
off, since they use alarms, which fail outside a main thread; the limit is that of the workers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

MARKS = ("$", "\\(", "\\[", "\\boxed")  # an answer with one of them says itself where its mathematics is
TINY = 1e-3  # smaller numbers are compared relative to their size: math-verify rounds to six decimals
_THOUSANDS = re.compile(r"(?<=\d)\\[ ,!;](?=\d{3}(?!\d))")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.] )(?<![\d.])[1-9]\d{0,2}(?: \d{3})+(?![\d.]| \d)")
_MIXED = re.compile(r"(?<![\d./])(\d{1,9}) +(\d{1,9})/(\d{1,9})(?![\d/.])")
_SCIENTIFIC = re.compile(r"(?<![\w.\\}])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)")
_REPEATING = re.compile(r"(?<![\w.])(\d{0,9})\.(\d{0,9})\\(?:overline|bar)\s*\{(\d{1,9})\}")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_FUNCTIONS = {
    *(
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "log",
        "ln",
        "exp",
    ),
    *("sqrt", "pi", "inf", "infinity", "infty"),
}
_SHORT_WORDS = {"yes", "no", "odd"}


def math_equals(reply: str, answer: str | Sequence[str]) -> float:
    r"""1.0 if the last expression of the reply equals the answer, or one of several: "so $\frac{2}{4}$" is "0.5".

    The answer may be bare LaTeX (2\sqrt{3}, x^2 + 3, (1, 2)), stand in $…$, \(…\) or \boxed{…}, or be the end of a
    text; one in words (even, AB) is compared as such.  Of several \boxed the last one counts, or all of them together.
    Raises ValueError, with the answer, where that has no expression, or words beside numbers that are no units.
    """
    answers = [answer] if isinstance(answer, str) else answer
    return max(float(_equals(reply, one)) for one in answers)


def warm_up() -> None:
    """Import and use what a first call would otherwise spend its time on."""
    math_equals("$1$", "1")


def _equals(reply: str, answer: str) -> bool:
    if words := _words(answer):
        return _says(reply, words)
    if re.fullmatch("[A-Z]", letter := _plain_words(answer)) and _says(reply, letter.casefold()):
        return True
    gold, math_verify = _gold(answer), _math_verify()
    apart = re.sub(r"(?<=\d) +(?=\d)", ", ", _cleaned(reply))  # math-verify adds up numbers with a blank between them
    first, mark, last = apart.rpartition("\\boxed")
    readings = [f"{first}{mark}{last}", *([mark + last] if "\\boxed" in first else [])]
    return any(
        math_verify.verify(gold, parsed, timeout_seconds=None) and _is_close(gold, parsed)
        for parsed in (math_verify.parse(text, parsing_timeout=None) for text in readings)
    )


@lru_cache(maxsize=1024)
def _gold(answer: str) -> list[Any]:  # of sympy, which has no types
    text = _cleaned(answer)
    if re.search(r"(?<![\\&])\d +\d", text) and "&" not in text:
        raise ValueError(f"several numbers in the answer {answer!r}")
    readings = [text, f"${text}$"] if any(mark in text for mark in MARKS) else [f"${text}$", text]
    parsed = (_math_verify().parse(reading, parsing_timeout=None) for reading in readings)
    gold: list[Any] | None = next(filter(None, parsed), None)
    if not gold:
        raise ValueError(f"no mathematical expression in the answer {answer!r}")
    words = re.findall(r"(?<![A-Za-z\\{])[a-z]{4,}(?![A-Za-z}])", text)
    symbols = {str(symbol).lower() for symbol in getattr(gold[0], "free_symbols", ())}
    if any(set(word) - {"e", "i"} <= symbols for word in words if word not in _FUNCTIONS):
        raise ValueError(f"words in the answer {answer!r} are no mathematics")
    return gold


def _cleaned(text: str) -> str:
    """The text with numbers and marks as math-verify reads them."""
    text = _THOUSANDS.sub("", re.sub(r"</?answer>", " ", text))
    text = text.replace("\\fbox", "\\boxed").replace("\\varnothing", "\\emptyset").replace("°", "^\\circ")
    text = _SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ""), text)
    text = _MIXED.sub(lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}", text)
    text = _REPEATING.sub(_fraction, text)
    return _SCIENTIFIC.sub(lambda m: f"{m[1]} \\times 10^{{{int(m[2])}}}", text) if _SCIENTIFIC.search(text) else text


def _fraction(match: re.Match[str]) -> str:
    """0.1(6) as 15/90."""
    head, once, again = match.groups()
    bottom = (10 ** len(again) - 1) * 10 ** len(once)
    return f"\\frac{{{int(head + once + again) - int(head + once or '0')}}}{{{bottom}}}"


def _is_close(gold: list[Any], parsed: list[Any]) -> bool:
    """False for two different numbers that are so small that rounding to six decimals made them equal."""
    numbers = [[float(one) for one in several if getattr(one, "is_Number", False)] for several in (gold, parsed)]
    pairs = [(a, b) for a in numbers[0] for b in numbers[1] if max(abs(a), abs(b)) < TINY]
    return all(abs(a - b) <= 1e-6 * max(abs(a), abs(b)) for a, b in pairs)


def _words(answer: str) -> str:
    """The answer in small letters where it is in words, or several capitals such as AB; "" where it is mathematics."""
    text = _plain_words(answer)
    words = text.split()
    if not words or not all(re.fullmatch(r"[^\W\d_]+(?:['-][^\W\d_]+)*[.,]?", word) for word in words):
        return ""
    if any(word.strip(".,").lower() in _FUNCTIONS for word in words):
        return ""
    longest = max((word.strip(".,") for word in words), key=len)
    short = not words[1:] and longest == longest.lower() and len(longest) < 4 and longest not in _SHORT_WORDS  # xy, abc
    return "" if len(longest) < 2 or (short and "\\text" not in answer) else _folded(text)


def _says(reply: str, words: str) -> bool:
    r"""Whether the last \boxed is these words, or where there is none the reply's last line ends with them."""
    last = re.findall(r"\\f?box(?:ed)?\s*\{((?:[^{}]|\{[^{}]*\})*)\}", reply)
    if last:
        return _folded(_plain_words(last[-1])) == words
    lines = [line for line in re.sub(r"</?answer>", " ", reply).split("\n") if line.strip()]
    line = _folded(_plain_words(lines[-1])) if lines else ""
    return line == words or re.search(rf"(?:\bis|\bare|:|=)\s*(?:the\s+)?{re.escape(words)}$", line) is not None


def _plain_words(text: str) -> str:
    text = re.sub(r"\\f?box(?:ed)?\s*\{(.*)\}", r"\1", text)
    return re.sub(r"[*`$]|\\[()\[\]]", "", re.sub(r"\\[ ,;]|~", " ", _TEXT.sub(r"\1", text))).strip()


def _folded(text: str) -> str:
    return " ".join(text.split()).strip(" .,;!?()\"'").casefold()


@cache
def _math_verify() -> Any:  # a module without types
    import logging

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit
    return math_verify
