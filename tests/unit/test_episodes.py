import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from spmd_rl.processes.workers import Workers
from spmd_rl.ranks.episodes import Episodes, seed_of
from spmd_rl.types import Cancelled, Completion, GroupWork, Rollout, Sampling, Task
from tests.unit import jobs

WORK = GroupWork(group_id=3, first_ticket=12, size=2, task=Task(env="e", task_id="t"), version=4)


class TwoTurns:
    """Samples, lets a tool add a token, samples again; raises while `failures` are left."""

    def __init__(self, failures: int = 0, reward: float = 1.0) -> None:
        self.failures, self.reward = failures, reward

    async def rollout(self, task: Task, generate: Callable) -> Rollout:
        rollout = Rollout(env="", task_id="")
        rollout.append([1])
        for _ in range(2):
            completion = await generate(rollout.token_ids)
            rollout.append(completion.token_ids, completion.logprobs, completion.versions)
            rollout.append([2])
        if self.failures:
            self.failures -= 1
            raise KeyError("tool")
        rollout.reward, rollout.finish_reason = self.reward, completion.finish_reason
        return rollout


def _run(env: object, **settings: object) -> tuple[list[Rollout], list[Sampling]]:
    return play(env, asked=True, **settings)


def play(
    env: object,
    *,
    max_retries: int = 1,
    version: int = 4,
    max_seq_len: int = 99,
    generate: Callable | None = None,
    asked: bool = False,
    cancel: bool = False,
    **others: object,
) -> list[Rollout] | tuple[list[Rollout], list[Sampling]]:
    """The rollouts of WORK by ticket, and what was asked of the engine."""
    sampling_asked: list[Sampling] = []

    async def three_tokens(prompt: np.ndarray, sampling: Sampling) -> tuple[Completion, int]:
        sampling_asked.append(sampling)
        if cancel:
            await asyncio.sleep(3600)
        three = np.full(3, 7, np.int32)
        return Completion(token_ids=three, logprobs=-three / 7.0, versions=three, finish_reason="stop"), 0

    async def run() -> list[Rollout]:
        rollouts: list[Rollout] = []
        ended = asyncio.Event()

        def finished(rollout: Rollout) -> None:
            rollouts.append(rollout)
            if len(rollouts) == WORK.size:
                ended.set()

        episodes = Episodes(
            envs={"e": env},
            generate=generate or three_tokens,
            engine_version=lambda: version,
            sampling={"train": Sampling(max_tokens=3)},
            max_seq_len=max_seq_len,
            seed=0,
            max_retries=max_retries,
            finished=finished,
            **others,
        )
        episodes.start(WORK)
        if cancel:
            await asyncio.sleep(0)
            episodes.cancel(WORK.tickets)
        await ended.wait()
        assert len(episodes) == 0
        return sorted(rollouts, key=lambda r: r.ticket)

    rollouts = asyncio.run(run())
    return (rollouts, sampling_asked) if asked else rollouts


def test_each_member_comes_back_once_with_its_ticket_and_its_own_seeds() -> None:
    rollouts, asked = _run(TwoTurns())
    assert [(r.ticket, r.sample, r.group_id, r.admission_version) for r in rollouts] == [(12, 0, 3, 4), (13, 1, 3, 4)]
    assert [(r.num_turns, r.num_trainable, r.num_wasted_tokens) for r in rollouts] == [(2, 6, 0)] * 2
    assert len({sampling.seed for sampling in asked}) == 4


def test_a_turn_may_ask_for_fewer_tokens_than_the_run_allows_and_gets_no_more() -> None:
    class Asks:
        async def rollout(self, task: Task, generate: Callable) -> Rollout:
            rollout = Rollout(env="", task_id="")
            rollout.append(np.ones(1))
            for max_tokens in (2, 4096, None):
                completion = await generate(rollout.token_ids, max_tokens)
                rollout.append(completion.token_ids, completion.logprobs, completion.versions)
            return rollout

    _, asked = _run(Asks())
    assert sorted(sampling.max_tokens for sampling in asked) == [2, 2, 3, 3, 3, 3]


def test_an_episode_that_raises_is_tried_again_and_its_tokens_count_as_wasted() -> None:
    rollouts, _ = _run(TwoTurns(failures=1))
    assert sorted(r.num_wasted_tokens for r in rollouts) == [0, 6]
    assert not any(r.failed for r in rollouts)


