"""Functions in child processes that can be killed: for rewards and tools that are not instant, or may hang.

    workers = Workers(num=4, timeout_s=10.0)
    score = await workers.call(my_package.verify, reply, answer)

A call waits for a free process, starts the function there and waits for its JSON result, at most `timeout_s` from the
moment that the function begins.  Then the process and all that it has started is killed and `TimedOut` raised: the
caller's sample is dropped and counted, no reward is made up.  A cancelled call is killed likewise.  Processes start
when first needed, are used again, and die, with all that they have started, with the process that started them, on
Linux however that one ends: each is the child of a process that sees to that.

The function is named by its module, its arguments and result are JSON: nothing is pickled.  A module may have a
function `warm_up()` for what is imported late: it is called once in each process, before the time of the first job
begins.  The function runs in the main thread of its process, so it may use signals.  Knows nothing of rollouts or
rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pkgutil
import signal
import sys
from collections.abc import Callable
from typing import Any

from spmd_rl.processes.guard import guarded
from spmd_rl.types import NotRetried

START_S = 120.0  # for a process to start and to import the function's module
LINE_BYTES = 1 << 24  # of a result at most


class TimedOut(NotRetried):
    """A job did not begin or end in its time and was killed."""


class WorkerDied(NotRetried):
    """A job's process ended without a result."""


class Workers:
    """At most `num` processes; further calls wait for one."""

    def __init__(self, *, num: int = 4, timeout_s: float = 10.0, start_s: float = START_S) -> None:
        if num < 1 or not timeout_s > 0:
            raise ValueError(f"workers: num = {num} must be at least 1, timeout_s = {timeout_s} above 0")
        self._timeout_s, self._start_s = timeout_s, start_s
        self._free = asyncio.Semaphore(num)
        self._idle: list[asyncio.subprocess.Process] = []

    async def call(self, function: Callable[..., Any], *args: object) -> Any:  # JSON
        """The function's result.  Waits for a free process and for the function; what that raises is raised here."""
        job = {"function": f"{function.__module__}:{function.__qualname__}", "args": args}
        async with self._free:
            process = await self._take()
            answered, late = False, f"begin, its module imported, within {self._start_s:g} s"
            try:
                assert process.stdin is not None
                process.stdin.write(json.dumps(job).encode() + b"\n")
                await asyncio.wait_for(_read(process), self._start_s)
                late = f"end within {self._timeout_s:g} s"
                answer = await asyncio.wait_for(_read(process), self._timeout_s)
                answered = True
            except TimeoutError:
                raise TimedOut(f"{job['function']} did not {late}") from None
            finally:
                if answered:
                    self._idle.append(process)
                else:
                    await _kill(process)
        if "error" in answer:
            raise RuntimeError(f"{job['function']}: {answer['error']}")
        return answer["result"]

    async def _take(self) -> asyncio.subprocess.Process:
        while self._idle:
            if (process := self._idle.pop()).returncode is None:
                return process
        return await _start()

    async def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            await _kill(self._idle.pop())


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "spmd_rl.processes.workers", str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


async def _read(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise WorkerDied(f"the process of a job ended with code {await process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _kill(process: asyncio.subprocess.Process) -> None:
    """The process and what it has started.  Waits for their end, which a kill makes a matter of milliseconds."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    assert process.stdin is not None
    process.stdin.close()
    await asyncio.shield(process.wait())


def _serve() -> None:
    """In the child: a line with a job in, a line when it begins and a line with its result out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a function prints goes to stderr
    warm: set[str] = set()
    for line in sys.stdin:
        job = json.loads(line)
        try:
            function, problem = pkgutil.resolve_name(job["function"]), None
            if (module := job["function"].partition(":")[0]) not in warm:
                warm.add(module)
                getattr(sys.modules[module], "warm_up", lambda: None)()
        except Exception as error:  # of the user's module
            function, problem = None, error
        print("{}", file=answers, flush=True)
        try:
            if problem is not None:
                raise problem
            answer = json.dumps({"result": function(*job["args"])})
        except Exception as error:  # whatever the user's function raises is its answer
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    guarded(int(sys.argv[1]))
    _serve()
