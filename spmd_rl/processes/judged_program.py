"""Runs a program and the tests of it in two processes: the judge and the program, which talk over two pipes.

The judge runs the statements of the tests.  A name that the program defines is a stand-in there: calling it, or using
an object that it gave back, asks the program's process, which sends values of Python's own types and keeps everything
else.  So what a test expects never enters the program's process, and what the program sends is compared as plain data:
an object that says that it equals everything equals nothing here.  Functions that a test passes in are called back.

This file is the source of both processes: it imports the standard library only.  `rewards/program_tests.py` starts it.

    judge     stdin: {"program": text, "statements": [text, …]}; writes the number of each statement that did not raise
    program   waits for the judge, which has made itself unreadable by then, to send it its text

    {"ask": word, "what": "call", "args": […]}      {"answer": word, "value": …}  or  {"answer": word, "error": […]}
"""

from __future__ import annotations

import base64
import builtins
import collections
import contextlib
import ctypes
import datetime
import decimal
import fractions
import importlib
import json
import operator
import os
import secrets
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

PR_SET_DUMPABLE = 4
# The judge imports these itself where the program has them as globals; what else it has runs in its own process.
OWN_MODULES = {"math", "cmath", "collections", "fractions", "decimal", "datetime", "statistics", "itertools", "numpy"}
PLAIN = (bool, int, float, str, type(None))
NOTHING = object()
WRITTEN = ("solution", "tests")  # modules whose types are the program's and the tests' own
REBUILT: dict[str, tuple[type, Callable[[Any], list[object]]]] = {
    "Decimal": (decimal.Decimal, lambda v: [str(v)]),
    "Fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator]),
    "datetime": (datetime.datetime, lambda v: [v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond]),
    "date": (datetime.date, lambda v: [v.year, v.month, v.day]),
    "time": (datetime.time, lambda v: [v.hour, v.minute, v.second, v.microsecond]),
    "timedelta": (datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds]),
    "complex": (complex, lambda v: [v.real, v.imag]),
    "range": (range, lambda v: [v.start, v.stop, v.step]),
}
CONTAINERS: dict[str, type[Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque
}  # fmt: skip
UNARY = ("neg", "pos", "abs", "invert")
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
COMPARISONS = ("lt", "le", "gt", "ge")


class Gone(BaseException):
    """The other process has ended."""


class Peer:
    """One end of the two pipes."""

    def __init__(self, read_fd: int, write_fd: int, handlers: dict[str, Callable[..., dict[str, object]]]) -> None:
        self._read, self._write = os.fdopen(read_fd, "rb"), os.fdopen(write_fd, "wb")
        self._handlers = handlers
        self._kept: list[object] = []  # that the other side names by their place
        self._places: dict[int, int] = {}  # of what is kept, by its identity: one object has one stand-in
        self._stand_ins: dict[int, Remote] = {}  # for what the other side keeps, by its place there
        self._errors: dict[str, type[Exception]] = {}  # classes of exceptions of the other side

    def ask(self, what: str, *args: object, plain: bool = False) -> Any:
        """The other side's answer; what it raises is raised here.  Serves what it asks meanwhile."""
        word = secrets.token_hex(8)
        self._send({"ask": word, "what": what, "args": [a if plain else self.encode(a) for a in args]})
        while True:
            message = self._receive()
            if "ask" in message:
                self._serve(message)
            elif message.get("answer") == word:
                break
        if "error" in message:
            raise self._exception(*message["error"])
        return message["value"] if plain else self._result(message, args)

    def serve(self) -> None:
        """Answer until the other side has gone."""
        while True:
            self._serve(self._receive())

    def _serve(self, message: dict[str, Any]) -> None:
        answer: dict[str, object] = {"answer": message["ask"]}
        try:
            answer |= self._handlers[message["what"]](self, *message["args"])
        except Gone:
            raise
        except BaseException as error:
            names = [cls.__name__ for cls in type(error).__mro__ if issubclass(cls, BaseException)]
            answer["error"] = [names, _text(error)]
        self._send(answer)

    def _result(self, message: dict[str, Any], args: tuple[object, ...]) -> object:
        """The value; arguments that the call changed are changed here too, and one that it returned is the same."""
        flat = args[1] if len(args) > 1 and isinstance(args[1], list) else []
        for place, new in message.get("changed", []):
            _replace(flat[place], self.decode(new))
        return flat[message["same"]] if "same" in message else self.decode(message["value"])

    def encode(self, value: object) -> object:
        """As JSON; what is of a type that the program or the tests define stays here and is named."""
        if isinstance(value, Remote):
            return {"yours": _place(value)}
        form = NOTHING if type(value).__module__ in WRITTEN else self.plain(value)
        if form is NOTHING:
            if id(value) not in self._places:
                self._places[id(value)] = len(self._kept)
                self._kept.append(value)
            return {"awaitable" if isinstance(value, types.CoroutineType) else "mine": self._places[id(value)]}
        return form

    def plain(self, value: Any) -> object:
        """The form of a value of Python's own types, or of a type derived from one; NOTHING where there is none."""
        if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
            if not value.ndim:
                return self.encode(value.item())
            if value.dtype.kind in "biufc":
                return {"array": [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]}
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int.__index__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, bytes | bytearray):
            return {"bytes": [isinstance(value, bytearray), value.hex()]}
        if isinstance(value, dict):
            return {"dict": [[self.encode(k), self.encode(v)] for k, v in dict.items(value)]}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            items = [self.encode(item) for item in tuple.__iter__(value)]
            return {"named": [type(value).__name__, list(value._fields), items]}
        for name, kind in CONTAINERS.items():
            if isinstance(value, kind):
                return {name: [self.encode(item) for item in kind.__iter__(value)]}
        for name, (made, parts) in REBUILT.items():
            if type(value) is made:
                return {"of": [name, parts(value)]}
        return NOTHING

    def decode(self, form: object) -> Any:
        if not isinstance(form, dict):
            if not isinstance(form, PLAIN):
                raise TypeError(f"{form!r} is no value")
            return form
        ((kind, content),) = form.items()
        if kind in ("mine", "awaitable"):
            if content not in self._stand_ins:
                self._stand_ins[content] = Remote(self, content)
            return self._stand_ins[content] if kind == "mine" else _awaited(self._stand_ins[content])
        if kind == "yours":
            return self._kept[content]
        if kind == "bytes":
            return (bytearray if content[0] else bytes).fromhex(content[1])
        if kind == "dict":
            return {self.decode(k): self.decode(v) for k, v in content}
        if kind == "named":
            name, fields, items = content
            return collections.namedtuple(name, fields)(*map(self.decode, items))
        if kind == "of":
            return REBUILT[content[0]][0](*content[1])
        if kind == "array":
            numpy = importlib.import_module("numpy")
            dtype, shape, data = content
            return numpy.frombuffer(base64.b64decode(data), numpy.dtype(dtype)).reshape(shape).copy()
        return CONTAINERS[kind](map(self.decode, content))

    def exception_class(self, names: list[str]) -> type[Exception]:
        """Here, for one of the other side: Python's own nearest base, and below it one of that name."""
        known = (getattr(builtins, name, None) for name in names)
        base = next((k for k in known if isinstance(k, type) and issubclass(k, Exception)), Exception)
        if base.__name__ == names[0]:
            return base
        return self._errors.setdefault(names[0], type(names[0], (base,), {}))

    def _exception(self, names: list[str], text: str) -> Exception:
        cls = self.exception_class([str(name) for name in names])
        return Exception.__new__(cls) if issubclass(cls, UnicodeError) else cls(text)

    def _send(self, message: dict[str, object]) -> None:
        data = json.dumps(message).encode()
        try:
            self._write.write(data + b"\n")
            self._write.flush()
        except OSError:
            raise Gone from None

    def _receive(self) -> dict[str, Any]:
        line = self._read.readline()
        if not line:
            raise Gone
        message = json.loads(line)
        if not isinstance(message, dict):
            raise Gone
        return message


