"""Functions that the tests of workers run in other processes."""

import os
import signal
import time


def add(a, b):
    print("said on the way")  # must not reach the answer
    return a + b


def sleep_for_ever(*_):
    while True:
        time.sleep(3600)


def spin_without_signals(*_):
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        pass


def use_an_alarm():
    """As verifiers do that time themselves out; fails outside a main thread."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(60)
    signal.alarm(0)
    return "ok"


def own_id():
    return os.getpid()


def die():
    os._exit(7)


def not_a_number():
    return float("nan")


def fork_and_hang(path):
    """Write the id of a child that hangs, then hang."""
    child = os.fork()
    if child == 0:
        sleep_for_ever()
    with open(path, "w") as file:
        file.write(str(child))
    sleep_for_ever()
