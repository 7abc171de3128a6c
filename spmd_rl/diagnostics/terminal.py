"""What is written to a terminal is text: whatever a model, an environment or an exception says, nothing obeys it.

Control characters are written out (`\\x1b`): none moves the cursor, clears the screen or hides what comes after.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TextIO

KEPT = "\n\t"


def escaped(text: str, keep: str = "") -> str:
    """With every character that a terminal would obey written out, but those of `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c in keep or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Plain:
    """A text stream whose control characters, but new lines and tabs, are written out; no terminal to whoever asks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(escaped(text, KEPT))
        return len(text)

    def writelines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.write(text)

    def isatty(self) -> bool:
        """False: nobody sends colours, which would be written out as well."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def below(text: str) -> str:
    """Lines of a text that is not ours after the first, moved to the right: none passes for a line of the run."""
    return text.replace("\n", "\n  ")
