"""Which engine a group goes to: all of it to the one with the fewest rollouts in flight.

So an engine that is slower gets less, and the members of a group find their prompt where the first left it.
Given the ranks that lead engines, and how to reach them.  Knows nothing of what the rollouts are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from spmd_rl.packing.messages import CancelGroup, Message, StartGroup
from spmd_rl.types import GroupWork, Rollout


class EnginePool:
    """`submit` a group, `cancel` it, and say of each rollout that it `ended`."""

    def __init__(
        self,
        *,
        engines: Iterable[int],
        send: Callable[[int, Message], None],
    ) -> None:
        self.in_flight = dict.fromkeys(engines, 0)  # rollouts, by engine
        self.ended_by = dict.fromkeys(engines, 0)  # rollouts so far, by engine
        self._send = send
        self._engine_of: dict[tuple[str, int], int] = {}  # by purpose and group, in flight
        self._left: dict[tuple[str, int], int] = {}  # their members that have not ended

    def submit(self, work: GroupWork) -> None:
        engine = min(self.in_flight, key=self.in_flight.__getitem__)
        self.in_flight[engine] += work.size
        self._engine_of[work.purpose, work.group_id] = engine
        self._left[work.purpose, work.group_id] = work.size
        self._send(engine, StartGroup(work=work))

    def cancel(self, work: GroupWork) -> None:
        cancel = CancelGroup(first_ticket=work.first_ticket, size=work.size, purpose=work.purpose)
        self._send(self._engine_of[work.purpose, work.group_id], cancel)

    def ended(self, rollout: Rollout) -> None:
        key = (rollout.purpose, rollout.group_id)
        engine = self._engine_of[key]
        self.in_flight[engine] -= 1
        self.ended_by[engine] += 1
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key], self._engine_of[key]
