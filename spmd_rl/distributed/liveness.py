"""Who is alive, who moves, and what failed first: every rank's watch over the whole job.

Each rank has a thread with a store client of its own.  Twice a second it writes what the rank is doing and since when,
and looks for the first failure; two ranks (the first and the last) also judge everybody.  Hence:

- `report`: the first error of the job wins; every rank gets it through `on_failure`, also while its main thread is
  stuck in a collective or a native call.
- A rank that gives no sign of life (stopped, dead, holding the interpreter lock) for `heartbeat_timeout_s`, one that
  works at the same thing for `stall_timeout_s`, or a job in which everybody waits that long, is a failure that says
  who, what it was doing or waiting for, and for how long.  An event loop that does not turn counts as such work, of the
  function that holds it, and is warned of before.
- Losing the store is a failure too: its host is gone or cannot be reached.  Behind a cut link it does not refuse, it
  never answers: a second thread watches over the first.

`on_failure` runs in that thread and should end the process; if it has not after `grace_s`, `end` does.
Knows nothing of groups, queues or what the ranks do.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from spmd_rl.diagnostics.loop_watch import LoopWatch
from spmd_rl.files.disk_watch import DiskWatch
from spmd_rl.types import Disagreement

MAIN = "main"
PATIENCE = 10  # parts of `heartbeat_timeout_s` that pass without an answer; one alone may be a process that was stopped
SILENT = "no sign of life for"
CONSEQUENCE_S = 2.0  # that an error which follows from a lost peer waits for whoever knows which peer
_FAILURE = "liveness/failure"
_LOST_PEER = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|takes no more messages", re.IGNORECASE
)
_GLOO_FRAME = re.compile(r"^\[[^]]*\] |\. This .*", re.DOTALL)  # its source line, and its advice to whoever wrote us


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The first failure of the job."""

    rank: int  # whose it is
    role: str
    text: str  # traceback, or who stood still at what
    found_by: int  # the rank that told the others
    cut_off: bool = False  # the job's store has stopped answering: nobody could be told

    @property
    def silent(self) -> bool:
        """Its rank cannot end by itself."""
        return self.text.startswith(SILENT)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.role}) failed: {self.text}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A rank's sign of life."""

    beat: int  # one more each time
    doing: dict[str, tuple[str, float]]  # thread → what it does, and for how many seconds
    left: bool = False  # in good order


class Judge:
    """Decides from everybody's marks whether somebody is gone or stuck. Pure: time is given."""

    def __init__(self, *, roles: Sequence[str], heartbeat_timeout_s: float, stall_timeout_s: float, now: float) -> None:
        self._roles = roles
        self._heartbeat_timeout_s, self._stall_timeout_s = heartbeat_timeout_s, stall_timeout_s
        self._setting = f"; run.stall_timeout_s = {stall_timeout_s:g}"
        self._marks: dict[int, Mark] = {}
        self._seen = dict.fromkeys(range(len(roles)), now)  # when the mark last changed

    def verdict(self, marks: Mapping[int, Mark], now: float) -> tuple[int, str] | None:
        """(rank, text) of the worst that is wrong, None if all is well; `marks` may lack ranks not heard of yet."""
        for rank, mark in marks.items():
            if mark != self._marks.get(rank):
                self._marks[rank], self._seen[rank] = mark, now
        here = [rank for rank in self._seen if rank not in self._marks or not self._marks[rank].left]
        if not here:
            return None
        silent = max(here, key=lambda rank: now - self._seen[rank])
        if now - self._seen[silent] > self._heartbeat_timeout_s:
            return silent, f"{SILENT} {now - self._seen[silent]:.1f} s; {self._describe(here)}"
        known = [
            (since_s, rank, what)
            for rank in here
            if rank in self._marks
            for what, since_s in self._marks[rank].doing.values()
        ]
        stuck = [entry for entry in known if entry[0] > self._stall_timeout_s and not is_waiting(entry[2])]
        if stuck:
            since_s, rank, what = max(stuck)
            return rank, f"stuck at '{what}' for {since_s:.0f} s; {self._describe(here)}{self._setting}"
        everybody = all(rank in self._marks for rank in here)
        if everybody and known and min(known)[0] > self._stall_timeout_s:
            return max(known)[1], f"everybody waits; {self._describe(here)}{self._setting}"
        return None

    def _describe(self, ranks: Sequence[int]) -> str:
        return "; ".join(f"rank {rank} ({self._roles[rank]}): {self._describe_one(rank)}" for rank in ranks)

    def _describe_one(self, rank: int) -> str:
        if rank not in self._marks:
            return "never heard of"
        doing = self._marks[rank].doing
        return ", ".join(
            f"{f'{thread} ' * (thread != MAIN)}{what} for {since_s:.1f} s" for thread, (what, since_s) in doing.items()
        )


