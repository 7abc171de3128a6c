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
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
FILE_BYTES = 1 << 24  # of a file that the code writes, its output among them
OUTPUT_BYTES = 1 << 16  # of its output that is read
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


class Sandbox:
    """At most `num` programs at a time; further ones wait."""

    def __init__(self, *, num: int = 4, timeout_s: float = 5.0, memory_bytes: int = 1 << 30) -> None:
        if num < 1 or not timeout_s > 0:
            raise ValueError(f"sandbox: num = {num} must be at least 1, timeout_s = {timeout_s} above 0")
        self._free = asyncio.Semaphore(num)
        self._timeout_s, self._memory_bytes = timeout_s, memory_bytes

    async def run(self, code: str, stdin: str = "") -> Execution:
        """Waits for a free place and for the program, `timeout_s` at most."""
        async with self._free:
            folder = Path(tempfile.mkdtemp(prefix="sandbox-"))
            try:
                return await self._run(folder, code, stdin)
            finally:
                await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))

    async def _run(self, folder: Path, code: str, stdin: str) -> Execution:
        work = folder / "work"
        work.mkdir()
        (folder / "code.py").write_text(code, encoding="utf-8", errors="surrogatepass")
        (folder / "in").write_text(stdin, encoding="utf-8")
        limits = (str(os.getpid()), str(self._memory_bytes), str(int(self._timeout_s) + 2))
        with (folder / "in").open() as source, (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", __file__, str(folder), *limits),
                stdin=source,
                stdout=out,
                stderr=err,
                cwd=work,
                env={"PATH": "/usr/bin:/bin", "HOME": str(work), "TMPDIR": str(work), "PYTHONDONTWRITEBYTECODE": "1"}
                | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
                start_new_session=True,
            )
        timed_out = False
        try:
            await asyncio.wait_for(process.wait(), self._timeout_s)
        except TimeoutError:
            timed_out = True
        finally:
            with contextlib.suppress(ProcessLookupError):
                if (folder / "isolated").exists():
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.terminate()  # the guard kills
            code_ = await asyncio.shield(process.wait())
        return Execution(
            stdout=_head(folder / "out"),
            stderr=_head(folder / "err"),
            exit_code=code_ if code_ >= 0 else 128 - code_,
            timed_out=timed_out,
            isolated=(folder / "isolated").exists(),
        )


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(OUTPUT_BYTES).decode("utf-8", errors="replace")


# ---- in the child


def _launch(folder: str, parent: int, memory_bytes: int, cpu_s: int) -> None:
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
        (Path(folder) / "isolated").touch()
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
    os.execv(sys.executable, [sys.executable, "-I", os.path.join(folder, "code.py")])


if __name__ == "__main__":
    _launch(sys.argv[1], *map(int, sys.argv[2:]))
