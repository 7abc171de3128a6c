"""A module of which the first use takes long, for the tests of workers."""

import time

warmed = 0


def warm_up():
    global warmed
    time.sleep(0.7)
    warmed += 1


def times_warmed():
    return warmed