def is_waiting(doing: str) -> bool:
    """What begins with "waiting" is a wait for somebody else."""
    return doing.startswith("waiting")


class Liveness:
    """One rank's part in the watch."""

    def __init__(
        self,
        *,
        store: Store,  # of this start of the job; cloned
        rank: int,
        roles: Sequence[str],  # of all ranks
        on_failure: Callable[[Failure], None],  # called once, in the liveness thread, on every rank
        stall_timeout_s: float,
        heartbeat_timeout_s: float = 20.0,
        interval_s: float = 0.5,
        grace_s: float = 5.0,
        stacks_folder: Path | None = None,  # where each rank leaves the stacks of its threads at a failure
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._store = store.clone()  # type: ignore[attr-defined]  # torch's stubs leave it out
        self._store.set_timeout(timedelta(seconds=heartbeat_timeout_s))
        self._rank, self._roles = rank, tuple(roles)
        self._on_failure, self._end = on_failure, end
        self._interval_s, self._grace_s, self._heartbeat_timeout_s = interval_s, grace_s, heartbeat_timeout_s
        self._stacks_folder = stacks_folder
        self._judge = None
        if rank in (0, len(roles) - 1):
            self._judge = Judge(
                roles=self._roles,
                heartbeat_timeout_s=heartbeat_timeout_s,
                stall_timeout_s=stall_timeout_s,
                now=time.monotonic(),
            )
        self.known: Callable[[], dict[str, object]] = dict  # what this rank can say of the run, for `on_failure`
        self._disk = DiskWatch()
        self._lock = threading.Lock()  # of whoever changes what is being done
        self._doing = {MAIN: ("starting", time.monotonic())}
        self._loop_watch: LoopWatch | None = None
        self._beat = 0
        self._own: Failure | None = None
        self._own_from = 0.0  # when it is told to the others
        self._wake = threading.Event()
        self._closing = False
        self._told = threading.Event()
        self._answered = threading.Event()  # the store has, since the guard last looked
        self._over = threading.Lock()  # taken by whoever ends the watch
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)

    def start(self) -> None:
        """Begin the watch: from here on `on_failure` may be called."""
        self._thread.start()
        threading.Thread(target=self._guard, name="liveness guard", daemon=True).start()

    def progress(self, doing: str, *, thread: str = MAIN, writes: Path | None = None) -> None:
        """A thread of this rank has begun something new.

        Being at it for `stall_timeout_s` is a failure; if the text begins with "waiting", only once everybody waits.
        `writes`: the file or folder that is written meanwhile, by whichever rank; as long as it grows nobody is stuck.
        """
        if writes is None:
            self._disk.end(thread)
        else:
            self._disk.begin(thread, writes)
            doing = f"{doing}, no byte more in {writes}"
        with self._lock:
            self._doing = {**self._doing, thread: (doing, time.monotonic())}

    @contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Within the block this thread writes a file or folder at `path`, beside what its rank does otherwise."""
        name = f"writer {threading.get_ident()}"
        self.progress("writing", thread=name, writes=path)
        try:
            yield
        finally:
            self._disk.end(name)
            with self._lock:
                self._doing = {thread: entry for thread, entry in self._doing.items() if thread != name}

    def reads_back(self, *, thread: str = MAIN) -> None:
        """A piece of what the thread has written was read again."""
        self._disk.tick(thread)

    def watch(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """From here on the event loop, this thread's, is expected to turn; None: no more."""
        role = self._roles[self._rank]
        self._loop_watch = None
        if loop is not None:
            self._loop_watch = LoopWatch(
                loop=loop,
                thread_id=threading.get_ident(),
                warn=lambda text: print(f"warning: rank {self._rank} ({role}): {text}", file=sys.stderr, flush=True),
            )

    def report(self, text: str, *, rank: int | None = None, after_s: float = 0.0) -> None:
        """This rank (or the given one) has failed. Returns when the others can see it, or after `grace_s`.

        With `after_s` another failure that is reported meanwhile is the one that counts.
        """
        due = time.monotonic() + after_s
        if self._own is None or due < self._own_from:
            self._own, self._own_from = self._failure(self._rank if rank is None else rank, text), due
        self._wake.set()
        self._told.wait(self._grace_s)

    def failed(self, error: BaseException) -> None:
        """This rank has failed with an exception; one that only says that some peer is gone waits for a better one."""
        plain = isinstance(error, Disagreement)
        text = str(error) if plain else "".join(traceback.format_exception(error)).rstrip()
        self.report(text, after_s=CONSEQUENCE_S if _LOST_PEER.search(str(error)) else 0.0)

    def lost(self, peer: int, error: Exception) -> None:
        """The way to a peer has broken: the peer is named, unless the error says nothing of a connection."""
        if isinstance(error, ConnectionError) or _LOST_PEER.search(str(error)):
            reason = _GLOO_FRAME.sub("", str(error))
            self.report(f"it no longer answers rank {self._rank} ({type(error).__name__}: {reason})", rank=peer)
        else:
            error.add_note(f"in a message from or for rank {peer}")
            self.failed(error)

    def close(self) -> None:
        """Leave in good order: from here on this rank is not missed."""
        self._closing = True
        self._wake.set()
        self._thread.join(self._grace_s)

    def _run(self) -> None:
        try:
            failure = self._watch()
        except Exception as error:  # the store is gone, and with it every way to tell the others
            failure = self._own or self._failure(self._rank, f"lost the job's store: {type(error).__name__}: {error}")
        self._finish(failure)

    def _guard(self) -> None:
        """Ends the watch when the liveness thread hangs in the store's client, which waits for an answer for ever."""
        missed = 0
        while missed < PATIENCE and not self._over.locked():
            missed = 0 if self._answered.wait(self._heartbeat_timeout_s / PATIENCE) else missed + 1
            self._answered.clear()
        if missed:
            text = f"lost the job's store: no answer for {self._heartbeat_timeout_s:.0f} s, its host cannot be reached"
            self._finish(replace(self._own or self._failure(self._rank, text), cut_off=True))

    def _finish(self, failure: Failure | None) -> None:
        if not self._over.acquire(blocking=False):
            return
        self._told.set()
        self._answered.set()
        if failure is not None:
            timer = threading.Timer(self._grace_s, self._end, (1,))
            timer.daemon = True
            timer.start()
            dumping = threading.Thread(target=self._dump_stacks, name="stacks", daemon=True)
            dumping.start()
            dumping.join(self._grace_s / 2)  # a file system that hangs must not keep the failure from being told
            self._on_failure(failure)

    def _watch(self) -> Failure | None:
        """Until there is a failure, or this rank leaves."""
        while True:
            if self._own is not None and time.monotonic() >= self._own_from:
                return self._tell(self._own)
            leaves = self._closing  # also what the last mark says: `close` may come between the two
            self._write_mark(left=leaves)
            if self._store.check([_FAILURE]):
                return Failure(**json.loads(self._store.get(_FAILURE)))
            if leaves:
                return None
            if self._judge is not None and (verdict := self._judge.verdict(self._read_marks(), time.monotonic())):
                return self._tell(self._failure(*verdict))
            self._answered.set()
            self._wake.wait(self._interval_s)
            if not self._closing:
                self._wake.clear()

    def _tell(self, failure: Failure) -> Failure:
        """Whoever writes first is the failure of the job."""
        return Failure(**json.loads(self._store.compare_set(_FAILURE, "", json.dumps(asdict(failure)))))

    def _failure(self, rank: int, text: str) -> Failure:
        return Failure(rank=rank, role=self._roles[rank], text=text, found_by=self._rank)

    def _write_mark(self, *, left: bool) -> None:
        now = time.monotonic()
        self._beat += 1
        moved = self._disk.moved
        doing = {name: (what, max(0.0, now - max(since, moved(name)))) for name, (what, since) in self._doing.items()}
        if (watch := self._loop_watch) is not None and (held := watch.look()) is not None:
            doing["event loop"] = held
        mark = Mark(beat=self._beat, doing=doing, left=left)
        self._store.set(f"liveness/{self._rank}", json.dumps(asdict(mark)))

    def _read_marks(self) -> dict[int, Mark]:
        keys = [f"liveness/{rank}" for rank in range(len(self._roles))]
        if self._store.check(keys):
            texts = dict(enumerate(self._store.multi_get(keys)))
        else:
            texts = {rank: self._store.get(key) for rank, key in enumerate(keys) if self._store.check([key])}
        return {rank: Mark(**json.loads(text)) for rank, text in texts.items()}

    def _dump_stacks(self) -> None:
        if self._stacks_folder is None:
            return
        try:
            with open(self._stacks_folder / f"stacks-rank{self._rank}.txt", "w") as file:
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError as error:  # a full disk, say
            print(f"no stacks in {self._stacks_folder}: {error}", file=sys.stderr)


class SignalWatch:
    """Calls `received(signal number)` in a thread, also while the main thread is in a wait that cannot be interrupted.

    To be made in the main thread. An ordinary handler would run only after that wait.
    """

    def __init__(
        self,
        *,
        received: Callable[[int], None],
        signals: Sequence[signal.Signals],
    ) -> None:
        self._read_end, self._write_end = socket.socketpair()
        self._write_end.setblocking(False)
        self._received = received
        self._before = {number: signal.signal(number, lambda *_: None) for number in signals}
        self._fd_before = signal.set_wakeup_fd(self._write_end.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Put back what was there before."""
        signal.set_wakeup_fd(self._fd_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._write_end.close()
        self._thread.join()
        self._read_end.close()

    def _run(self) -> None:
        while number := self._read_end.recv(1):
            if number[0] in self._before:
                self._received(number[0])
