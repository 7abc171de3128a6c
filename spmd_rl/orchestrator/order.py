"""In which order finished groups are trained.

An order is told of every group that is admitted, finishes, or is gone (trained or given up before its turn), in that
life's order, and says which finished groups come next:

    completion   whatever finished first
    oldest       oldest version first
    admission    ticket order with look-ahead w: with h the lowest ticket that is neither trained nor given up, a group
                 may be taken if it is the group of h or all its tickets are below h + w.  Later tickets of the window
                 that are done with still occupy it; it moves only when h is done with.

In `admission` a finished group that may be taken counts as done with at once ("ready"): ready groups are taken lowest
ticket first, which takes the same groups as deciding anew each time, at O(log n) an event.

Knows nothing of batches, ages or the gate.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from spmd_rl.types import Group


class Order(Protocol):
    @property
    def num_ready(self) -> int:
        """Finished groups that may be taken now."""

    def admitted(self, first_ticket: int) -> None: ...

    def finished(self, group: Group, oldest: int) -> None:
        """`oldest` = the oldest version in the group."""

    def gone(self, first_ticket: int) -> None:
        """Trained out of turn, or given up, at any time after its admission."""

    def take(self, num: int) -> list[Group]:
        """The next `num` ready groups, which are then gone."""

    def ready(self) -> list[Group]:
        """All ready groups, in order."""

    def preference(self) -> list[Group]:
        """All finished groups, ready or not, in order."""

    def most_before(self, line: Sequence[int], size: int, next_ticket: int) -> list[int] | None:
        """Slots that may be trained before each of these waiting groups at most, those of groups to come included.

        `line` holds first tickets of groups of `size`, ascending; groups to come have tickets from `next_ticket` on.
        None: nothing limits them.
        """


class Completion:
    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}

    @property
    def num_ready(self) -> int:
        return len(self._groups)

    def admitted(self, first_ticket: int) -> None:
        pass

    def finished(self, group: Group, oldest: int) -> None:
        self._groups[group.first_ticket] = group

    def gone(self, first_ticket: int) -> None:
        self._groups.pop(first_ticket, None)

    def take(self, num: int) -> list[Group]:
        groups = list(islice(self._groups.values(), num))
        for group in groups:
            del self._groups[group.first_ticket]
        return groups

    def ready(self) -> list[Group]:
        return list(self._groups.values())

    preference = ready

    def most_before(self, line: Sequence[int], size: int, next_ticket: int) -> list[int] | None:
        return None


class Oldest:
    def __init__(self) -> None:
        self._groups: dict[int, tuple[int, Group]] = {}
        self._heap: list[tuple[int, int]] = []  # (oldest version, first ticket); those gone are skipped

    @property
    def num_ready(self) -> int:
        return len(self._groups)

    def admitted(self, first_ticket: int) -> None:
        pass

    def finished(self, group: Group, oldest: int) -> None:
        self._groups[group.first_ticket] = (oldest, group)
        heapq.heappush(self._heap, (oldest, group.first_ticket))

    def gone(self, first_ticket: int) -> None:
        self._groups.pop(first_ticket, None)
        if len(self._heap) > 2 * len(self._groups) + 64:
            self._heap = sorted((oldest, ticket) for ticket, (oldest, _) in self._groups.items())

    def take(self, num: int) -> list[Group]:
        groups: list[Group] = []
        while len(groups) < num:
            _, first_ticket = heapq.heappop(self._heap)
            if first_ticket in self._groups:
                groups.append(self._groups.pop(first_ticket)[1])
        return groups

    def ready(self) -> list[Group]:
        return [group for _, _, group in sorted((o, t, g) for t, (o, g) in self._groups.items())]

    preference = ready

    def most_before(self, line: Sequence[int], size: int, next_ticket: int) -> list[int] | None:
        return None


class Admission:
    def __init__(self, window: int) -> None:
        self._window = window
        self._line: deque[int] = deque()  # first tickets, ascending; the front is h
        self._done: set[int] = set()  # those in the line that are ready, trained or given up
        self._early: dict[int, Group] = {}  # finished, may not be taken yet
        self._early_heap: list[int] = []
        self._ready: dict[int, Group] = {}
        self._ready_heap: list[int] = []

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def admitted(self, first_ticket: int) -> None:
        if self._line and first_ticket <= self._line[-1]:
            raise RuntimeError(f"ticket {first_ticket} admitted after {self._line[-1]}")
        self._line.append(first_ticket)

    def finished(self, group: Group, oldest: int) -> None:
        self._early[group.first_ticket] = group
        heapq.heappush(self._early_heap, group.first_ticket)
        self._move()

    def gone(self, first_ticket: int) -> None:
        if self._ready.pop(first_ticket, None) is None:
            self._early.pop(first_ticket, None)
            self._done.add(first_ticket)
            self._move()

    def take(self, num: int) -> list[Group]:
        groups: list[Group] = []
        while len(groups) < num:
            group = self._ready.pop(heapq.heappop(self._ready_heap), None)
            if group is not None:
                groups.append(group)
        return groups

    def ready(self) -> list[Group]:
        return [self._ready[ticket] for ticket in sorted(self._ready)]

    def preference(self) -> list[Group]:
        finished = self._ready | self._early
        return [finished[ticket] for ticket in sorted(finished)]

    def most_before(self, line: Sequence[int], size: int, next_ticket: int) -> list[int] | None:
        """All lower tickets, and the groups that lie in the window while the group itself is the lowest open one."""
        most = []
        for place, first in enumerate(line):
            past = first + self._window - size  # first tickets up to it may overtake
            waiting = bisect_left(line, past + 1, lo=place + 1) - place - 1
            coming = max(0, past - next_ticket + size) // size
            most.append((place + waiting + coming) * size)
        return most

    def _move(self) -> None:
        """Make ready what may be taken, which moves h, which may make more ready."""
        while True:
            while self._line and self._line[0] in self._done:
                self._done.discard(self._line.popleft())
            while self._early_heap and self._early_heap[0] not in self._early:
                heapq.heappop(self._early_heap)
            if not self._early_heap:
                return
            first, lowest = self._early_heap[0], self._line[0]
            if first != lowest and self._early[first].tickets[-1] >= lowest + self._window:
                return
            heapq.heappush(self._ready_heap, heapq.heappop(self._early_heap))
            self._ready[first] = self._early.pop(first)
            self._done.add(first)


def make_order(name: str, window: int = 1) -> Order:
    orders: dict[str, Callable[[], Order]] = {
        "completion": Completion,
        "oldest": Oldest,
        "admission": lambda: Admission(window),
    }
    return orders[name]()
