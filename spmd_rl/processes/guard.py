"""Processes that leave nothing behind: they and what they have started end with the one that started them.

On Linux that holds however that one ends, and where the kernel lists a process's children also for what has left the
process group; elsewhere for the group, and only if the guard is told.  Imports the standard library only: the sandbox's
child has nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Linux signals this process when the thread that started it ends, and so when `parent` does; others cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def guarded(parent: int) -> None:
    """Returns in a child; this process stays behind as its guard.

    It waits for the child's end, or for SIGTERM, which `parent`'s end brings too, and kills the child and all that is
    left of what it has started.
    """
    awaited = {signal.SIGTERM, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    die_with_parent(parent, signal.SIGTERM)
    if sys.platform == "linux":  # orphans below come here and not to process 1
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard, child = os.getpid(), os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        die_with_parent(guard)
        return
    status = None
    while status is None and signal.sigwait(awaited) == signal.SIGCHLD:
        while status is None and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else None  # others were left behind by what the child has started
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is in the group, yet or any more
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    children = Path(f"/proc/self/task/{guard}/children")  # so this is all that is left, whatever its group
    while children.exists() and (left := children.read_text().split()):
        for process in map(int, left):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
