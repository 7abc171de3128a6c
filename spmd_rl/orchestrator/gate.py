"""Whether new rollouts may be admitted.  Pure arithmetic on three counters and the policy's version.

    capacity = min(C - running, (S + version + 1)·B - (accepted + running)), in rollouts

The gate counts slots.  A group holds its slots from admission (`admit`) until the whole of it is settled: accepted by
the sink, or given up.  Accepted slots leave by `consume`, exactly B at a time, or by `give_back` when they are dropped
after all.  Between any two calls  accepted + running <= (S + version + 1)·B,  and  version·B <= consumed <= accepted.
Where a resumed run lowered S or C it may start with more than these allow, and admits nothing until it is below.

Mode "ship" limits admission by C and a queue of Q finished rollouts only; S then bounds what is shipped (ship_hold.py).
Under a cap M nothing is admitted there that no batch up to version + M has a place for: accepted + running stay within
(M + version + 1)·B.
Adaptive admission lowers the limit to what keeps the trainer busy (`AdaptiveAdmission`).

While somebody waits for it, it counts for how long C alone said no and for how long the bound did.

Knows nothing of queues, engines or weights.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable

from spmd_rl.orchestrator.policy import Policy

RECENT = 12  # batches that adaptive admission looks back on
FORGET = 0.95  # what a batch's times weigh after the next one


class Gate:
    """One waiter at a time, woken by settle, give_back, consume, close and a new version; O(1) per event at any C."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_staleness: int,
        batch_size: int,
        max_concurrent: int,
        mode: str = "admission",  # "admission" | "ship"
        queue_size: int = 0,  # Q, finished rollouts that the ship gate lets wait
        max_age: int | None = None,  # M, read by the ship gate: under the other one S <= M is the limit
        last_version: int | None = None,  # of the run: nothing is admitted that no batch up to it has a place for
        adaptive: AdaptiveAdmission | None = None,
        defer: Callable[[Callable[[], None]], object] | None = None,  # wakes the waiter; None = at once
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_staleness, self.batch_size, self.max_concurrent = max_staleness, batch_size, max_concurrent
        self.queue_size, self.max_age, self.adaptive = queue_size, max_age, adaptive
        self._last_slot = None if last_version is None else last_version * batch_size
        self.running = 0  # admitted and not settled
        self.accepted = 0  # settled as trainable, since version 0
        self.consumed = 0  # taken into batches, since version 0
        self.given_up = 0  # slots that came back untrained, in this process
        self.admitted_since_update = 0  # less what was given up meanwhile; at most `most_per_version`
        self.closed = False
        self._restored_running = self._restored = 0  # slots that a resumed run began with: running, and all
        self._abandoned = False
        self._policy = policy
        self._room = {"admission": self._room_for_admission, "ship": self._room_for_ship}[mode]
        self._bounded = mode == "admission"
        self._defer = defer or (lambda wake: wake())
        self._waiter: asyncio.Future[None] | None = None
        self._wanted = 0
        self._closed_by = ""  # what says no to who waits
        self._closed_s: dict[str, float] = defaultdict(float)  # up to `_counted_to`
        self._clock, self._counted_to = clock, 0.0
        self._idle_waiter: asyncio.Future[None] | None = None
        self._smallest = 0
        self._waking = False
        if not self._bounded and queue_size + max_concurrent < batch_size:
            raise ValueError(
                f"queue_size + max_concurrent = {queue_size + max_concurrent} is below batch_size = {batch_size}: "
                "the ship gate could never fill a batch"
            )
        policy.on_change(self._version_changed)
        if adaptive is not None:
            adaptive.on_change(self._wake)

    def capacity(self) -> int:
        """min(C - running, room), in rollouts; towards the end of the run no more than is left to train."""
        room = min(self.max_concurrent - self.running, self._room())
        return room if self._last_slot is None else min(room, self._last_slot - self.accepted - self.running)

    @property
    def waiting(self) -> int:
        """Slots that are accepted and not yet trained, in batches or not."""
        return self.accepted - self._policy.version * self.batch_size

    @property
    def limit(self) -> int:
        """(S + version + 1)·B, slots accepted or running at most under the admission gate."""
        return (self.max_staleness + self._policy.version + 1) * self.batch_size

    @property
    def most_per_version(self) -> int:
        """Slots admitted under one version at most, beside those given up under it.

        (S + 1)·B; under the ship gate (S + 2)·B, which batches may take meanwhile, and Q + C.
        """
        if self._bounded:
            return (self.max_staleness + 1) * self.batch_size
        return (self.max_staleness + 2) * self.batch_size + self.queue_size + self.max_concurrent

    async def wait(self, num: int) -> bool:
        """Wait for room for `num` rollouts; False once closed.  Unblocked by any change that makes the room."""
        while not self.closed and self.capacity() < num:
            if self._waiter is not None:
                raise RuntimeError("the gate has one waiter, and a second one came")
            self._waiter, self._wanted = asyncio.get_running_loop().create_future(), num
            self._count_closed()
            try:
                await self._waiter
            finally:
                self._waiter = None
                self._count_closed()
        return not self.closed

    def closed_s(self) -> dict[str, float]:
        """Seconds until now that it was closed to who waited: by "concurrency", C alone, or by the "bound"."""
        of_late = {self._closed_by: self._clock() - self._counted_to}
        return {name: self._closed_s[name] + of_late.get(name, 0.0) for name in ("concurrency", "bound")}

    async def idle(self, num: int) -> None:
        """Wait until nothing runs and not even `num` rollouts may be admitted: all that this version starts has ended.

        Unblocked by settle, give_back, close and abandon.
        """
        self._smallest = num
        if not self._is_idle():
            self._idle_waiter = asyncio.get_running_loop().create_future()
            await self._idle_waiter

    def admit(self, num: int) -> None:
        """Take `num` slots; there must be room."""
        if num > (capacity := self.capacity()):
            raise RuntimeError(f"{num} rollouts admitted into a capacity of {capacity}: {self}")
        self.running += num
        self.admitted_since_update += num
        self._check()
        if self.admitted_since_update > self.most_per_version:
            raise RuntimeError(
                f"{self.admitted_since_update} rollouts admitted in the step of version {self._policy.version}, "
                f"at most {self.most_per_version} may be beside those given up: {self}"
            )

    def settle(self, *, accepted: int = 0, rejected: int = 0) -> None:
        """A whole group ended: its slots stay until they are consumed, or return now."""
        self.running -= accepted + rejected
        self.accepted += accepted
        self.given_up += rejected
        self.admitted_since_update -= rejected
        self._check()
        self._wake()

    def give_back(self, num: int) -> None:
        """Accepted slots that were dropped before they were consumed."""
        self.accepted -= num
        self.given_up += num
        self.admitted_since_update -= num
        self._check()
        self._wake()

    def consume(self) -> None:
        """A batch was formed of exactly B accepted slots."""
        self.consumed += self.batch_size
        self._check()
        self._wake()

    def close(self) -> None:
        """Admit nothing more."""
        self.closed = True
        self._wake()

    def abandon(self) -> None:
        """After `close`: nothing waits any more for what runs."""
        self._abandoned = True
        self._wake()

    def restore(self, *, accepted: int, running: int) -> None:
        """State of a resumed run: accepted = version·B + finished slots, running = slots of unfinished groups."""
        self.accepted, self.running = accepted, running
        self.consumed = self._policy.version * self.batch_size
        self._restored_running, self._restored = running, accepted + running
        self.admitted_since_update = running  # they start again: the first step admits (S + 1)·B with them
        self._check()

    def _version_changed(self) -> None:
        self.admitted_since_update = 0
        self._check()
        self._wake()

    def _room_for_admission(self) -> int:
        room = self.limit - (self.accepted + self.running)
        return room if self.adaptive is None else min(room, int(self.adaptive.limit) - self.waiting - self.running)

    def _room_for_ship(self) -> int:
        room = self.queue_size + self.max_concurrent - (self.accepted - self.consumed + self.running)
        if self.max_age is None:
            return room
        trainable = (self.max_age + self._policy.version + 1) * self.batch_size
        return min(room, trainable - (self.accepted + self.running))

    def _check(self) -> None:
        version, batch_size = self._policy.version, self.batch_size
        if self.consumed < version * batch_size:
            raise RuntimeError(
                f"at version {version} at least {version * batch_size} slots are consumed, the gate counts "
                f"{self.consumed} and would admit {self.capacity()}, bound is (S + 1) * B = "
                f"{(self.max_staleness + 1) * batch_size}: was the gate restored? {self}"
            )
        most_running = max(self.max_concurrent, self._restored_running)
        if not 0 <= self.running <= most_running or self.consumed > self.accepted:
            raise RuntimeError(f"slots do not add up: {self}")
        if self._bounded and self.accepted + self.running > max(self.limit, self._restored):
            raise RuntimeError(f"accepted + running = {self.accepted + self.running} > (S + version + 1)·B: {self}")

    def _count_closed(self) -> None:
        """By what has said no since the last call; nothing does where no more is to be trained in the run."""
        now = self._clock()
        self._closed_s[self._closed_by] += now - self._counted_to
        self._counted_to = now
        last = self._last_slot
        if self._waiter is None or (last is not None and self._wanted > last - self.accepted - self.running):
            self._closed_by = ""
        else:
            self._closed_by = "bound" if self._room() < self._wanted else "concurrency"

    def _is_idle(self) -> bool:
        return self._abandoned or (not self.running and (self.closed or self.capacity() < self._smallest))

    def _wake(self) -> None:
        if self._waiter is not None:
            self._count_closed()
        if self._idle_waiter is not None and self._is_idle():
            self._idle_waiter.set_result(None)
            self._idle_waiter = None
        if self._waiter is None or self._waking or not (self.closed or self.capacity() >= self._wanted):
            return
        self._waking = True
        self._defer(self._release)

    def _release(self) -> None:
        self._waking = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __str__(self) -> str:
        return (
            f"gate at version {self._policy.version}: running {self.running}, accepted {self.accepted}, "
            f"consumed {self.consumed}, S {self.max_staleness}, B {self.batch_size}, C {self.max_concurrent}, "
            f"limit {self.limit}"
        )


