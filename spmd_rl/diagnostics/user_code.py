"""What the code of a user raised or gave back, and where in it: a kind, one line, `file:line` and the frames.

The user's are the frames outside of this package, of the standard library and of installed packages; where an error has
none, those of a shipped environment count, then those of installed packages.  Text of users and models is escaped and
cut, so that it may go to a terminal.  Knows nothing of rollouts, ranks or tasks.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from spmd_rl.diagnostics.terminal import escaped

MOST_TEXT = 500  # characters of an error in a line
MOST_FRAMES = 20
_OURS = str(Path(__file__).parents[1]) + os.sep
_SHIPPED = os.path.join(_OURS, "envs") + os.sep
_SEAM = os.path.join(_SHIPPED, "environment.py")
_LIBRARY = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_INSTALLED = ("site-packages", "dist-packages")
_LOOP = "_run_once"  # of asyncio: what it calls, and nothing below it, is what holds the loop


class BadReturn(ValueError):
    """What a user's function gave back cannot be used: told with the place of the function, if it is given."""

    def __init__(self, text: str, function: object = None) -> None:
        super().__init__(text)
        self.place = "" if function is None else defined_at(function)


class Refused(ValueError):
    """What a user wrote cannot be used, in one line that needs nothing added."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """An exception as it is told."""

    error: BaseException  # of a group the first
    kind: str  # the name of its class
    text: str
    place: str  # file:line, of the user's deepest frame; "" where nothing is known
    frames: list[str]  # outermost first
    users: bool  # there is a frame of the user's own, or the place of a function

    def __str__(self) -> str:
        line = f"{self.kind}: {self.text}" if self.text else self.kind
        return f"{line} ({self.place})" if self.place else line


def tell(error: BaseException) -> Told:
    """Whatever the exception is: one that holds others, one without a text, one whose text cannot be made."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    users = next(filter(None, (_frames(cause, _is_users) for cause in _causes(error))), [])
    if isinstance(error.__cause__, StopIteration | StopAsyncIteration):  # that a coroutine raised: made another error
        users += _frames(error.__cause__, _is_users)
    frames = users or _frames(error, _is_shipped) or _frames(error, _is_installed)
    place, has_users = f"{frames[-1][0]}:{frames[-1][1]}" if frames else "", bool(users)
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        place, has_users = f"{os.path.abspath(error.filename)}:{error.lineno}", True
    if isinstance(error, BadReturn) and error.place:
        place, has_users = error.place, True
    return Told(
        error=error,
        kind=printable(type(error).__name__),
        text=printable(error.msg if isinstance(error, SyntaxError) else _text(error)),
        place=place,
        frames=[_line(*frame) for frame in frames[-MOST_FRAMES:]],
        users=has_users,
    )


@contextmanager
def refused(what: str) -> Iterator[None]:
    """What code that a user names raises before the run begins is a ValueError: what, error and place in one line.

    A ValueError or OSError of our own code says what is wrong by itself.
    """
    try:
        yield
    except (KeyboardInterrupt, Refused):
        raise
    except BaseException as error:
        told = tell(error)
        if isinstance(error, ValueError | OSError) and not told.users:
            raise
        raise Refused(f"{what}: {told}") from error


def defined_at(function: object) -> str:
    """Where a function, method, class or callable object is defined; "" for what is not written in Python."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    if callable(function):
        function = inspect.unwrap(function)
    if not isinstance(function, type) and not hasattr(function, "__code__") and callable(function):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    return f"{os.path.abspath(code.co_filename)}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""


def where(frame: FrameType | None) -> tuple[str, str]:
    """(function, file:line) of the user's deepest frame in a running thread, else of its deepest."""
    deepest = frame
    while frame is not None and frame.f_code.co_name != _LOOP:
        if _is_users(frame.f_code.co_filename):
            deepest = frame
            break
        frame = frame.f_back
    if deepest is None:
        return "", ""
    code = deepest.f_code
    return code.co_qualname, f"{os.path.abspath(code.co_filename)}:{deepest.f_lineno or code.co_firstlineno}"


def printable(text: str, most: int = MOST_TEXT) -> str:
    """In one line, cut, with every character that a terminal would obey escaped."""
    short = text if len(text) <= most else f"{text[:most]} … ({len(text)} characters)"
    return escaped(" ".join(short.split()))


def shown(value: object) -> str:
    """A value that a user's code made, and its type: "'1.0' (str)"."""
    try:
        text = repr(value)
    except Exception as error:  # it is the user's, as what is told is
        text = f"<its repr raised {type(error).__name__}>"
    return f"{printable(text, 80)} ({type(value).__name__})"


def _causes(error: BaseException) -> Iterable[BaseException]:
    """The exception, and what it followed from."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _frames(error: BaseException, counts: Callable[[str], bool]) -> list[tuple[str, int, str]]:
    """(file, line, function) of those in its traceback whose file counts, outermost first."""
    return [
        (os.path.abspath(frame.f_code.co_filename), line or frame.f_code.co_firstlineno, frame.f_code.co_qualname)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if counts(frame.f_code.co_filename)
    ]


@functools.lru_cache(maxsize=4096)
def _is_users(path: str) -> bool:
    whole = os.path.abspath(path)
    return not (path.startswith("<") or whole.startswith((_OURS, *_LIBRARY)) or _is_installed(path))


def _is_shipped(path: str) -> bool:
    return path.startswith(_SHIPPED) and path != _SEAM


def _is_installed(path: str) -> bool:
    return any(folder in Path(path).parts for folder in _INSTALLED) and not path.startswith(_OURS)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as raised:  # the exception's class is the user's too
        return f"<its str() raised {type(raised).__name__}>"


def _line(path: str, number: int, function: str) -> str:
    return f"{path}:{number} in {function}: {linecache.getline(path, number).strip()[:200]}"