class Remote:
    """An object of the other side."""

    def __init__(self, peer: Peer, place: int) -> None:
        object.__setattr__(self, "_of", (peer, place))

    def __call__(self, *args: object, **named: object) -> object:
        return _peer(self).ask("call", self, list(args), named)

    def __getattr__(self, name: str) -> Any:  # whatever the program has under that name
        return _peer(self).ask("use", "getattr", [self, name])

    def __setattr__(self, name: str, value: object) -> None:
        _peer(self).ask("use", "setattr", [self, name, value])

    def __iter__(self) -> Iterator[object]:
        iterator = _peer(self).ask("use", "iter", [self])
        while isinstance(iterator, Remote):
            try:
                yield _peer(iterator).ask("use", "next", [iterator])
            except StopIteration:
                return
        yield from iterator

    def __next__(self) -> object:
        return _peer(self).ask("use", "next", [self])

    def __contains__(self, item: object) -> bool:
        return bool(_peer(self).ask("use", "contains", [self, item]))

    def __eq__(self, other: object) -> bool:
        """Two objects of the program as that says; with plain data, the plain data that the object is made of."""
        if isinstance(other, Remote):
            return bool(_peer(self).ask("use", "eq", [self, other]))
        plain = _plain(self)
        return not isinstance(plain, Remote) and bool(plain == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int(_peer(self).ask("use", "hash", [self]))

    def __bool__(self) -> bool:
        return bool(_peer(self).ask("use", "bool", [self]))

    def __len__(self) -> int:
        return int(_peer(self).ask("use", "len", [self]))

    def __str__(self) -> str:
        return str(_peer(self).ask("use", "str", [self]))

    def __repr__(self) -> str:
        return str(_peer(self).ask("use", "repr", [self]))

    def __getitem__(self, key: object) -> object:
        return _peer(self).ask("use", "getitem", [self, key])

    def __setitem__(self, key: object, value: object) -> None:
        _peer(self).ask("use", "setitem", [self, key, value])

    def __delitem__(self, key: object) -> None:
        _peer(self).ask("use", "delitem", [self, key])

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, Remote) and bool(_peer(self).ask("use", "isinstance", [instance, self]))

    def __enter__(self) -> object:
        return self.__getattr__("__enter__")()

    def __exit__(self, *_: object) -> object:
        return self.__getattr__("__exit__")(None, None, None)


