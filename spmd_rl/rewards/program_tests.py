"""Which share of the tests a program passes, run in a sandbox.

Tests are either statements that raise when the program is wrong ("assert add(2, 3) == 5"), run one after the other by a
judge in another process (`processes/judged_program.py`), or pairs of input and output, each run on its own.  Nothing
that a test expects is in the program's process.  A program that is killed at its time limit fails the tests that it did
not reach: that is an answer about the program, not a broken reward.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from spmd_rl.processes import judged_program
from spmd_rl.processes.sandbox import OUTPUT_BYTES, Program, Sandbox

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*(.*?)\s*$")
_PYTHON = {"python", "py", "python3", "py3", "python2", "ipython", "ipython3"}


def code_of(reply: str) -> str:
    """The program of a reply: its last fenced block of Python; all of the reply where there is none.

    A block without a language counts if it is Python and does more than name a value: the output of a program does not.
    """
    blocks = [code for language, code in fenced_blocks(reply) if language in _PYTHON or _is_program(language, code)]
    return blocks[-1] if blocks else reply


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language in lower case, contents) of each block of Markdown; one that is never closed goes on to the end.

    Contents lose the indentation of the fence.
    """
    blocks: list[tuple[str, list[str]]] = []
    fence, indent = "", 0
    for line in text.splitlines(keepends=True):
        match = _FENCE.match(line)
        if not fence and match and "`" not in match[2]:
            fence, indent = match[1], len(line) - len(line.lstrip(" \t"))
            words = re.split(r"[\s{}:,=]+", match[2].strip("{} ."))
            blocks.append((words[0].lower().lstrip("."), []))
        elif fence and match and match[1].startswith(fence) and not match[2]:
            fence = ""
        elif fence:
            own = len(line) - len(line.lstrip(" \t"))
            blocks[-1][1].append(line[min(indent, own) :])
    return [(language, "".join(lines)) for language, lines in blocks]


def _is_program(language: str, code: str) -> bool:
    if language:
        return False
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in body)


async def statements_passed(sandbox: Sandbox, program: str, statements: Sequence[str]) -> float:
    """Share of the statements that do not raise, each counted once.  Waits for the sandbox."""
    source = Path(judged_program.__file__).read_text(encoding="utf-8")
    job = json.dumps({"program": program, "statements": list(statements)})
    to_judge, from_program = os.pipe()
    to_program, from_judge = os.pipe()
    with tempfile.TemporaryFile() as passed:
        judge = Program(
            code=f"{source}\njudge({to_judge}, {from_judge}, {passed.fileno()})\n",
            stdin=job,
            fds=(to_judge, from_judge, passed.fileno()),
        )
        judged = Program(code=f"{source}\nprogram({to_program}, {from_program})\n", fds=(to_program, from_program))
        await sandbox.together([judge, judged], close=(to_judge, from_program, to_program, from_judge))
        passed.seek(0)
        return len(set(passed.read().split())) / len(statements)


async def outputs_equal(sandbox: Sandbox, program: str, pairs: Sequence[tuple[str, str]]) -> float:
    """Share of the (input, output) pairs that the program gets right, blanks at line ends aside.

    Waits likewise.  Raises ValueError for an expected output that is longer than the sandbox reads.
    """
    for _, output in pairs:
        if len(output.encode("utf-8", errors="replace")) > OUTPUT_BYTES:
            raise ValueError(
                f"a test expects {len(output)} characters of output, the sandbox reads {OUTPUT_BYTES} bytes"
            )
    executions = await asyncio.gather(*(sandbox.run(program, stdin) for stdin, _ in pairs))
    right = [e.ok and _lines(e.stdout) == _lines(out) for e, (_, out) in zip(executions, pairs, strict=True)]
    return sum(right) / len(pairs)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
