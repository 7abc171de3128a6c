"""What a terminal gets to see of texts that are not ours."""

import io
import subprocess
import sys

import pytest

from spmd_rl.diagnostics.terminal import Plain, below


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain\tand\nlines, é 漢 😀", "plain\tand\nlines, é 漢 😀"),
        ("\x1b[2J\x1b[1;1H", r"\x1b[2J\x1b[1;1H"),
        ("100%\rstep 3/3", r"100%\rstep 3/3"),
        ("\x9b31m \x00 \x07 \x7f", r"\x9b31m \x00 \x07 \x7f"),
        ("\u202ereversed\u2066", r"\u202ereversed\u2066"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("half \ud83d of a pair", r"half \ud83d of a pair"),  # would be no UTF-8
        ("line\u2028break\x0b\x0c\x85", r"line\u2028break\x0b\x0c\x85"),
    ],
)
def test_control_characters_are_written_out(text, seen):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    print(text, end="", file=Plain(stream), flush=True)
    assert stream.buffer.getvalue().decode() == seen and not Plain(sys.stdout).isatty()


def test_lines_written_at_once_are_written_out_too():
    stream = io.StringIO()
    Plain(stream).writelines(["a\x1b[2J\n", "b\r"])
    assert stream.getvalue() == "a\\x1b[2J\nb\\r"


def test_lines_of_others_begin_further_right():
    assert below("boom\nstep  9/9  reward 1.0\n") == "boom\n  step  9/9  reward 1.0\n  "


def test_the_program_writes_so(tmp_path):
    words = [sys.executable, "-m", "spmd_rl", "check", str(tmp_path / "a\x1b[2J\rstep 1.toml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and r"a\x1b[2J\rstep 1.toml" in done.stderr and "\x1b" not in done.stderr
