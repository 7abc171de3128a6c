"""Which share of the tests a program passes, run in a sandbox.

Tests are either statements that raise when the program is wrong ("assert add(2, 3) == 5"), run after the program in one
process, or pairs of input and output, each run on its own.  A program that is killed at its time limit fails the tests
that it did not reach: that is an answer about the program, not a broken reward.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Sequence

from spmd_rl.sandbox import Sandbox

_BLOCK = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL)


def code_of(reply: str) -> str:
    """The last fenced block of a reply; all of it where there is none."""
    blocks = _BLOCK.findall(reply)
    return blocks[-1] if blocks else reply


async def statements_passed(sandbox: Sandbox, program: str, statements: Sequence[str]) -> float:
    """Share of the statements that do not raise.  Waits for the sandbox."""
    word = secrets.token_hex(16)  # a program cannot print it without looking for it
    lines = [program, "", "def _passed():", f"    __import__('os').write(1, b'\\n{word}\\n')", ""]
    for statement in statements:
        body = "\n".join(f"    {line}" for line in statement.splitlines())
        lines += ["try:", body, "    _passed()", "except Exception: pass"]
    execution = await sandbox.run("\n".join(lines))
    return execution.stdout.splitlines().count(word) / len(statements)


async def outputs_equal(sandbox: Sandbox, program: str, pairs: Sequence[tuple[str, str]]) -> float:
    """Share of the (input, output) pairs that the program gets right, blanks at line ends aside.  Waits likewise."""
    executions = await asyncio.gather(*(sandbox.run(program, stdin) for stdin, _ in pairs))
    right = [e.ok and _lines(e.stdout) == _lines(out) for e, (_, out) in zip(executions, pairs, strict=True)]
    return sum(right) / len(pairs)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
