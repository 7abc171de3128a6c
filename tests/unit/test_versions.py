"""Each token carries the version that computed its distribution, whatever appends, swaps, aborts and resumptions do.

The real episodes, engine thread and native engine; every version has weights of its own, so that a token's log-prob
under the weights of its stamp tells whether the stamp is true.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmd_rl.engine.native import NativeEngine
from spmd_rl.engine.thread import EngineThread
from spmd_rl.model.causal_lm import build
from spmd_rl.ranks.episodes import Episodes
from spmd_rl.types import Completion, GroupWork, Rollout, Sampling, Task
from tests.unit.families import load, save

NUM_WEIGHTS = 4  # version v has the weights v mod 4
SIZE = 2  # members of a group


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [save("llama", tmp_path_factory.mktemp(f"weights_{seed}"), seed=seed) for seed in range(NUM_WEIGHTS)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[torch.nn.Module]:
    return [load(folder) for folder in folders]


class SteppedEngine(NativeEngine):
    """Each step waits for a permit, so that a test decides what happens between which steps, or during one."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.permits = threading.Semaphore(0)

    def step(self) -> list[tuple[int, Completion]]:
        self.permits.acquire()
        return super().step()


class ToolBetweenTurns:
    """A prompt, a turn, a tool's answer when the test gives one, another turn; now and then it raises after that."""

    def __init__(self) -> None:
        self.calls: deque[asyncio.Future[None]] = deque()
        self.open = False  # tools answer at once from now on

    async def rollout(self, task: Task, generate: Callable) -> Rollout:
        rollout = Rollout(env="", task_id="")
        rollout.append(np.arange(1, 4 + task.data["number"] % 3))
        for turn in range(2):
            completion = await generate(rollout.token_ids, 3 + task.data["number"] % 4)
            rollout.append(completion.token_ids, completion.logprobs, completion.versions)
            if turn == 0:
                await self._tool()
                rollout.append([5, 6])
        if task.data["number"] % 5 == 4:
            raise KeyError("tool")
        rollout.finish_reason = "env"
        return rollout

    async def _tool(self) -> None:
        if not self.open:
            self.calls.append(asyncio.get_running_loop().create_future())
            await self.calls[-1]

    def answer(self) -> None:
        while self.calls and (call := self.calls.popleft()).done():  # its episode was aborted
            pass
        if self.calls or not call.done():
            call.set_result(None)


class Bench:
    """One engine with its thread and episodes, at version 3."""

    def __init__(self, folder: Path, models: list[torch.nn.Module], on_update: str) -> None:
        self.env, self.version = ToolBetweenTurns(), 3
        self.ended: asyncio.Queue[Rollout] = asyncio.Queue()
        self.num_started = 0
        self._models, self._swapping = models, False
        self.engine = SteppedEngine(
            model=build(folder, device="cpu", dtype=torch.float32, weights=False),
            device=torch.device("cpu"),
            max_slots=4,
            max_seq_len=64,
            prefill_budget=8,
        )
        self.engine.load_weights(self._weights(3), 3)
        self.failures: list[BaseException] = []
        self.loop = asyncio.get_running_loop()
        self.thread = EngineThread(engine=self.engine, loop=self.loop, failed=self.failures.append, on_update=on_update)
        self.episodes = Episodes(
            envs={"e": self.env},
            generate=self.thread.generate,
            engine_version=lambda: self.thread.version,
            sampling={"train": Sampling(max_tokens=8)},
            seed=0,
            max_seq_len=64,
            max_retries=1,
            finished=self.ended.put_nowait,
        )
        self.thread.start()

    def start(self) -> None:
        number, self.num_started = self.num_started, self.num_started + 1
        task = Task(env="e", task_id=str(number), data={"number": number})
        self.episodes.start(
            GroupWork(group_id=number, first_ticket=number * SIZE, size=SIZE, task=task, version=self.version)
        )

    def swap(self) -> None:
        """One at a time, as the orchestrator sees to."""
        if self._swapping:
            return
        self._swapping, version = True, self.thread.version + 1

        def swapped() -> None:
            self._swapping, self.version = False, version

        self.thread.load(
            lambda: self._weights(version), version, lambda pause_s: self.loop.call_soon_threadsafe(swapped)
        )

    def abort(self, ticket: int) -> None:
        self.episodes.cancel(range(ticket, ticket + 1))

    async def turn(self) -> None:
        """Let the loop and the engine's thread see what there is."""
        for _ in range(5):
            await asyncio.sleep(0)

    async def finish(self) -> list[Rollout]:
        self.env.open = True
        for call in self.env.calls:
            if not call.done():
                call.set_result(None)
        self.engine.permits.release(10**4)
        async with asyncio.timeout(60):
            rollouts = [await self.ended.get() for _ in range(self.num_started * SIZE)]
        self.thread.close(20)
        assert self.failures == []
        return rollouts

    def _weights(self, version: int) -> dict[str, torch.Tensor]:
        return dict(self._models[version % NUM_WEIGHTS].named_parameters())


