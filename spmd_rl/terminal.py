"""What is written to a terminal is text: whatever a model, an environment or an exception says, nothing obeys it.

Control characters are written out (`\\x1b`): none moves the cursor, clears the screen or hides what comes after.
"""

from __future__ import annotations

from typing import Any, TextIO

KEPT = "\n\t"


class Plain:
    """A text stream whose control characters, but new lines and tabs, are written out; no terminal to whoever asks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(written_out(text))
        return len(text)

    def isatty(self) -> bool:
        """False: nobody sends colours, which would be written out as well."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def written_out(text: str) -> str:
    """Example: "a\\x1b[2Jb" with a real escape becomes the eight characters that are read here."""
    if text.isprintable():
        return text
    return "".join(c if c in KEPT or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def below(text: str) -> str:
    """Lines of a text that is not ours after the first, moved to the right: none passes for a line of the run."""
    return text.replace("\n", "\n  ")
