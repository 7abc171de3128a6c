"""What the first and the second signal do."""

import os
import pty
import queue
import signal
import subprocess
import sys

import pytest

from spmd_rl.distributed.stop_signals import StopSignals

LIMIT_S = 30.0


@pytest.fixture
def signals():
    ends: queue.Queue[int] = queue.Queue()
    made = StopSignals(shutdown_s=3600.0, end=ends.put, same_s=0.0)
    made.ends = ends
    yield made
    made.close()


def test_the_first_asks_and_the_second_ends_the_process(signals):
    asked: queue.Queue[int] = queue.Queue()
    signals.on_first(asked.put)
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked.get(timeout=LIMIT_S) == signal.SIGTERM
    assert signals.code == 143
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.ends.get(timeout=LIMIT_S) == 130
    assert signals.code == 143
    assert asked.empty()


def test_what_comes_at_once_after_the_first_is_the_same_stop():
    ends: queue.Queue[int] = queue.Queue()
    asked: queue.Queue[int] = queue.Queue()
    signals = StopSignals(shutdown_s=3600.0, end=ends.put, same_s=3600.0)
    signals.on_first(asked.put)
    os.kill(os.getpid(), signal.SIGTERM)
    assert asked.get(timeout=LIMIT_S) == signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    signals.close()  # once all that came has been heard
    assert asked.empty() and ends.empty()


def test_a_signal_that_came_before_anybody_listened_is_told(signals):
    assert signals.ask(signal.SIGINT)
    asked: list[int] = []
    signals.on_first(asked.append)
    assert asked == [signal.SIGINT]


def test_being_asked_by_another_rank_again_changes_nothing(signals):
    asked: list[int] = []
    signals.on_first(asked.append)
    assert signals.ask(signal.SIGTERM)
    assert not signals.ask(signal.SIGINT)
    assert (asked, signals.code) == ([signal.SIGTERM], 143)
    assert signals.ends.empty()


def test_after_a_stop_by_another_rank_the_first_signal_here_is_the_same_stop(signals):
    assert signals.ask(signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.ends.get(timeout=LIMIT_S) == 130  # the second, not the first
    assert signals.ends.empty()


def test_what_still_runs_after_the_window_is_ended():
    ends: queue.Queue[int] = queue.Queue()
    signals = StopSignals(shutdown_s=0.0, end=ends.put)
    signals.ask(signal.SIGTERM)
    assert ends.get(timeout=LIMIT_S) == 1
    signals.close()


PROGRAM = """
import signal, sys, threading
from spmd_rl.distributed.stop_signals import StopSignals
signals = StopSignals(shutdown_s=60.0, end=lambda code: None)
asked = threading.Event()
signals.on_first(lambda number: asked.set())
print("ready", flush=True)
heard = asked.wait(float(sys.argv[1]))
print("stopping", flush=True)  # nobody reads it, and it is no error
open(sys.argv[2], "w").write(f"{heard} {signals.code}")
"""


def test_a_closed_terminal_asks_and_what_is_then_printed_is_no_error(tmp_path):
    ours, theirs = pty.openpty()
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); {PROGRAM}"  # the tests may run under nohup
    argv = [sys.executable, "-c", program.replace("; \n", "\n"), str(LIMIT_S), str(tmp_path / "said")]
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    with open(ours, "rb", buffering=0, closefd=False) as terminal:
        assert terminal.readline() == b"ready\r\n"
    os.close(ours)  # hangs up: writes fail from here on
    os.kill(process.pid, signal.SIGHUP)
    assert process.wait(LIMIT_S) == 0
    assert (tmp_path / "said").read_text() == "True 129"


def test_under_nohup_a_hangup_is_nothing(tmp_path):
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {PROGRAM}".replace("; \n", "\n")
    argv = [sys.executable, "-c", program, "0.2", str(tmp_path / "said")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    os.kill(process.pid, signal.SIGHUP)
    process.communicate(timeout=LIMIT_S)
    assert (tmp_path / "said").read_text() == "False 0"