def expected_logprobs(models: list[torch.nn.Module], rollout: Rollout) -> np.ndarray:
    """[T], of every token under the weights of its stamp; of no meaning where it has none."""
    ids = torch.from_numpy(rollout.token_ids.astype(np.int64))
    expected = np.zeros(len(ids))
    for version in set(rollout.versions[rollout.loss_mask].tolist()):
        with torch.no_grad():
            logits = models[version % NUM_WEIGHTS](input_ids=ids[None], use_cache=False).logits[0]
        logprobs = logits.log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
        expected[1:] = np.where(rollout.versions[1:] == version, logprobs, expected[1:])
    return expected


ACTIONS = st.one_of(
    st.just(("start", 0)),
    st.tuples(st.just("steps"), st.integers(1, 4)),
    st.just(("swap", 0)),
    st.just(("answer", 0)),
    st.tuples(st.just("abort"), st.integers(0, 15)),
)


@given(actions=st.lists(ACTIONS, min_size=8, max_size=40), on_update=st.sampled_from(["continue", "hold", "restart"]))
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_interleaving_leaves_each_token_with_the_version_that_sampled_it(folders, models, actions, on_update):
    async def play() -> tuple[list[Rollout], Bench]:
        bench = Bench(folders[3], models, on_update)
        bench.start()
        for action, number in actions:
            match action:
                case "start":
                    bench.start()
                case "steps":
                    bench.engine.permits.release(number)
                case "swap":
                    bench.swap()
                case "answer" if bench.env.calls:
                    bench.env.answer()
                case "abort":
                    bench.abort(number)
            await bench.turn()
        return await bench.finish(), bench

    rollouts, bench = asyncio.run(play())
    assert sorted(r.ticket for r in rollouts) == list(range(bench.num_started * SIZE))
    for rollout in rollouts:
        arrays = (rollout.token_ids, rollout.loss_mask, rollout.behavior_logprobs, rollout.versions)
        assert len({len(array) for array in arrays}) == 1
        assert ((rollout.versions >= 0) == rollout.loss_mask).all()
        stamps = rollout.versions[rollout.loss_mask]
        assert (np.diff(stamps) >= 0).all() and (stamps >= rollout.admission_version).all()
        if not rollout.failed:
            mask = rollout.loss_mask
            expected = expected_logprobs(models, rollout)
            np.testing.assert_allclose(rollout.behavior_logprobs[mask], expected[mask], atol=1e-4)
        if on_update != "continue":  # nothing changes within a turn
            for masked, turn in itertools.groupby(range(len(mask := rollout.loss_mask)), key=lambda t: bool(mask[t])):
                assert not masked or len({int(rollout.versions[t]) for t in turn}) == 1
    assert bench.thread.stats.tokens == sum(r.num_sampled + r.num_wasted_tokens for r in rollouts)
    assert bench.thread.num_requests == 0


def test_a_slow_tool_call_across_two_updates_is_stamped_with_the_versions_before_and_after(folders, models):
    async def play() -> list[Rollout]:
        bench = Bench(folders[3], models, "continue")
        bench.start()
        bench.engine.permits.release(1000)
        while len(bench.env.calls) < SIZE:
            await asyncio.sleep(0)
        for version in (4, 5):
            bench.swap()
            while bench.version < version:
                await asyncio.sleep(0)
        return await bench.finish()

    for rollout in asyncio.run(play()):
        assert rollout.version_runs() == [(3, 3), (5, 3)]
        assert (rollout.head, rollout.tail) == (3, 5)


def test_a_member_aborted_before_it_began_still_ends(folders, models):
    async def play() -> list[Rollout]:
        bench = Bench(folders[3], models, "continue")
        bench.start()
        bench.abort(1)  # in the same turn of the loop
        return await bench.finish()

    rollouts = sorted(asyncio.run(play()), key=lambda r: r.ticket)
    assert [(r.failed, r.error, r.num_sampled) for r in rollouts] == [(False, "", 6), (True, "cancelled", 0)]