def _operators() -> None:
    """Arithmetic and order between two objects of the program: with plain data it would be told what is expected."""

    def unary(name: str) -> Callable[[Remote], object]:
        return lambda self: _peer(self).ask("use", name, [self])

    def binary(name: str) -> Callable[[Remote, object], object]:
        def apply(self: Remote, other: object) -> object:
            if isinstance(other, Remote):
                return _peer(self).ask("use", name, [self, other])
            return (
                NotImplemented if isinstance(plain := _plain(self), Remote) else getattr(operator, name)(plain, other)
            )

        return apply

    for name in UNARY:
        setattr(Remote, f"__{name}__", unary(name))
    for name in (*BINARY, *COMPARISONS):
        setattr(Remote, f"__{name.rstrip('_')}__", binary(name))


_operators()


def _ran(coroutine: types.CoroutineType[Any, Any, object]) -> object:
    import asyncio  # takes longer to import than most programs run

    return asyncio.run(coroutine)


USES: dict[str, Callable[..., object]] = {
    **{f.__name__: f for f in (getattr, setattr, iter, next, hash, bool, len, str, repr, isinstance)},
    **{name: getattr(operator, name) for name in ("contains", "eq", "getitem", "setitem", "delitem")},
    **{name: getattr(operator, name) for name in (*UNARY, *BINARY, *COMPARISONS)},
    "await": _ran,
}


def _peer(remote: Remote) -> Peer:
    peer: Peer = object.__getattribute__(remote, "_of")[0]
    return peer


def _place(remote: Remote) -> int:
    place: int = object.__getattribute__(remote, "_of")[1]
    return place


def _plain(remote: Remote) -> object:
    """What an object of a type derived from one of Python's own is without its type; other objects as they are."""
    return _peer(remote).ask("use", "plain", [remote])


async def _awaited(remote: Remote) -> object:
    """What a coroutine of the other side comes to: it runs there from its beginning to its end."""
    return _peer(remote).ask("use", "await", [remote])


def _replace(value: object, new: Any) -> None:
    """Give a container the contents of another one."""
    if isinstance(value, list | bytearray):
        value[:] = new
    elif isinstance(value, collections.deque):
        value.clear()
        value.extend(new)
    elif isinstance(value, dict | set):
        value.clear()
        value.update(new)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:10_000]
    except Exception:  # raised by the __str__ of the program's own error: it has no text
        return ""


