"""Whether two mathematical expressions are equal, by `math-verify` (extra `math`).

    self._workers = Workers(timeout_s=10.0)
    reward = await self._workers.call(math_equals, reply, answer)

To be called through `Workers` only: sympy may take for ever on a short expression.  math-verify's own time limits are
off, since they use alarms, which fail outside a main thread; the limit is that of the workers.
"""

from __future__ import annotations


def math_equals(reply: str, answer: str) -> float:
    """1.0 if the last expression of the reply equals the answer: "so $\\\\frac{2}{4}$" is "0.5"."""
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that there is no time limit
    gold = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    if not gold:
        raise ValueError(f"no mathematical expression in the answer {answer!r}")
    return float(verify(gold, parse(reply, parsing_timeout=None), timeout_seconds=None))
