import asyncio
import threading
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from spmd_rl.engine.thread import EngineThread
from spmd_rl.types import Cancelled, Completion, Sampling

THREE = Sampling(max_tokens=3)


class CountingEngine:
    """Emits one token a step and sequence: the version of its weights.  Each step waits for `steps`."""

    def __init__(self) -> None:
        self.version = 0
        self.running: dict[int, tuple[int, list[int]]] = {}
        self.cancelled: list[int] = []
        self.steps = threading.Semaphore(0)
        self.num_entered = 0
        self.num_slots = 64  # that it says it has
        self.closed = False

    @property
    def num_running(self) -> int:
        return min(len(self.running), self.num_slots)

    num_lacking_kv = 0

    @property
    def recomputes(self) -> bool:
        return any(tokens and tokens[-1] < self.version for _, tokens in self.running.values())

    def submit(self, request_id: int, prompt: np.ndarray, sampling: Sampling) -> None:
        if len(prompt) == 0:
            raise ValueError("empty prompt")
        self.running[request_id] = (sampling.max_tokens, [])

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def step(self) -> list[tuple[int, Completion]]:
        self.num_entered += 1
        self.steps.acquire()
        ended = []
        for request_id, (limit, tokens) in list(self.running.items()):
            cancelled = request_id in self.cancelled
            if not cancelled:
                tokens.append(self.version)
            if cancelled or len(tokens) == limit:
                del self.running[request_id]
                ended.append((request_id, self._completion(tokens, "cancelled" if cancelled else "length")))
        self.cancelled.clear()
        return ended

    def load_weights(self, tensors: object, version: int) -> None:
        self.version = version

    def close(self) -> None:
        self.closed = True

    @staticmethod
    def _completion(tokens: list[int], reason: str) -> Completion:
        ids = np.array(tokens, np.int32)
        return Completion(token_ids=ids, logprobs=np.zeros(len(ids), np.float32), versions=ids, finish_reason=reason)


def _play(
    script: Callable[[EngineThread, CountingEngine], Awaitable[object]], on_update: str = "continue"
) -> tuple[object, EngineThread, CountingEngine]:
    async def run() -> tuple[object, EngineThread, CountingEngine]:
        engine = CountingEngine()
        failures: list[BaseException] = []
        thread = EngineThread(
            engine=engine, loop=asyncio.get_running_loop(), failed=failures.append, on_update=on_update
        )
        thread.start()
        result = await script(thread, engine)
        engine.steps.release(100)
        thread.close(20)
        assert failures == []
        assert engine.closed
        return result, thread, engine

    return asyncio.run(run())


async def _swap_during_the_third_of_five_steps(thread: EngineThread, engine: CountingEngine) -> tuple[Completion, int]:
    waiting = asyncio.create_task(thread.generate(np.ones(1), Sampling(max_tokens=5)))
    engine.steps.release(2)
    while engine.num_entered < 3:
        await asyncio.sleep(0)
    swapped = asyncio.Event()
    loop = asyncio.get_running_loop()
    thread.load(dict, 1, lambda pause_s: loop.call_soon_threadsafe(swapped.set))
    engine.steps.release(100)
    result = await waiting
    await swapped.wait()
    return result


@pytest.mark.parametrize(
    ("on_update", "versions", "wasted"),
    [("continue", [0, 0, 0, 1, 1], 0), ("hold", [0, 0, 0, 0, 0], 0), ("restart", [1, 1, 1, 1, 1], 3)],
)
def test_running_sequences_do_at_an_update_what_on_update_says(
    on_update: str, versions: list[int], wasted: int
) -> None:
    (completion, wasted_tokens), thread, _ = _play(_swap_during_the_third_of_five_steps, on_update)
    assert completion.versions.tolist() == versions
    assert wasted_tokens == wasted
    assert thread.stats.swaps == 1
    assert thread.stats.tokens == 5 + wasted
    assert (0 < thread.stats.recompute_s < thread.stats.busy_s) == (on_update == "continue")  # the step after the swap


async def _pinned(thread: EngineThread, upto: int | None) -> tuple[int, float]:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[int, float]] = loop.create_future()
    thread.pin(upto, lambda version, held_s: loop.call_soon_threadsafe(answer.set_result, (version, held_s)))
    return await answer


@pytest.mark.parametrize("on_update", ["continue", "hold", "restart"])
def test_a_pinned_engine_swaps_nothing_until_it_is_let_go(on_update: str) -> None:
    async def script(thread: EngineThread, engine: CountingEngine) -> list[list[int]]:
        assert await _pinned(thread, 0) == (0, 0.0)
        swapped = asyncio.Event()
        loop = asyncio.get_running_loop()
        thread.load(dict, 1, lambda pause_s: loop.call_soon_threadsafe(swapped.set))
        engine.steps.release(100)
        first, _ = await thread.generate(np.ones(1), THREE)  # starts after the weights have arrived
        assert not swapped.is_set()
        version, held_s = await _pinned(thread, None)
        assert version == 0 and held_s > 0
        await swapped.wait()
        second, _ = await thread.generate(np.ones(1), THREE)
        return [first.versions.tolist(), second.versions.tolist()]

    versions, thread, _ = _play(script, on_update)
    assert versions == [[0, 0, 0], [1, 1, 1]]
    assert thread.stats.swaps == 1


