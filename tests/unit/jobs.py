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


def parent_id():
    return os.getppid()


def die():
    os._exit(7)


def not_a_number():
    return float("nan")


def fork_and_hang(path):
    """Write the ids of two children that hang, one of them in a session of its own, then hang."""
    fork_and_tell(path)
    sleep_for_ever()


def fork_and_die(path):
    fork_and_tell(path)
    os._exit(7)


def fork_and_tell(path):
    children = [os.fork()]
    if children[0]:
        children.append(os.fork())
    if children[-1] == 0:
        if len(children) == 2:
            os.setsid()
        time.sleep(120.0)
        os._exit(0)
    with open(path, "w") as file:
        print(*children, file=file)
