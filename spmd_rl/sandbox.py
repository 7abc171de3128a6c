"""Runs Python code that nobody has read in a child process with little to break.

    execution = await Sandbox(timeout_s=5.0).run("print(6 * 7)")  # .stdout == "42\n"

The child gets a temporary folder of its own as its working directory, an empty environment, limits on CPU time, memory,
file size and open files, and a wall-clock limit after which it is killed; with it ends all that it started, and it ends
with the process that started it.  Where the kernel allows unprivileged namespaces it also has no network and no way to
escape its end; `Execution.isolated` says whether that was so; then the number of processes is limited too, but not for
root, whom the kernel exempts.  Elsewhere than on Linux memory has no limit, and the child may outlive the process.  It
still reads what this user can read and may write where this user may: code that is out to do harm belongs into a
container.

This file is also the program that sets the limits: it imports the standard library only, and guard.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import runpy
import select
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
FILE_BYTES = 1 << 24  # of a file that the code writes, its output among them
OUTPUT_BYTES = FILE_BYTES  # of its output that is read: all of it
ERROR_BYTES = 1 << 16  # of what it writes to stderr
START_S = 60.0  # from its start until the code begins
ISOLATED, CONFINED = b"i", b"c"  # marks: with namespaces of its own, or without
NUM_FILES, NUM_PROCESSES = 128, 64


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What became of the code."""

    stdout: str
    stderr: str
    exit_code: int  # 128 + signal where one ended it
    timed_out: bool
    isolated: bool  # it had no network and no way to leave anything behind

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

    def __init__(self, *, num: int = 4, timeout_s: float = 5.0, memory_bytes: int = 1 << 30) -> None:
        if num < 1 or not timeout_s > 0:
            raise ValueError(f"sandbox: num = {num} must be at least 1, timeout_s = {timeout_s} above 0")
        self._free = asyncio.Semaphore(num)
        self._timeout_s, self._memory_bytes = timeout_s, memory_bytes

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
        source, out, err = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]  # noqa: SIM115
        source.write(program.stdin.encode("utf-8", errors="surrogatepass"))
        source.seek(0)
        status, told = os.pipe()
        stack.callback(os.close, status)
        limits = (str(os.getpid()), str(self._memory_bytes), str(int(self._timeout_s) + 2), str(told))
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", __file__, str(folder), *limits),
                stdin=source,
                stdout=out,
                stderr=err,
                cwd=work,
                env={"PATH": "/usr/bin:/bin", "HOME": str(work), "TMPDIR": str(work), "PYTHONDONTWRITEBYTECODE": "1"}
                | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
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
    mark: bytes = b""  # ISOLATED or CONFINED

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
    await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


# ---- in the child


def _launch(folder: str, parent: int, memory_bytes: int, cpu_s: int, status: int) -> None:
    """Become the code, confined."""
    linux, isolated = sys.platform == "linux", False
    if linux:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if linux:
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        uid, gid = os.getuid(), os.getgid()
        isolated = libc.unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC) == 0
    if isolated:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
        alive, held = os.pipe()  # hangs up when the launcher ends
        if child := os.fork():  # the child is process 1 of its namespace: with it everything in there ends
            _, status = os.waitpid(child, 0)
            os._exit(status >> 8 if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(held)
        if select.select([alive], [], [], 0)[0]:
            os._exit(1)
        os.close(alive)
    else:
        runpy.run_path(str(Path(__file__).with_name("guard.py")))["guarded"](parent)
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: NUM_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if linux:  # macOS knows the limit and refuses to set it
        limits[resource.RLIMIT_AS] = memory_bytes
    if isolated:  # counted per namespace; elsewhere it would count all that this user runs
        limits[resource.RLIMIT_NPROC] = NUM_PROCESSES
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    os.write(status, ISOLATED if isolated else CONFINED)
    os.close(status)
    os.execv(sys.executable, [sys.executable, "-I", os.path.join(folder, "code.py")])


if __name__ == "__main__":
    _launch(sys.argv[1], *map(int, sys.argv[2:]))