def test_a_pin_lets_pass_what_has_arrived_and_what_it_names() -> None:
    async def script(thread: EngineThread, engine: CountingEngine) -> list[int]:
        swaps: asyncio.Queue[int] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        waiting = asyncio.create_task(thread.generate(np.ones(1), THREE))
        while engine.num_entered < 1:
            await asyncio.sleep(0)
        thread.load(dict, 1, lambda pause_s: loop.call_soon_threadsafe(swaps.put_nowait, 1))
        answer = asyncio.create_task(_pinned(thread, 0))
        await asyncio.sleep(0)
        engine.steps.release(100)
        assert await answer == (1, 0.0)
        await waiting
        assert await swaps.get() == 1
        assert await _pinned(thread, 2) == (2, 0.0)
        thread.load(dict, 2, lambda pause_s: loop.call_soon_threadsafe(swaps.put_nowait, 2))
        return await swaps.get()

    assert _play(script, "hold")[0] == 2


def test_a_later_pin_that_lets_weights_pass_ends_their_being_held_back() -> None:
    async def script(thread: EngineThread, engine: CountingEngine) -> None:
        assert await _pinned(thread, 0) == (0, 0.0)
        swapped = asyncio.Event()
        loop = asyncio.get_running_loop()
        thread.load(dict, 1, lambda pause_s: loop.call_soon_threadsafe(swapped.set))
        assert (await _pinned(thread, 1))[0] == 1
        await swapped.wait()
        assert await _pinned(thread, None) == (1, 0.0)

    _play(script)


def test_a_step_that_does_not_end_is_no_silent_end() -> None:
    async def script(thread: EngineThread, engine: CountingEngine) -> None:
        waiting = asyncio.create_task(thread.generate(np.ones(1), THREE))
        while engine.num_entered < 1:
            await asyncio.sleep(0)
        try:
            with pytest.raises(TimeoutError, match="the engine's step did not end within 0 s"):
                thread.close(0.0)
        finally:
            engine.steps.release(100)
            waiting.cancel()

    _play(script)


def test_a_prompt_that_does_not_fit_fails_its_episode_and_not_the_engine() -> None:
    async def script(thread: EngineThread, engine: CountingEngine) -> Completion:
        with pytest.raises(ValueError, match="empty prompt"):
            await thread.generate(np.ones(0), THREE)
        engine.steps.release(3)
        return (await thread.generate(np.ones(1), THREE))[0]

    completion, _, _ = _play(script)
    assert len(completion.token_ids) == 3


@pytest.mark.parametrize("num_slots", [1, 2])
def test_seconds_in_slots_are_counted_for_each_sequence_and_those_of_waiting_for_each_request(num_slots: int) -> None:
    async def script(thread: EngineThread, engine: CountingEngine) -> None:
        engine.num_slots = num_slots
        both = [asyncio.create_task(thread.generate(np.ones(1), Sampling(max_tokens=limit))) for limit in (4, 5)]
        engine.steps.release(1)
        while engine.num_entered < 2 or len(engine.running) < 2:
            await asyncio.sleep(0)
        engine.steps.release(100)
        await asyncio.gather(*both)

    _, thread, _ = _play(script)
    stats = thread.stats
    assert stats.busy_s < stats.slot_s + stats.waiting_s < 2 * stats.busy_s
    assert (stats.waiting_s > 0) == (num_slots == 1)


@pytest.mark.parametrize("num_cancels", [1, 2])
def test_a_cancelled_caller_frees_its_slot_and_learns_what_it_cost(num_cancels: int) -> None:
    async def script(thread: EngineThread, engine: CountingEngine) -> int:
        task = asyncio.create_task(thread.generate(np.ones(1), THREE))
        engine.steps.release(1)
        while engine.num_entered < 2:
            await asyncio.sleep(0)
        for _ in range(num_cancels):
            task.cancel()
            await asyncio.sleep(0)
        engine.steps.release(100)
        with pytest.raises(Cancelled) as cancelled:
            await task
        return cancelled.value.tokens

    tokens, thread, engine = _play(script)
    assert tokens in (2, 3)  # the step that ran when it was cancelled counts; a third may have begun
    assert not engine.running
    assert thread.num_requests == 0
    assert thread.stats.tokens == tokens


def test_an_engine_that_raises_ends_the_thread_by_name() -> None:
    class Broken(CountingEngine):
        def step(self) -> list[tuple[int, Completion]]:
            raise RuntimeError("device lost")

    async def run() -> BaseException:
        loop = asyncio.get_running_loop()
        failure: asyncio.Future[BaseException] = loop.create_future()
        thread = EngineThread(
            engine=Broken(), loop=loop, failed=lambda error: loop.call_soon_threadsafe(failure.set_result, error)
        )
        thread.start()
        waiting = asyncio.create_task(thread.generate(np.ones(1), THREE))
        error = await failure
        waiting.cancel()
        return error

    assert "device lost" in str(asyncio.run(run()))


def test_asking_a_thread_that_has_ended_waits_for_nothing() -> None:
    async def after_the_end(thread: EngineThread, engine: CountingEngine) -> None:
        thread.close(20)
        with pytest.raises(Cancelled):
            await asyncio.wait_for(thread.generate(np.ones(1), THREE), 20)

    _play(after_the_end)
