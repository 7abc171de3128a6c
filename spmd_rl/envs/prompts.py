"""The prompt of a row: a template and a system message, filled with its question and its other columns.

A question is a text, or a conversation as TRL and verl have it: [{"role": "user", "content": "…"}, …], whose turns are
kept and whose last message takes the place of the text.  {name} is filled where the row has such a column; all other
braces stay as they are, and so do arguments of LaTeX (\\boxed{answer}).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from spmd_rl.diagnostics.user_code import shown
from spmd_rl.files.row_files import Row
from spmd_rl.model.tokenizer import Messages
from spmd_rl.rewards.text import fill

UNSET: tuple[object, ...] = (None, "", [], {})  # what a key has that only other rows need
ROLES = ("system", "user", "assistant", "tool")
_REPR = re.compile(
    r"\s*(?:array\()?\[\s*\{\s*['\"](?:role|content|from|value)['\"]\s*:"
)  # messages that could not be read
_NAMED = re.compile(r"\\[A-Za-z]+(?:\[[^\[\]]*\])?(?:\{[^{}]*\})+|\{([^{}]+)\}")  # a command of LaTeX, or {name}


class Prompt:
    """`check` makes a row fit, when it is read; `messages` is what the model is asked."""

    def __init__(
        self,
        template: str = "{question}",
        *,
        system: str = "",
        needed: Sequence[str] = ("question",),  # names that the template must contain
        given: Sequence[str] = (),  # names that it may contain, which `messages` is given
        column: str,  # of the question
        hidden: Sequence[str] = (),  # columns of the answer
    ) -> None:
        fill(template, {}, needed=needed)
        named = [name for text in (template, system) for name in _NAMED.findall(text) if name]
        if told := [name for name in named if any(_overlap(name, str(column)) for column in ("answer", *hidden))]:
            raise ValueError(f"the prompt would tell the answer: {{{told[0]}}} is filled with that column")
        self.columns = [name for name in dict.fromkeys(named) if name not in (*needed, *given)]  # if the rows have them
        self._template, self._system, self._column = template, system, column

    def check(self, row: Row) -> Row:
        """The row with its question as a text or messages, and its other columns as texts."""
        question = _question(row["question"], self._column)
        if self._system and not isinstance(question, str) and question[0]["role"] == "system":
            raise ValueError(
                f"column {self._column!r} begins with a system message, and the environment has one of its own; "
                "leave one of them out"
            )
        others = {name: text_of(row[name], name, blank=True) for name in self.columns if name in row}
        return row | {"question": question} | others

    def messages(self, data: Mapping[str, Any], **values: str) -> Messages:
        """`values` are filled in beside what the row has."""
        question = data["question"]
        before, text = ([], question) if isinstance(question, str) else (question[:-1], question[-1]["content"])
        columns = {name: data[name] for name in self.columns if name in data}
        values = {"question": text, **values}
        system = [{"role": "system", "content": _filled(self._system, values, columns)}] if self._system else []
        user = {"role": "user", "content": _filled(self._template, values, columns)}
        return [*system, *before, user]


def _overlap(a: str, b: str) -> bool:
    """Whether two columns are the same, or one is in the other."""
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


def _filled(text: str, values: Mapping[str, object], columns: Mapping[str, object]) -> str:
    """The values wherever they are named, the columns outside of LaTeX's arguments."""
    return _NAMED.sub(lambda match: fill(match[0], {**columns, **values} if match[1] else values), text)


def text_of(value: object, column: str, *, blank: bool = False) -> str:
    """A text or a number as a text; ValueError for what is neither, not finite, or blank unless that is allowed."""
    if isinstance(value, str):
        if not value.strip() and not blank:
            raise ValueError(f"column {column!r} is empty, wanted is a text")
        if not value.isascii():
            _encodable(value, column)
        return value
    if (
        not isinstance(value, int | float | Decimal)
        or isinstance(value, bool)
        or (not isinstance(value, int) and not math.isfinite(value))
    ):
        raise ValueError(f"column {column!r} has {shown(value)}, wanted is a text or a number")
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


def json_in(value: object, starts: tuple[str, ...]) -> object:
    """What a string holds as JSON, where it begins with one of `starts`; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(starts):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _encodable(text: str, column: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"column {column!r}: {error}") from None


def _question(value: object, column: str) -> str | list[Row]:
    held = json_in(value, ("[",))
    if isinstance(held, list) and all(isinstance(m, Mapping) and "role" in m for m in held) and held:
        return _conversation(held, column)
    if not isinstance(value, str) or _REPR.match(value):
        found = "an empty list" if value == [] else shown(value)
        raise ValueError(f"column {column!r} has {found}, wanted is a text or a list of messages with role and content")
    return text_of(value, column)


def _conversation(messages: Sequence[Mapping[str, object]], column: str) -> list[Row]:
    made = []
    for number, message in enumerate(messages, 1):
        where, role = f"column {column!r}, message {number}", message["role"]
        if role not in ROLES or (role == "system" and number > 1):
            raise ValueError(f"{where}: role {role!r}; wanted are {', '.join(ROLES[1:])}, and first of all system")
        more = [key for key, value in message.items() if key not in ("role", "content") and value not in UNSET]
        if more:
            raise ValueError(f"{where}: {more[0]!r} is not supported; wanted are role and content")
        content = _joined(message.get("content"), where)
        if not content.strip():
            raise ValueError(f"{where}: its content is empty, wanted is a text")
        _encodable(content, column)
        made.append({"role": role, "content": content})
    if made[-1]["role"] != "user":
        raise ValueError(f"column {column!r}: the last message is of the {made[-1]['role']}, wanted is the user's")
    return made


def _joined(content: object, where: str) -> str:
    """The text of a message's content, which may be a list of parts."""
    if isinstance(content, list) and content:
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ValueError(f"{where}: its content has {shown(part)}, wanted are parts of text alone")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}: its content is {shown(content)}, wanted is a text")
    return content
