"""Who holds an event loop is named by function, file and line; a loop that turns is not."""

import asyncio
import importlib
import subprocess
import sys
import threading

import pytest

from spmd_rl.diagnostics.loop_watch import TOLD_S, WARNED_S, LoopWatch
from spmd_rl.distributed.liveness import Judge, Mark
from spmd_rl.distributed.world import TELL_STACK

SOURCE = """
import threading
started, held = threading.Event(), threading.Event()

def reward(how):
    globals()[how]()  # reward

def sleep():
    started.set() or held.wait()  # sleep

def spin():
    while started.set() or not held.is_set(): pass  # spin

class Judge:
    def __call__(self):
        started.set() or held.wait()  # method

method = Judge()
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "held_env.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("held_env")


@pytest.mark.parametrize(("how", "function"), [("sleep", "sleep"), ("spin", "spin"), ("method", "__call__")])
def test_the_users_function_that_holds_the_loop_is_named_and_warned_of_once(mine, how, function):
    now = [0.0]
    seen: list[tuple[str, float] | None] = []
    warned: list[str] = []
    mine.started.clear()
    mine.held.clear()

    async def hold() -> None:
        watch = LoopWatch(
            loop=asyncio.get_running_loop(), thread_id=threading.get_ident(), warn=warned.append, clock=lambda: now[0]
        )
        seen.append(watch.look())

        def look() -> None:
            mine.started.wait()
            for seconds in (TOLD_S / 2, TOLD_S, WARNED_S - 1, WARNED_S, WARNED_S + 5, 600.0):
                now[0] = seconds
                seen.append(watch.look())
            mine.held.set()

        looking = threading.Thread(target=look)
        looking.start()
        mine.reward(how)
        looking.join()
        await asyncio.sleep(0)
        now[0] = 700.0
        seen.append(watch.look())

    asyncio.run(hold())
    line = next(number for number, text in enumerate(SOURCE.splitlines(), 1) if text.endswith(f"# {how}"))
    who = f"{function} at {mine.__file__}:{line}"
    assert seen[:2] == [None, None] and seen[-1] is None
    assert seen[2:-1] == [
        (f"{who}, which holds the event loop", seconds)
        for seconds in (TOLD_S, WARNED_S - 1, WARNED_S, WARNED_S + 5, 600.0)
    ]
    assert len(warned) == 1 and warned[0].startswith(f"{who} has held the event loop for 20 s")


def test_it_is_the_rank_that_is_held_that_fails_and_not_one_that_waits_for_it():
    judge = Judge(roles=["inference", "trainer"], heartbeat_timeout_s=20.0, stall_timeout_s=60.0, now=0.0)
    held = {
        "main": ("waiting for rollouts", 61.5),
        "event loop": ("reward at /u/e.py:12, which holds the event loop", 61.0),
    }
    marks = {0: Mark(beat=1, doing=held), 1: Mark(beat=1, doing={"main": ("waiting for a batch", 70.0)})}
    rank, text = judge.verdict(marks, now=1.0)
    assert rank == 0
    assert text.startswith("stuck at 'reward at /u/e.py:12, which holds the event loop' for 61 s; rank 0 (inference): ")


HOLDS = """
import re
from spmd_rl.distributed.world import tell_stack_when_asked
tell_stack_when_asked()
def reward():
    print("held", flush=True)
    re.match(r"(a+)+$", "a" * 60 + "b")
reward()
"""


def test_who_holds_the_interpreter_itself_still_writes_its_stack_when_asked():
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        assert rank.stdout.readline() == b"held\n"
        rank.send_signal(TELL_STACK)
        lines = [rank.stderr.readline()]
        while not lines[-1].endswith(b" in <module>\n"):  # the signal may come before the match begins
            lines.append(rank.stderr.readline())
        rank.kill()
    assert lines[0].startswith(b"Stack") and any(line.endswith(b" in reward\n") for line in lines)
