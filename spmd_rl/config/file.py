"""Settings to and from TOML.

`load` reads a file and `section.key=value` overrides into frozen dataclasses; what is unknown, or breaks a rule, is a
ValueError of one line.  The value of an override is TOML, but for a setting that is text it is taken as written.
"""

from __future__ import annotations

import ast
import dataclasses
import datetime
import difflib
import inspect
import itertools
import json
import math
import re
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from spmd_rl.config import rules
from spmd_rl.config.settings import Config, Env

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DOC = re.compile(r"(.*?)\n\s*\[([^\]]*)\] (.*)", re.DOTALL)  # of a setting


@dataclasses.dataclass(frozen=True)
class _Written:
    """The value of an override."""

    text: str
    value: object  # as TOML; the text where it is none


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and overrides such as "staleness.max_staleness=0"; ValueError names what is wrong."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for override in overrides:
        _override(tree, override)
    return from_tree(tree)


def from_tree(tree: Mapping[str, object]) -> Config:
    """Nested tables, as TOML gives them, to a checked Config."""
    config = _build(Config, tree, "")
    rules.check(config)
    return config


def dump(config: Config) -> str:
    """The resolved config as TOML."""
    lines: list[str] = []
    for section in fields(config):
        value = getattr(config, section.name)
        tables = {f"env.{name}": env for name, env in value.items()} if section.name == "env" else {section.name: value}
        for name, table in tables.items():
            lines += [f"[{name}]"]
            lines += [f"{f.name} = {_toml(getattr(table, f.name))}" for f in fields(table)]
            lines += [""]
    return "\n".join(lines)


def describe() -> str:
    """Every setting with its default, its unit, its meaning and what it moves, a line each."""
    lines = []
    for section, cls in sections().items():
        lines.append(f"[{section}]  {inspect.getdoc(cls)}")
        docs = field_docs(cls)
        for f in fields(cls):
            doc = docs[f.name]
            unit = "" if doc.unit == "-" else f" [{doc.unit}]"
            lines.append(f"  {f.name} = {default(f)}{unit}  # {doc.meaning}; moves: {doc.moves}")
    return "\n".join(lines)


class Doc(NamedTuple):
    """What is said of a setting."""

    meaning: str
    unit: str  # "-" where there is none
    moves: str  # what moves when it is raised, or chosen


def field_docs(cls: type) -> dict[str, Doc]:
    """The string under each field of a settings class: its meaning, then "[unit] what it moves" on a new line."""
    (made,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(made, ast.ClassDef)
    docs = {}
    for setting, after in itertools.pairwise(made.body):
        match setting, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                if (parts := DOC.fullmatch(text)) is None:
                    raise ValueError(f"{cls.__name__}.{name}: its text ends with no line of unit and effect")
                docs[name] = Doc(*(" ".join(part.split()) for part in parts.groups()))
    return docs


def sections() -> dict[str, type]:
    """The class of each section, by its name in the file."""
    hints = typing.get_type_hints(Config)
    return {("env.NAME" if name == "env" else name): (Env if name == "env" else cls) for name, cls in hints.items()}


def field_names(cls: type) -> list[str]:
    """The settings of a section."""
    return [f.name for f in fields(cls)]


def default(f: dataclasses.Field[Any]) -> str:
    """As TOML, or "(needed)"."""
    if f.default is not dataclasses.MISSING:
        return _toml(f.default)
    return "{}" if f.default_factory is not dataclasses.MISSING else "(needed)"


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON has no inf and no nan
    return json.dumps(value, ensure_ascii=False)


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ValueError(f"{override!r}: a setting on the command line is written section.key=value")
    try:
        read = tomllib.loads(f"v = {text}")
    except tomllib.TOMLDecodeError:
        read = {}
    for part in parts[:-1]:
        if isinstance(tree.get(part), _Written):
            tree[part] = tree[part].value
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{override!r}: {part!r} is a value, not a section")
    tree[parts[-1]] = _Written(text, read["v"] if [*read] == ["v"] else text)  # a bare word is a string


T = TypeVar("T", bound="DataclassInstance")


def _build(cls: type[T], tree: object, where: str) -> T:
    tree = tree.value if isinstance(tree, _Written) else tree
    if not isinstance(tree, Mapping):
        raise ValueError(f"config {where or 'file'}: expected a table, got {tree!r}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        if key not in hints:
            elsewhere = [f"{name}.{key}" for name, other in sections().items() if where and key in field_names(other)]
            close = elsewhere or difflib.get_close_matches(key, hints, n=1)
            meant = " or ".join(map(repr, close))
            hint = f"; did you mean {meant}?" if close else f"; known: {', '.join(hints)}"
            raise ValueError(f"config: unknown {'setting' if where else 'section'} {where + key!r}{hint}")
        values[key] = _value(hints[key], value, f"{where}{key}")
    missing = [f.name for f in fields(cls) if default(f) == "(needed)" and f.name not in values]
    if missing:
        raise ValueError(f"config: {where}{missing[0]} is needed")
    return cls(**values)


def _plain(value: object) -> object:
    """Overrides as the values that they are, at any depth of tables."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.value if isinstance(value, _Written) else value


def _value(kind: object, value: object, where: str) -> object:
    if isinstance(value, _Written):
        taken_as_text = kind is str and not isinstance(value.value, str)
        return value.text if taken_as_text else _value(kind, value.value, where)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _build(kind, value, f"{where}.")
    if origin is dict and isinstance(value, Mapping):
        return _plain(value) if args[1] is object else {k: _value(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is tuple and args[1:] == (...,) and isinstance(value, list | tuple):
        return tuple(_value(args[0], v, where) for v in value)
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
        return tuple(_value(kind, v, where) for kind, v in zip(args, value, strict=True))
    if kind is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if kind is str and isinstance(value, str) and "\0" in value:
        raise ValueError(f"config: {where} = {value!r}: a text without NUL")
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and type(value) is kind:
        return value
    name = kind.__name__ if isinstance(kind, type) and not args else str(kind)
    raise ValueError(f"config: {where} = {value!r}: expected {name}")
