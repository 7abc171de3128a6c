"""What the first and the second signal do."""

import os
import queue
import signal

import pytest

from spmd_rl.stop_signals import StopSignals

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
