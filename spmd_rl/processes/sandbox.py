"""Runs Python code that nobody has read in a child process with little to break.

    execution = await Sandbox(timeout_s=5.0).run("print(6 * 7)")  # .stdout == "42\n"

The child has an empty environment, limits on CPU time, memory, file size and open files, and a wall-clock limit after
which it is killed; with it ends all that it started, and it ends with the process that started it.  Isolated, it sees
the system and Python, read-only, and nothing else: see `confinement.py`.  That needs a Linux that lets users make
namespaces, or bubblewrap, which may be allowed to where users are not.  Without, a sandbox is refused, unless
`require_isolation` is False: then the code has a temporary folder as its working directory, reads what this user can
read, writes where this user may, and reaches the network.

docs/security.md says what is promised against whom.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

from spmd_rl.processes import confinement
from spmd_rl.processes.confinement import BUBBLEWRAP, CONFINED, FAILED, FILE_BYTES, ISOLATED

OUTPUT_BYTES = FILE_BYTES  # of its output that is read: all of it
ERROR_BYTES = 1 << 16  # of what it writes to stderr
START_S = 60.0  # from its start until the code begins
REASON_BYTES = 1000  # of why it cannot be isolated
ISOLATIONS = {"namespaces": ISOLATED, "bubblewrap": BUBBLEWRAP}


@cache
def not_isolated_because(isolation: str = "namespaces") -> str:
    """Why code cannot be isolated on this machine; "" where it can.  Found by running a program, once a process."""
    if isolation == "bubblewrap" and os.getuid() == 0:
        return "bubblewrap leaves root what root may do; namespaces of our own do not"
    if isolation == "bubblewrap" and not shutil.which("bwrap"):
        return "bwrap is not installed"
    status, told = os.pipe()
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        (Path(folder) / "code.py").write_text("")
        try:
            done = subprocess.run(
                _command(ISOLATIONS[isolation], folder, 1 << 30, 60, told),
                pass_fds=(told,), env={}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            )  # fmt: skip
        finally:
            os.close(told)
    with os.fdopen(status, "rb") as pipe:
        said = pipe.read(REASON_BYTES)
    if said.startswith(FAILED):
        return said[len(FAILED) :].decode(errors="replace")
    if said != ISOLATED or done.returncode:
        return f"{sys.executable} does not run there: {(done.stderr.strip() or f'exit code {done.returncode}')[-300:]}"
    return ""


def _command(mode: bytes, folder: str | Path, memory_bytes: int, cpu_s: int, told: int) -> list[str]:
    python = {sys.prefix, sys.base_prefix, sys.exec_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    numbers = map(str, (os.getpid(), memory_bytes, cpu_s, told))
    shown = json.dumps(sorted(map(os.path.abspath, python)))
    return [sys.executable, "-I", "-S", confinement.__file__, mode.decode(), str(folder), shown, *numbers]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What became of the code."""

    stdout: str
    stderr: str
    exit_code: int  # 128 + signal where one ended it
    timed_out: bool
    isolated: bool  # it saw and reached nothing but the system's files

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out


@dataclass(frozen=True, kw_only=True)
class Program:
    """Code to be run, and what it is given."""

    code: str
    stdin: str = ""
    fds: tuple[int, ...] = ()  # open in the code's process under the same numbers


