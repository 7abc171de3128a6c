"""Runs a test function on several ranks: real processes, real gloo, one line.

    assert run_ranks(rank_sum, 2, 10) == [11, 11]        # rank_sum(rank, 10), default gloo group started
    run_worlds(my_check, 1, 2, "x")                      # my_check(world, "x") on 1 inference + 2 trainer ranks

The function lives at the top of a module, for it is sent by name.  What it returns is pickled and comes back, by rank.
The first rank that fails ends all ranks, and its traceback is the error; a rank that is still at work after
`timeout_s` reports the stacks of all its threads.  Ranks end by `os._exit`, since threads blocked in gloo make the
interpreter's own end abort.  The store is kept by the calling process, as torchrun's agent does, and outlives a rank.
Processes come from one fork server that has imported torch and the package: its first start takes seconds, a test
after it little.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.forks import PRELOADED

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCHELASTIC_USE_AGENT_STORE": "True"}
_LOCALHOST = "127.0.0.1"
SETTLE_S = 0.5  # the end of a dead rank may be heard after that of one which had waited for it


class RankFailed(AssertionError):
    """One rank raised, died or did not end in time; the text has its traceback."""


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call `fn(rank, *args)` on every rank, its default gloo group started; returns what each rank returned."""
    return _run(_with_group, fn, num_ranks, args, {}, timeout_s)


def run_worlds(
    fn: Callable[..., Any],
    num_inference: int,
    num_trainers: int,
    *args: Any,
    dp_replicate: int = 1,
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    engine_on_rank0: bool = True,
    gpus: bool = False,  # ranks see them
    timeout_s: float = 60.0,
) -> list[Any]:
    """Call `fn(world, *args)` on every rank of a joined world; returns what each rank returned."""
    topology = {
        "num_inference": num_inference,
        "num_trainers": num_trainers,
        "dp_replicate": dp_replicate,
        "tensor_parallel": tensor_parallel,
        "context_parallel": context_parallel,
        "engine_on_rank0": engine_on_rank0,
    }
    return _run(_with_world, fn, num_inference + num_trainers, args, topology, timeout_s, gpus=gpus)


def run_processes(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call `fn(*args)` on every rank with torchrun's variables set and torch.distributed not started."""
    return _run(_with_nothing, fn, num_ranks, args, {}, timeout_s)


def _with_group(fn: Callable[..., Any], rank: int, args: tuple, topology: dict) -> Any:
    import torch.distributed as dist

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    return fn(rank, *args)


def _with_world(fn: Callable[..., Any], rank: int, args: tuple, topology: dict) -> Any:
    from spmd_rl.config.topology import Topology
    from spmd_rl.distributed.world import join, meet

    return fn(join(meet(), Topology(**topology)), *args)


def _with_nothing(fn: Callable[..., Any], rank: int, args: tuple, topology: dict) -> Any:
    return fn(*args)


def _child(
    start: Callable[..., Any],
    fn: Callable[..., Any],
    rank: int,
    num_ranks: int,
    port: int,
    args: tuple,
    topology: dict,
    timeout_s: float,
    gpus: bool,
    answer: Connection,
) -> None:
    os.environ |= {
        **_ENVIRONMENT,
        **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _LOCALHOST,
        "MASTER_PORT": str(port),
    }
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    once = threading.Lock()

    def leave(ok: bool, value: Any, code: int) -> None:
        once.acquire()  # never released: the process ends
        answer.send((ok, time.monotonic(), value))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def too_late() -> None:
        leave(False, f"is still at work after {timeout_s:.0f} s\n{_stacks()}", 1)

    timer = threading.Timer(timeout_s, too_late)
    timer.daemon = True
    timer.start()
    try:
        value = start(fn, rank, args, topology)
    except BaseException:
        leave(False, "failed\n" + traceback.format_exc(), 1)
    leave(True, value, 0)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
    )


def _run(
    start: Callable[..., Any],
    fn: Callable[..., Any],
    num_ranks: int,
    args: tuple,
    topology: dict,
    timeout_s: float,
    *,
    gpus: bool = False,
) -> list[Any]:
    import torch.distributed as dist

    os.environ |= {name: value for name, value in _ENVIRONMENT.items() if name.startswith("OMP")}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "tests.ranks"])
    store = dist.TCPStore(_LOCALHOST, 0, is_master=True, wait_for_workers=False)
    ranks, answers = [], []
    for rank in range(num_ranks):
        answer, far_end = context.Pipe(duplex=False)
        process = context.Process(
            target=_child,
            args=(start, fn, rank, num_ranks, store.port, args, topology, timeout_s, gpus, far_end),
            daemon=True,
        )
        process.start()
        far_end.close()
        ranks.append(process)
        answers.append(answer)
    try:
        return _collect(fn.__name__, ranks, answers, time.monotonic() + timeout_s + 30.0)
    finally:
        for process, answer in zip(ranks, answers, strict=True):
            process.kill()
            process.join()
            process.close()
            answer.close()


def _collect(name: str, ranks: list[Any], answers: list[Connection], deadline: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(ranks):
        waiting = [answer for rank, answer in enumerate(answers) if rank not in values]
        if not wait(waiting, timeout=max(0.0, deadline - time.monotonic())):
            raise RankFailed(f"{name}: ranks {sorted(set(range(len(ranks))) - set(values))} gave no answer in time")
        failures = []  # a cause is in its pipe before its consequences are in theirs: look at all, report the first
        while ready := wait(waiting, timeout=SETTLE_S if failures else 0.0):
            for answer in ready:
                waiting.remove(answer)
                rank = answers.index(answer)
                try:
                    ok, at, value = answer.recv()
                except EOFError:
                    ranks[rank].join()
                    ok, at, value = False, 0.0, f"died with exit code {ranks[rank].exitcode}"
                if ok:
                    values[rank] = value
                else:
                    failures.append((at, f"{name}: rank {rank} {value}"))
        if failures:
            raise RankFailed(min(failures)[1])
    return [values[rank] for rank in range(len(ranks))]