class AdaptiveAdmission:
    """The least number of slots in the system that keeps the trainer's idle share under its target.

    It starts at the ceiling, (S + 1)·B.  After every batch, `idle` being the trainer's idle share of late:

        idle < target / 2   limit -= max(0, limit - used - B) / 2 + B · target / 2
        else                limit += 2·B · (idle share of this batch)

    clamped to [B, (S + 1)·B].  `used` is the most, over the last 12 batches, of the slots that did not just lie ready
    (nothing falls until there were 12); with one batch more to train meanwhile they are enough.  What lies ready beyond
    that only ages (Little's law: mean age ≈ limit / B - 1), so half of it goes at once; from there the limit feels its
    way, a hundredth of a batch at a time.  Aiming at half the target leaves room for what the search itself costs.
    """

    def __init__(self, *, max_staleness: int, batch_size: int, target_idle: float) -> None:
        self.most = float((max_staleness + 1) * batch_size)
        self.limit = self.most  # slots accepted or running and not yet trained
        self._batch_size, self._target = batch_size, target_idle
        self._waited_s = self._time_s = 0.0  # of late
        self._used: deque[int] = deque(maxlen=RECENT)
        self._changed: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> None:
        """Have `callback` called whenever the limit may have moved."""
        self._changed = callback

    def restore(self, limit: float) -> None:
        """Of a resumed run, whose S and B may have changed."""
        self.limit = min(max(limit, float(self._batch_size)), self.most)

    def observe(self, *, waited_s: float, busy_s: float, used: int) -> None:
        """The trainer waited for a batch and then worked on it; `used` slots were in it or could not be trained yet."""
        self._used.append(used)
        self._waited_s = FORGET * self._waited_s + waited_s
        self._time_s = FORGET * self._time_s + waited_s + busy_s
        limit = self.limit
        if self._waited_s >= self._target / 2 * self._time_s:
            limit += 2 * self._batch_size * waited_s / max(waited_s + busy_s, 1e-9)
        elif len(self._used) == RECENT:
            spare = limit - max(self._used) - self._batch_size
            limit -= max(0.0, spare) / 2 + self._batch_size * self._target / 2
        self.limit = min(max(limit, float(self._batch_size)), self.most)
        self._changed()