def _call(peer: Peer, target: object, args: object, named: object) -> dict[str, object]:
    """Call an object that is kept here; tell which arguments it changed, and whether it returned one of them."""
    function, values, keywords = peer.decode(target), peer.decode(args), peer.decode(named)
    before = [
        peer.encode(v) if isinstance(v, list | dict | set | bytearray | collections.deque) else None for v in values
    ]
    result = function(*values, **keywords)
    changed = [
        [i, after] for i, was in enumerate(before) if was is not None and (after := peer.encode(values[i])) != was
    ]
    same = [i for i, value in enumerate(values) if value is result and before[i] is not None]
    return {"changed": changed, **({"same": same[0]} if same else {"value": peer.encode(result)})}


# ---- the program's process


def program(read_fd: int, write_fd: int) -> None:
    """Wait for the program's text, run it, serve the judge until that has gone."""
    sys.set_int_max_str_digits(0)
    module = types.ModuleType("solution")
    sys.modules["solution"], sys.argv = module, ["solution.py"]

    def load(peer: Peer, text: str) -> dict[str, object]:
        with contextlib.suppress(SystemExit):  # at its end
            exec(compile(text, "solution.py", "exec"), module.__dict__)
        return {"value": [name for name in vars(module) if not name.startswith("__")]}

    def name(peer: Peer, name: str) -> dict[str, object]:
        value: Any = vars(module)[name]  # whatever the program has made
        if isinstance(value, types.ModuleType):
            return {"value": {"module": value.__name__, "object": peer.encode(value)}}
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"value": {"error": [c.__name__ for c in value.__mro__ if issubclass(c, BaseException)]}}
        home: str | None = getattr(value, "__module__", None)
        if home in OWN_MODULES:
            attribute = value.__name__
            if vars(sys.modules[home]).get(attribute) is value:
                return {"value": {"module": home, "attribute": attribute, "object": peer.encode(value)}}
        return {"value": {"object": peer.encode(value)}}

    def use(peer: Peer, what: str, args: object) -> dict[str, object]:
        values = peer.decode(args)
        if what == "plain":
            form = peer.plain(values[0])
            return {"value": peer.encode(values[0]) if form is NOTHING else form}
        return {"value": peer.encode(USES[what](*values))}

    try:
        Peer(read_fd, write_fd, {"load": load, "name": name, "use": use, "call": _call}).serve()
    except Gone:
        os._exit(0)


# ---- the judge's process


class Names(dict[str, object]):
    """Globals of the tests: their own, Python's, then those of the program."""

    def __init__(self, peer: Peer, known: set[str]) -> None:
        super().__init__(__name__="tests")
        self._peer, self._known = peer, known

    def __missing__(self, name: str) -> object:
        if name not in self._known or hasattr(builtins, name):
            raise KeyError(name)
        return self.of_program(name)

    def of_program(self, name: str) -> object:
        """Also where Python has one of that name.  AttributeError where the program has none."""
        if name not in self._known:
            raise AttributeError(name)
        told = self._peer.ask("name", name, plain=True)
        if told.get("module") in OWN_MODULES:
            module = importlib.import_module(told["module"])
            return getattr(module, told["attribute"]) if "attribute" in told else module
        if "error" in told:
            return self._peer.exception_class([str(name) for name in told["error"]])
        return self._peer.decode(told["object"])


def judge(read_fd: int, write_fd: int, result_fd: int) -> None:
    """Run every statement; the number of each that does not raise goes to `result_fd`, one a line."""
    if sys.platform == "linux":  # from here on no process of this user may look into this one
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    sys.set_int_max_str_digits(0)
    job = json.load(sys.stdin)

    def use(peer: Peer, what: str, args: object) -> dict[str, object]:
        """Of what a test has passed in; its insides (__globals__, say) are not shown."""
        values = peer.decode(args)
        if what in ("getattr", "setattr") and str(values[1]).startswith("_"):
            raise AttributeError(values[1])
        return {"value": peer.encode(USES[what](*values))}

    peer = Peer(read_fd, write_fd, {"use": use, "call": _call})
    try:
        names = Names(peer, known := set(peer.ask("load", job["program"], plain=True)))
        module = types.ModuleType("solution")  # for tests that import what they test
        public = [name for name in known if not (name.startswith("_") or hasattr(builtins, name))]
        vars(module).update(__getattr__=names.of_program, __all__=public)
        sys.modules["solution"] = module
        for number, statement in enumerate(job["statements"]):
            try:
                exec(compile(statement, f"test {number}", "exec"), names)
            except Exception:  # the statement did not pass, whatever it raised
                continue
            os.write(result_fd, f"{number}\n".encode())
    except Gone:
        os._exit(1)
    os._exit(0)