class Sandbox:
    """At most `num` programs, or groups of programs, at a time; further ones wait."""

    def __init__(
        self,
        *,
        num: int = 4,
        timeout_s: float = 5.0,
        memory_bytes: int = 1 << 30,  # of a process, and isolated of all processes of a program together
        isolation: str = "namespaces",  # "namespaces" | "bubblewrap", which makes them
        require_isolation: bool = True,
    ) -> None:
        if isolation not in ISOLATIONS:
            raise ValueError(f"sandbox: isolation = {isolation!r}: must be one of {', '.join(ISOLATIONS)}")
        if num < 1 or not timeout_s > 0:
            raise ValueError(f"sandbox: num = {num} must be at least 1, timeout_s = {timeout_s} above 0")
        because = not_isolated_because(isolation)
        if because and require_isolation:
            other = "install bubblewrap" if isolation == "bubblewrap" else "allow unprivileged user namespaces"
            if isolation == "namespaces" and not not_isolated_because("bubblewrap"):
                other = 'set isolation = "bubblewrap"'
            raise ValueError(
                f"code of a model cannot be isolated on this machine ({because}): {other}, or set require_isolation = "
                "false, which lets it read and write what you can"
            )
        self._isolation, self._because = isolation, because
        self._mode = CONFINED if because else ISOLATIONS[isolation]
        self._free = asyncio.Semaphore(num)
        self._timeout_s, self._memory_bytes = timeout_s, memory_bytes

    @property
    def says(self) -> str:
        """What holds, for the start of a run."""
        if not self._because:
            by = " by bubblewrap" if self._isolation == "bubblewrap" else ""
            return f"code of the model runs isolated{by}: no network, no files but the system's, a user without rights"
        return (
            f"warning: code of the model is not isolated ({self._because}): it reads and writes what this "
            "user can, and reaches the network"
        )

    async def run(self, code: str, stdin: str = "") -> Execution:
        """Waits for a free place and for the program, `timeout_s` at most from when it begins."""
        (execution,) = await self.together([Program(code=code, stdin=stdin)])
        return execution

    async def together(self, programs: Sequence[Program], *, close: Sequence[int] = ()) -> list[Execution]:
        """Run programs beside each other, in one place, until the first of them ends; the others are killed then.

        The descriptors in `close` are closed here once all have been started.  Waits as `run` does.
        """
        async with self._free, contextlib.AsyncExitStack() as stack:
            folders = [Path(tempfile.mkdtemp(prefix="sandbox-")) for _ in programs]
            for folder in folders:
                stack.push_async_callback(_remove, folder)
            running: list[_Running] = []
            try:
                try:
                    for folder, program in zip(folders, programs, strict=True):
                        running.append(await self._start(stack, folder, program))
                finally:
                    for descriptor in close:
                        os.close(descriptor)
                timed_out = await self._first_ends(running)
            finally:
                codes = [await asyncio.shield(one.kill()) for one in running]
            return [
                await asyncio.to_thread(one.execution, code, timed_out)
                for one, code in zip(running, codes, strict=True)
            ]

    async def _first_ends(self, running: list[_Running]) -> bool:
        """Whether it did not in time."""
        try:
            async with asyncio.timeout(START_S):
                for one in running:
                    one.mark = await asyncio.to_thread(os.read, one.status, 1)
            await asyncio.wait_for(running[0].process.wait(), self._timeout_s)
        except TimeoutError:
            return True
        return False

    async def _start(self, stack: contextlib.AsyncExitStack, folder: Path, program: Program) -> _Running:
        """Only what is opened here is read later: the code may put anything in the place of a file by its name."""
        work = folder / "work"
        work.mkdir()
        (folder / "code.py").write_text(program.code, encoding="utf-8", errors="surrogatepass")
        source, out, err = files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]  # noqa: SIM115
        source.write(program.stdin.encode("utf-8", errors="surrogatepass"))
        source.seek(0)
        for file in files:  # they have no name; the code may be another user, and open them anew as /dev/stdout
            os.fchmod(file.fileno(), 0o666)
        status, told = os.pipe()
        stack.callback(os.close, status)
        command = _command(self._mode, folder, self._memory_bytes, int(self._timeout_s) + 2, told)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=source,
                stdout=out,
                stderr=err,
                env={},
                start_new_session=True,
                pass_fds=(*program.fds, told),
            )
        finally:
            os.close(told)
        return _Running(process, out, err, status)


@dataclass(eq=False)
class _Running:
    process: asyncio.subprocess.Process
    out: BinaryIO
    err: BinaryIO
    status: int  # pipe on which the launcher marks the code's beginning
    mark: bytes = b""  # ISOLATED or CONFINED, FAILED where that could not be

    async def kill(self) -> int:
        """The exit code, 128 + signal where one ended it.  Waits for the end, which is near."""
        with contextlib.suppress(ProcessLookupError):
            if self.mark == ISOLATED:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.terminate()  # the guard kills
        code = await self.process.wait()
        return code if code >= 0 else 128 - code

    def execution(self, exit_code: int, timed_out: bool) -> Execution:
        return Execution(
            stdout=_head(self.out, OUTPUT_BYTES),
            stderr=_head(self.err, ERROR_BYTES),
            exit_code=exit_code,
            timed_out=timed_out,
            isolated=self.mark == ISOLATED,
        )


def _head(file: BinaryIO, num_bytes: int) -> str:
    return os.pread(file.fileno(), num_bytes, 0).decode("utf-8", errors="replace")


async def _remove(folder: Path) -> None:
    """Whatever the code made of it: folders that it has locked are opened, and the deepest are no recursion."""
    await asyncio.shield(asyncio.to_thread(_removed, folder))


def _removed(folder: Path) -> None:
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", folder], capture_output=True, check=False)
