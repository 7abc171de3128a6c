"""The right answers of a row: one or several, each a text or a number, and a number where numbers are compared."""

from __future__ import annotations

from spmd_rl.diagnostics.user_code import shown
from spmd_rl.envs.prompts import json_in, text_of
from spmd_rl.rewards.text import after, number_of


def answers_of(value: object, mark: str) -> list[str]:
    """The answers proper, each of which is right: what follows the mark, where there is one."""
    return [_proper(str(answer), mark) for answer in (value if isinstance(value, list) else [value])]


def checked_answer(value: object, column: str, *, mark: str, judge: str) -> object:
    """The value as the data of a task; ValueError says what of it this judge cannot compare.

    A list in a string is several words, but is itself what `exact` compares.
    """
    value = json_in(value, ('["',)) if judge == "word" else value
    if isinstance(value, list):
        if not value:
            raise ValueError(f"column {column!r} is an empty list, wanted is an answer or several")
        return [_checked(one, column, mark, judge) for one in value]
    return _checked(value, column, mark, judge)


def _checked(value: object, column: str, mark: str, judge: str) -> str | int | float:
    text = text_of(value, column)
    proper = _proper(text, mark)
    if not proper:
        raise ValueError(f"column {column!r} has nothing after {mark!r}: {shown(value)}")
    if judge == "number":
        try:
            number_of(proper)
        except ValueError as error:
            raise ValueError(f"column {column!r}: {error}; wanted is one number") from None
    elif judge == "math" and not proper.strip("$\\()[]{} "):
        raise ValueError(f"column {column!r} has {shown(value)}, wanted is a mathematical expression")
    elif judge != "math" and isinstance(value, float):
        raise ValueError(f"column {column!r} has {shown(value)}, which is written in several ways; wanted is a text")
    return value if isinstance(value, str | int | float) else text


def _proper(text: str, mark: str) -> str:
    return after(text, mark) if mark else text.strip()
