"""Finished groups in, batches of exactly B rollouts out.

`add` judges a group: advantages over its usable members, then the filters.  A group that is kept waits for its batch;
any other is given up whole.  A member that failed or has no token to train on is not usable: it moves nothing,
but its slot is consumed with its group.  `next_batch(n)` forms batch n from the groups that come next under the order,
or says None: not yet.  Batches are sorted by ticket.

With a cap M enforced by waiting, batch n is formed only if afterwards, for every d >= n, the unconsumed slots due by d
(oldest version + M; while running, admission version + M) number at most (d - n)·B; groups needed for that go first.
With a cap enforced by dropping, `expire(n)` gives up what batch n could not take any more.

Promises: every trained token is at most `bound.age` versions old, asserted at consumption with all numbers; B slots
given up in a row count as an empty batch; after too many of those `still_teaches` says no.  A resumed run may find
more, or older, than its settings admit: the last batch that may train each such group is computed (`restore`), said
(`transition`) and asserted.
Knows nothing of queues, engines, weights or the gate: whoever calls it tells the gate.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from spmd_rl.config.age_bound import Bound
from spmd_rl.objective.advantages import BatchStage, has_spread
from spmd_rl.orchestrator.order import Order
from spmd_rl.types import NO_VERSION, Batch, Group, GroupWork, GuardError, Rollout

KEPT, SKIPPED = "kept", "skipped"
SOLVED = 0.9  # of the groups that teach nothing: when so many are solved, the tasks are
Filter = Callable[[Group, np.ndarray], bool]  # (group, usable [k] bool) -> True: give the group up


def zero_spread(group: Group, usable: np.ndarray) -> bool:
    """Equal rewards teach nothing, rounding aside; a single rollout has no spread to look at."""
    rewards = [r.reward for r, use in zip(group.rollouts, usable, strict=True) if use]
    return len(group.rollouts) > 1 and not has_spread(np.array(rewards))


@dataclass(frozen=True, kw_only=True)
class Expired:
    """What batch n could no longer take."""

    finished: list[Group]  # given up, already out of the sink
    running: list[GroupWork]  # to be aborted; each still arrives at `add`, which gives it up


class TrainSink:
    """See the module."""

    def __init__(
        self,
        *,
        batch_size: int,
        group_size: int,
        advantages: Callable[[np.ndarray, np.ndarray], np.ndarray],  # rewards [k], usable [k] bool -> [k] float32
        batch_advantages: BatchStage | None = None,  # over a whole batch
        shaped_reward: Callable[[Rollout], float] = lambda rollout: rollout.reward,  # what advantages are made of
        trains: Callable[[Rollout], bool] = lambda rollout: True,  # False: the rollout is not usable
        order: Order,
        bound: Bound,
        over_age: str = "wait",  # "wait" | "drop"; read where the bound has a cap
        filters: Mapping[str, Filter] | None = None,  # reason -> filter; None = zero_spread, {} = none
        max_empty_batches: int | None = None,  # in a row, before `still_teaches` says no; None = any number
        solved_at: float = 1.0,  # least reward of a solved task
    ) -> None:
        if batch_size % group_size:
            raise ValueError(f"batch_size = {batch_size} is not a multiple of group_size = {group_size}")
        self.batch_size, self.group_size, self.bound = batch_size, group_size, bound
        self._advantages, self._batch_advantages, self._order = advantages, batch_advantages, order
        self._shaped_reward, self._trains = shaped_reward, trains
        self._filters = {"zero_spread": zero_spread} if filters is None else dict(filters)
        self._max_empty_batches = max_empty_batches
        self._wait = bound.cap is not None and over_age == "wait"
        self._drop = bound.cap is not None and over_age == "drop"
        self._running: dict[int, GroupWork] = {}  # by first ticket, in order of admission
        self._finished: dict[int, tuple[Group, int]] = {}  # by first ticket: kept, with its oldest version
        self._recorded: deque[Batch] = deque()  # batches of a resumed run, in their recorded composition
        self._next_index: int | None = None
        self._due: Counter[int] = Counter()  # unconsumed slots by deadline; kept where the cap waits
        self._due_finished: Counter[int] = Counter()  # those of them that are finished
        self._last_batch: dict[int, int] = {}  # by first ticket, of restored groups that may be over the bound of now
        self._old_age, self._old_until = 0, -1  # the most that any of them may be, and the last batch that may hold one
        self.num_taken_apart = 0  # batches of a resumed run
        self._aborted: set[int] = set()  # first tickets of running groups that `expire` gave up
        self._solved_at = solved_at
        self._barren = _Barren()

    @property
    def num_waiting(self) -> int:
        """Slots of kept groups that are in no batch yet."""
        return len(self._finished) * self.group_size + len(self._recorded) * self.batch_size

    @property
    def num_ready(self) -> int:
        """Slots of kept groups that the order would let into a batch now."""
        return self._order.num_ready * self.group_size

    @property
    def may_form(self) -> bool:
        """False where `next_batch` would surely say None."""
        return bool(self._recorded) or len(self._finished) * self.group_size >= self.batch_size

    def usable(self, rollout: Rollout) -> bool:
        """Whether it has something to train."""
        return not rollout.failed and rollout.num_trainable > 0 and self._trains(rollout)

    def advantages_of(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """[k] float32 of one group, by its rewards."""
        usable = self._usable(rollouts)
        rewards = np.array([self._shaped_reward(r) for r in rollouts], np.float64)
        return np.where(usable, self._advantages(rewards, usable), 0).astype(np.float32)

    def batch_advantages_of(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """[B] float32 of one batch, group after group, by its rewards."""
        size = self.group_size
        groups = [self.advantages_of(rollouts[first : first + size]) for first in range(0, len(rollouts), size)]
        return self._of_batch(rollouts, np.concatenate(groups))

    def _of_batch(self, rollouts: Sequence[Rollout], advantages: np.ndarray) -> np.ndarray:
        if self._batch_advantages is None:
            return advantages
        num_tokens = np.fromiter((r.num_trainable for r in rollouts), np.int64, len(rollouts))
        return self._batch_advantages(advantages, self._usable(rollouts), num_tokens)

    def _usable(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        return np.fromiter(map(self.usable, rollouts), np.bool_, len(rollouts))

    def admitted(self, work: GroupWork) -> None:
        """A group was admitted (or is running again after a resume): in order of tickets."""
        self._running[work.first_ticket] = work
        self._order.admitted(work.first_ticket)
        if self._wait:
            self._due[self._deadline(work.first_ticket, work.version)] += work.size

    def add(self, group: Group) -> str:
        """KEPT, or why the group is given up.  Sets its advantages."""
        work = self._running.pop(group.first_ticket)
        if self._wait:
            self._due[self._deadline(work.first_ticket, work.version)] -= work.size
        usable = self._usable(group.rollouts)
        oldest = _oldest(group)
        if oldest < work.version:
            raise RuntimeError(
                f"group {group.group_id} (tickets from {group.first_ticket}) was admitted at version {work.version} "
                f"and sampled by version {oldest}: an engine started it too early"
            )
        verdict = self._judge(group, usable, oldest)
        if verdict == KEPT:
            group.advantages = self.advantages_of(group.rollouts)
            teaches = self._batch_advantages is not None or bool(group.advantages.any())
            self._keep(group, oldest)
        else:
            teaches = False
            self._order.gone(group.first_ticket)
        if not teaches:
            if verdict not in ("over_age", SKIPPED):
                self._barren.add(group, verdict, self._solved_at)
        else:
            self._barren = _Barren()
        return verdict

    def still_teaches(self) -> bool:
        """False once nothing is left to learn: all that came for max_empty_batches is solved.

        GuardError where it is not, which is hopeless.
        """
        most, barren = self._max_empty_batches, self._barren
        if most is None or barren.slots < most * self.batch_size:
            return True
        if barren.is_solved:
            return False
        raise GuardError(f"{most} empty batches in a row, {barren}: check the environment and its reward")

    @property
    def barren(self) -> str:
        """What was given up since something could last be trained, in words."""
        return str(self._barren)

    def next_batch(self, index: int) -> Batch | None:
        """Batch `index`, which trains version `index`; None while it cannot be formed yet."""
        if self._next_index is not None and index != self._next_index:
            raise RuntimeError(f"batch {index} asked for, batch {self._next_index} comes next")
        if self._recorded:
            batch = self._recorded.popleft()
            if batch.index != index:
                raise RuntimeError(f"batch {index} asked for, the resumed run recorded batch {batch.index}")
        elif not self.may_form:
            return None
        else:
            groups = self._choose(index)
            if groups is None:
                return None
            for group in groups:
                _, oldest = self._finished.pop(group.first_ticket)
                if self._wait:
                    deadline = self._deadline(group.first_ticket, oldest)
                    self._due[deadline] -= self.group_size
                    self._due_finished[deadline] -= self.group_size
            groups.sort(key=lambda group: group.first_ticket)
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            advantages = np.concatenate([group.advantages for group in groups])
            batch = Batch(index=index, rollouts=rollouts, advantages=self._of_batch(rollouts, advantages))
        self._assert_consumable(batch)
        self._next_index = index + 1
        return batch

    @property
    def _cap(self) -> int:
        assert self.bound.cap is not None  # or neither waits nor drops
        return self.bound.cap

    def expire(self, index: int) -> Expired:
        """Where the cap drops: give up what batch `index` may no longer take.  To be called whenever it rises."""
        if not self._drop:
            return Expired(finished=[], running=[])
        oldest_allowed = index - self._cap
        finished = [group for group, oldest in self._finished.values() if oldest < oldest_allowed]
        for group in finished:
            del self._finished[group.first_ticket]
            self._order.gone(group.first_ticket)
        running = []
        for work in self._running.values():  # versions ascend with tickets
            if work.version >= oldest_allowed:
                break
            if work.first_ticket not in self._aborted:
                running.append(work)
        self._aborted.update(work.first_ticket for work in running)
        self._next_index = index
        return Expired(finished=finished, running=running)

    def clear(self) -> None:
        """Forget the kept groups: the run is over."""
        for first_ticket in self._finished:
            self._order.gone(first_ticket)
        self._finished.clear()
        self._due.clear()
        self._due_finished.clear()

    def snapshot(self) -> tuple[list[Group], list[Batch]]:
        """Kept groups in order of completion, and batches still in recorded form."""
        return [group for group, _ in self._finished.values()], list(self._recorded)

    def restore(
        self,
        *,
        index: int,  # of the next batch = the version resumed
        next_ticket: int,  # of groups to come
        groups: Sequence[Group],  # kept before, in order of completion
        batches: Sequence[Batch],  # formed before and untrained: index, index + 1, …
        unfinished: Sequence[GroupWork],  # as the dispatcher will submit them again
    ) -> None:
        """Into a fresh sink.  Nothing is judged again, and ages count on.

        Advantages are as the settings of now have them: equal to the bit where they have not changed.
        Formed batches are trained as they are, unless they are of another size or hold what the cap drops: then they
        are taken apart into their groups.
        """
        batches = sorted(batches, key=lambda batch: batch.index)
        if not all(self._as_it_is(batch) for batch in batches):
            groups = [group for batch in batches for group in _groups(batch)] + list(groups)
            self.num_taken_apart, batches = len(batches), []
        self._recorded.extend(batches)
        self._next_index = index
        oldest = {group.first_ticket: _oldest(group) for group in groups}
        oldest |= {work.first_ticket: work.version for work in unfinished}
        last_batch = self._last_batches(index + len(batches), oldest, next_ticket)
        for batch in batches:
            batch.advantages = self.batch_advantages_of(batch.rollouts)
            formed = {group.first_ticket: _oldest(group) for group in _groups(batch)}
            oldest |= formed
            last_batch |= dict.fromkeys(formed, batch.index)
        most = self.bound.age
        if most is not None:
            self._last_batch = {t: batch for t, batch in last_batch.items() if batch > oldest[t] + most}
            self._old_age = max((batch - oldest[t] for t, batch in self._last_batch.items()), default=most)
            self._old_until = max(self._last_batch.values(), default=-1)
        works = {work.first_ticket: work for work in unfinished}
        for first_ticket in sorted([*works, *(group.first_ticket for group in groups)]):
            if first_ticket in works:
                self.admitted(works[first_ticket])
            else:
                self._order.admitted(first_ticket)
        for group in groups:
            if len(group.rollouts) != self.group_size:
                raise RuntimeError(f"restored group of {len(group.rollouts)}, group_size = {self.group_size}")
            group.advantages = self.advantages_of(group.rollouts)
            self._keep(group, _oldest(group))

    def age_bound_at(self, index: int) -> int | None:
        """What is asserted of batch `index`: above `bound.age` while a resumed run trains what it could not admit."""
        return self._old_age if index <= self._old_until else self.bound.age

    @property
    def transition(self) -> str:
        """What a resumed run says of what it found, "" where the bound of now holds for all of it."""
        if not self._last_batch:
            return ""
        return (
            f"age ≤ {self._old_age} up to batch {self._old_until} for {len(self._last_batch) * self.group_size} "
            "rollouts of the checkpoint, which holds more than the settings of now admit; for all that is admitted "
            f"from now on {self.bound.line}"
        )

    def _as_it_is(self, batch: Batch) -> bool:
        if len(batch.rollouts) != self.batch_size:
            return False
        return not self._drop or all(_oldest(group) + self._cap >= batch.index for group in _groups(batch))

    def _last_batches(self, index: int, oldest: Mapping[int, int], next_ticket: int) -> dict[int, int]:
        """By first ticket: which batch trains each of these waiting groups at the latest, `index` being the next.

        Where the cap waits, oldest first; a group that is within the cap in that order keeps it.  Else by the order;
        at S = 0 groups to come join them only in the last of their batches.
        """
        if self._wait:
            line = sorted(oldest, key=lambda first_ticket: (oldest[first_ticket], first_ticket))
            return {ticket: index + place * self.group_size // self.batch_size for place, ticket in enumerate(line)}
        line = sorted(oldest)
        before = self._order.most_before(line, self.group_size, next_ticket)
        if self.bound.next_batch_only:
            others = (len(line) - 1) * self.group_size
            before = [min(others, most) for most in before or [others] * len(line)]
        latest = {} if before is None else {t: index + b // self.batch_size for t, b in zip(line, before, strict=True)}
        return {t: min(batch, oldest[t] + self._cap) for t, batch in latest.items()} if self._drop else latest

    def _deadline(self, first_ticket: int, oldest: int) -> int:
        """The batch that may take a group last, where the cap waits."""
        return max(oldest + self._cap, self._last_batch.get(first_ticket, 0))

    def _judge(self, group: Group, usable: np.ndarray, oldest: int) -> str:
        late = self._drop and self._next_index is not None and oldest + self._cap < self._next_index
        if late or group.first_ticket in self._aborted:
            self._aborted.discard(group.first_ticket)
            return "over_age"
        if usable.sum() < min(2, len(usable)):
            num_failed = sum(r.failed for r in group.rollouts)
            if 2 * sum(r.skipped for r in group.rollouts) > num_failed:
                return SKIPPED
            return "failed" if 2 * num_failed >= (~usable).sum() else "untrainable"
        return next((reason for reason, gives_up in self._filters.items() if gives_up(group, usable)), KEPT)

    def _keep(self, group: Group, oldest: int) -> None:
        self._finished[group.first_ticket] = (group, oldest)
        self._order.finished(group, oldest)
        if self._wait:
            deadline = self._deadline(group.first_ticket, oldest)
            self._due[deadline] += self.group_size
            self._due_finished[deadline] += self.group_size

    def _choose(self, index: int) -> list[Group] | None:
        """B / G groups, still listed as finished, but gone from the order; None: not yet."""
        num = self.batch_size // self.group_size
        if not self._wait:
            return self._order.take(num) if self._order.num_ready >= num else None
        needs = self._needs(index)
        if needs is None:
            return None
        if not needs:
            return self._order.take(num) if self._order.num_ready >= num else None
        chosen: dict[int, Group] = {}
        preference = self._order.preference()
        for deadline, must in needs:
            for group in preference:
                if len(chosen) * self.group_size >= must:
                    break
                if self._deadline(group.first_ticket, self._finished[group.first_ticket][1]) <= deadline:
                    chosen.setdefault(group.first_ticket, group)
        for group in self._order.ready():
            if len(chosen) == num:
                break
            chosen.setdefault(group.first_ticket, group)
        if len(chosen) < num:
            return None
        for first_ticket in chosen:
            self._order.gone(first_ticket)
        return list(chosen.values())

    def _needs(self, index: int) -> list[tuple[int, int]] | None:
        """(deadline d, slots due by d that batch `index` must take), where that is any; None: they still run."""
        needs, due, finished = [], 0, 0
        for deadline in sorted(self._due):
            if not self._due[deadline]:
                del self._due[deadline]
                self._due_finished.pop(deadline, None)
                continue
            due += self._due[deadline]
            finished += self._due_finished[deadline]
            must = due - max(0, deadline - index) * self.batch_size
            if must > self.batch_size:
                raise RuntimeError(
                    f"{due} slots are due by batch {deadline}, of which batch {index} would have to take {must} > "
                    f"B = {self.batch_size}; max_age = {self.bound.cap}, slots by deadline {dict(self._due)}"
                )
            if must > finished:
                return None
            if must > 0:
                needs.append((deadline, must))
        return needs

    def _assert_consumable(self, batch: Batch) -> None:
        if len(batch.rollouts) != self.batch_size or len(batch.advantages) != self.batch_size:
            raise RuntimeError(f"batch {batch.index} has {len(batch.rollouts)} rollouts, B = {self.batch_size}")
        most = self.bound.age
        for rollout in batch.rollouts:
            head = rollout.head
            if head == NO_VERSION or rollout.failed:
                continue
            age = batch.index - head
            late = most is not None and age > most and batch.index > self._last_batch.get(_first_ticket(rollout), -1)
            if age < 0 or late:
                raise RuntimeError(
                    f"batch {batch.index} would train rollout {rollout.ticket} at age {age}, bound: {self.bound.line}; "
                    f"head {head}, tail {rollout.tail}, admitted at version {rollout.admission_version}, finished at "
                    f"{rollout.finished_version}, group {rollout.group_id}, B {self.batch_size}, G {self.group_size}, "
                    f"slots waiting {self.num_waiting}, groups running {len(self._running)}"
                )


def _first_ticket(rollout: Rollout) -> int:
    return rollout.ticket - rollout.sample


def _groups(batch: Batch) -> list[Group]:
    """The groups that a batch was formed of, in order of tickets."""
    members: dict[int, list[Rollout]] = {}
    for rollout in batch.rollouts:
        members.setdefault(_first_ticket(rollout), []).append(rollout)
    return [
        Group(
            group_id=rollouts[0].group_id,
            first_ticket=first_ticket,
            admission_version=rollouts[0].admission_version,
            rollouts=rollouts,
        )
        for first_ticket, rollouts in members.items()
    ]


def _oldest(group: Group) -> int:
    """Oldest version that sampled for the group; its admission version where none did."""
    return min((r.head for r in group.rollouts if r.head != NO_VERSION), default=group.admission_version)


class _Barren:
    """What was given up since something could last be trained."""

    def __init__(self) -> None:
        self.slots, self._judged, self._sum, self._sum_squares = 0, 0, 0.0, 0.0
        self._verdicts: Counter[str] = Counter()
        self._num_solved = 0  # groups whose members are all solved
        self._error = ""

    def add(self, group: Group, verdict: str, solved_at: float) -> None:
        self.slots += len(group.rollouts)
        self._verdicts["zero_advantage" if verdict == KEPT else verdict] += 1
        self._num_solved += all(not r.failed and r.reward >= solved_at for r in group.rollouts)
        for rollout in group.rollouts:
            if rollout.failed:
                self._error = rollout.error or self._error
            else:
                self._judged += 1
                self._sum += rollout.reward
                self._sum_squares += rollout.reward**2

    @property
    def is_solved(self) -> bool:
        """Nine of ten groups, or more, are solved by all their members."""
        return self._num_solved >= SOLVED * self._verdicts.total() > 0

    def __str__(self) -> str:
        judged = max(1, self._judged)
        mean = self._sum / judged
        spread = max(0.0, self._sum_squares / judged - mean**2) ** 0.5
        reward = f"reward mean {mean:.4g}, spread {spread:.4g}" if self._judged else "no reward"
        groups = ", ".join(f"{count} {verdict}" for verdict, count in self._verdicts.most_common())
        solved = f", {self._num_solved} of them solved" if self._num_solved else ""
        error = f"; last error: {self._error}" if self._error else ""
        return f"{self.slots} rollouts in groups {groups}{solved}; {reward}{error}"
