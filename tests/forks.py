"""Processes that start without their imports: forked from one that has torch, transformers and the package loaded.

    job = forks.Popen(["torch.distributed.run", "--standalone", ...], stdout=subprocess.PIPE, text=True)

What starts is what `python -m` with these words would start: the caller's own child with its own session, environment
(in /proc too), folder, open files, signals and exit code, which ends as the interpreter ends.  A job is torchrun's own
agent; the ranks that the agent starts are forked in the same way.  Two things differ: the code is that of the first
use, and all processes have one order of hashes, so what tests either starts a real torchrun.

A server forks for one caller.  It has one thread, so that its forks are whole, and ends when its caller has ended.  A
process is forked by a child of the server that ends at once, so that it falls to the nearest ancestor that takes
orphans: the caller, for as long as it asks.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AGENT = "torch.distributed.run"
PRELOADED = (
    AGENT,
    "matplotlib.backends.backend_agg",
    "sympy",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    "transformers.convert_slow_tokenizer",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "spmd_rl.ranks.program",
)
ROOM = "ROOM"  # makes the place of the server's environment longer than any that it is to hold
ORDER_BYTES = 1 << 17
PR_SET_CHILD_SUBREAPER = 36


class Popen(subprocess.Popen):
    """`subprocess.Popen` of a module and its arguments; of its options those that jobs need are heeded."""

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        files = [number if file == -1 else file for number, file in enumerate((pipes[0], pipes[3], pipes[5]))]
        order = {
            "words": given["args"],
            "folder": os.fspath(given["cwd"] or os.getcwd()),
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "new_session": bool(given["start_new_session"]),
        }
        self.pid = server().fork(order, files)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def job(words: list[str], **options: Any) -> Popen:
    """`Popen` of `python -m MODULE ...`, in full."""
    assert words[:2] == [sys.executable, "-m"]
    return Popen(words[2:], **options)


class Server:
    """The caller's end."""

    def __init__(self, line: socket.socket, process: subprocess.Popen | None = None) -> None:
        self.caller = os.getpid()
        self._line, self._process, self._one = line, process, threading.Lock()
        atexit.register(self.close)

    def fork(self, order: dict[str, Any], files: list[int]) -> int:
        with self._one, _taking_orphans():
            socket.send_fds(self._line, [json.dumps(order).encode()], files)
            return int(self._line.recv(32) or _gone())

    def close(self) -> None:
        self._line.close()
        if self._process:
            self._process.wait()


_server: Server | None = None  # of this process, from the first use on


def server() -> Server:
    """The server of this process."""
    global _server
    if _server is None or _server.caller != os.getpid():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", ROOM: "x" * 100_000}
        code = f"from tests.forks import serve; serve({theirs.fileno()})"
        process = subprocess.Popen([sys.executable, "-c", code], env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        _server = Server(ours, process)
    return _server


def serve(number: int) -> None:
    """The server's program.  Runs a job in each process that it forks, and ends it as a program ends."""
    line = socket.socket(fileno=number)
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the processes
    order, files = _forked(line)
    if order["words"][0] == AGENT:
        order, files = _with_a_server(order, files)
    _become(**order, files=files)
    module = order["words"][0]
    for name in (module, "tests.forks", "tests"):
        sys.modules.pop(name, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _forked(line: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns in each process that is asked for, with what it is to be."""
    while True:
        assert len(os.listdir("/proc/self/task")) == 1
        text, files, _, _ = socket.recv_fds(line, ORDER_BYTES, 3)
        if not text:
            os._exit(0)
        named, name = os.pipe()
        started, start = os.pipe()
        if (middle := os.fork()) == 0:
            if process := os.fork():
                os.write(name, str(process).encode())
                os._exit(0)
            for file in (named, name, start):
                os.close(file)
            os.read(started, 1)  # until it is the caller's
            os.close(started)
            line.close()
            return json.loads(text), files
        os.waitpid(middle, 0)
        line.send(os.read(named, 32))
        for file in (named, name, started, start, *files):
            os.close(file)


def _with_a_server(order: dict[str, Any], files: list[int]) -> tuple[dict[str, Any], list[int]]:
    """Returns in a process that has a server of its own, and in each one that this is asked for."""
    global _server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.setsid()  # signals to the caller's group are not for it
        ours.close()
        for file in files:
            os.close(file)
        return _forked(theirs)
    theirs.close()
    _server = Server(ours)

    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = _start_rank
    return order, files


def _start_rank(handler: Any, words: tuple[str, ...], environment: dict[str, str]) -> Popen:
    """What torchrun calls with `python -u -m MODULE ...`."""
    assert words[1:3] == ("-u", "-m")
    return Popen(words[3:], env=environment, stdout=handler._stdout, stderr=handler._stderr, start_new_session=True)


def _become(words: list[str], folder: str, environment: dict[str, str], new_session: bool, files: list[int]) -> None:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    if new_session:
        os.setsid()
    os.chdir(folder)
    _set_environment(environment)
    sys.argv[:] = words
    sys.path[0] = folder
    importlib.invalidate_caches()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _set_environment(environment: dict[str, str]) -> None:
    """Where /proc shows it too: in the place of the one that this process began with."""
    os.environ.clear()
    os.environ.update(environment)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    text = b"".join(f"{name}={value}\0".encode(errors="surrogateescape") for name, value in environment.items())
    assert len(text) <= end - start
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


@contextlib.contextmanager
def _taking_orphans() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _gone() -> str:
    raise RuntimeError("the server of forks has ended; its traceback is above")