def test_an_episode_that_keeps_raising_is_failed_by_name() -> None:
    rollouts, _ = _run(TwoTurns(failures=9), max_retries=1)
    assert [(r.failed, r.error, r.num_trainable, r.num_wasted_tokens) for r in rollouts] == [
        (True, f"KeyError: 'tool' ({__file__}:{TwoTurns.rollout.__code__.co_firstlineno + 9})", 0, 12)
    ] * 2


@pytest.mark.parametrize(("error", "name"), [(SystemExit(3), "SystemExit: 3"), (asyncio.CancelledError(), "Cancelled")])
def test_an_episode_that_exits_or_leaks_a_cancellation_is_tried_again_and_then_failed_by_name(error, name) -> None:
    attempts = []

    class Ends:
        async def rollout(self, task: Task, generate: Callable) -> Rollout:
            attempts.append(task)
            raise error

    rollouts, _ = _run(Ends())
    assert len(attempts) == 4
    assert all(r.failed and r.error.startswith(name) for r in rollouts)


def test_an_environment_may_limit_the_time_of_a_turn() -> None:
    class Impatient:
        async def rollout(self, task: Task, generate: Callable) -> Rollout:
            async with asyncio.timeout(0):
                await generate(np.ones(1))
            raise AssertionError("never answered")

    async def generate(prompt: np.ndarray, sampling: Sampling) -> tuple[Completion, int]:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise Cancelled(4) from None

    rollouts, _ = _run(Impatient(), generate=generate)
    assert [(r.error.split()[0], r.num_sampled, r.num_wasted_tokens) for r in rollouts] == [("TimeoutError", 0, 8)] * 2


def test_a_reward_that_is_not_a_number_is_a_failure_and_not_a_zero() -> None:
    rollouts, _ = _run(TwoTurns(reward=float("nan")))
    assert all(r.failed and "reward is NaN" in r.error for r in rollouts)


def test_an_engine_older_than_the_admission_is_refused() -> None:
    with pytest.raises(RuntimeError, match="admitted at version 4, the engine still holds 3"):
        _run(TwoTurns(), version=3)


def test_seeds_depend_on_every_part_and_on_nothing_else() -> None:
    assert seed_of(0, "train", 5, 1) == seed_of(0, "train", 5, 1)
    assert len({seed_of(a, b) for a in range(10) for b in range(10)}) == 100


def test_a_prompt_that_leaves_no_room_fails_by_name_without_another_attempt() -> None:
    rollouts, asked = _run(TwoTurns(), max_retries=5, max_seq_len=1)
    assert {r.error for r in rollouts} == {"PromptTooLong: 1 tokens leave no room for a reply in 1"}
    assert asked == []


def test_a_turn_is_cut_where_the_context_ends_and_a_later_one_is_empty() -> None:
    _, asked = _run(TwoTurns(), max_seq_len=7)
    assert [sampling.max_tokens for sampling in asked] == [3, 2, 3, 2]
    rollouts, asked = _run(TwoTurns(), max_seq_len=5)
    assert [sampling.max_tokens for sampling in asked] == [3, 3]
    assert [(r.failed, r.finish_reason, r.num_trainable) for r in rollouts] == [(False, "length", 3)] * 2


class HangsInItsReward(TwoTurns):
    """Has its first member's reward computed by a function that does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = Workers(num=2, timeout_s=0.3)
        self.num_rewards = 0

    async def rollout(self, task: Task, generate: Callable) -> Rollout:
        rollout = await super().rollout(task, generate)
        self.num_rewards += 1
        hangs = self.num_rewards == 1
        rollout.reward = await self.workers.call(jobs.sleep_for_ever if hangs else jobs.add, 1, 2)
        await self.workers.close()
        return rollout


def test_a_reward_that_sleeps_for_ever_is_counted_once_and_is_no_zero() -> None:
    rollouts, _ = _run(HangsInItsReward(), max_retries=3)
    assert sorted((r.failed, r.reward) for r in rollouts if not r.failed) == [(False, 3)]
    (lost,) = [r for r in rollouts if r.failed]
    assert lost.error.startswith("TimedOut: tests.unit.jobs:sleep_for_ever") and lost.num_wasted_tokens == 6
