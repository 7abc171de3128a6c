"""One thread owns the engine: it steps while sequences run, swaps weights between two steps, and else sleeps.

Callers are coroutines of one asyncio loop; they are answered through `loop.call_soon_threadsafe`, so that an engine
step of half a second delays nothing on the loop.  What running sequences do when new weights are there is chosen here
(`on_update`): continue at once, hold (finish on the old weights first, start nothing), restart (from their prompts).
Knows nothing of groups, tickets, rewards or how weights travel.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_rl.types import Cancelled, Completion, Sampling

if TYPE_CHECKING:
    import torch

    from spmd_rl.engine.protocol import Engine


@dataclass
class EngineStats:
    """Cumulative, written by the engine thread only."""

    busy_s: float = 0.0  # in steps and in swaps
    pause_s: float = 0.0  # in updates alone
    recompute_s: float = 0.0  # in steps for which a sequence waited that had begun before the last swap
    slot_s: float = 0.0  # in steps, each for every sequence that held a slot
    waiting_s: float = 0.0  # in steps, each for every request that had none
    kv_waiting_s: float = 0.0  # of that, for those that had a slot and no room for keys and values
    tokens: int = 0  # of completions handed back, wasted ones included
    wasted_tokens: int = 0  # of sequences that were restarted
    swaps: int = 0


@dataclass(eq=False)
class _Request:
    prompt: np.ndarray
    sampling: Sampling
    future: asyncio.Future[tuple[Completion, int]]
    wasted_tokens: int = 0
    cancelled: bool = False  # by its caller


@dataclass
class _Swap:
    weights: Callable[[], Mapping[str, torch.Tensor]]
    version: int
    loaded: Callable[[float], None]
    after: int  # steps, while anything runs
    is_update: bool
    cancelled: set[int] = field(default_factory=set)


class EngineThread:
    """Requests in, completions out, for one engine."""

    def __init__(
        self,
        *,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        failed: Callable[[BaseException], None],  # called on the engine thread; the thread ends
        on_update: str = "continue",
        progress: Callable[[str], None] = lambda doing: None,  # what the thread is about to do, for liveness
    ) -> None:
        self.stats = EngineStats()
        self.engine, self._loop, self._failed, self._progress = engine, loop, failed, progress
        self._on_update = on_update
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[int, _Request] = {}
        self._held: deque[tuple[int, _Request]] = deque()
        self._swap: _Swap | None = None
        self._most: int | None = None  # no version above this one is swapped in
        self._held_since: float | None = None  # a swap is held back by that
        self._next_id = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled from."""
        return self.engine.version

    @property
    def num_requests(self) -> int:
        """That have not ended."""
        return len(self._running) + len(self._held)

    async def generate(self, prompt: np.ndarray, sampling: Sampling) -> tuple[Completion, int]:
        """The completion, and the tokens of attempts that were thrown away.

        Waits for the engine thread, which answers when the sequence ends.  Cancelling frees its slot and raises
        `Cancelled` after the step that the engine is in; so does asking a thread that has ended.
        """
        if self._closed:
            raise Cancelled(0)
        request = _Request(prompt, sampling, self._loop.create_future())
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._commands.put(lambda: self._submit(request_id, request))
        try:
            return await asyncio.shield(request.future)
        except asyncio.CancelledError:
            self._commands.put(lambda: self._cancel(request_id))
            while not (request.future.done() or self._closed):
                with suppress(asyncio.CancelledError):  # cancelled once more: it is raised below either way
                    await asyncio.wait([request.future])
            if not request.future.done() or request.future.exception() is not None:  # nobody is left, or not accepted
                raise Cancelled(0) from None
            completion, wasted_tokens = request.future.result()
            raise Cancelled(len(completion.token_ids) + wasted_tokens) from None

    async def score(self, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`Engine.score` and its `scored_choices`, between two steps.  Waits for the engine thread."""
        future: asyncio.Future[tuple[np.ndarray, np.ndarray]] = self._loop.create_future()
        self._commands.put(lambda: self._answer(future, (self.engine.score(token_ids), self.engine.scored_choices)))
        return await future

    def load(
        self,
        weights: Callable[[], Mapping[str, torch.Tensor]],
        version: int,
        loaded: Callable[[float], None],
        *,
        after: int = 0,
        is_update: bool = True,
    ) -> None:
        """Swap weights between two steps, when `weights()` may wait; then `loaded(pause_s)`, on the engine thread.

        `after`: not before so many more steps, unless nothing runs.  What is no update is in no count of them.
        """

        def command() -> None:
            if self._swap is not None:
                raise RuntimeError(f"weights {version} arrived before {self._swap.version} were swapped in")
            self._swap = _Swap(weights, version, loaded, after, is_update)
            if self._is_pinned:
                self._held_since = time.perf_counter()

        self._commands.put(command)

    def pin(self, upto: int | None, pinned: Callable[[int, float], None]) -> None:
        """Swap in nothing above `upto`, or above what is there or already arrived; None: swap again.

        `pinned` is called on the engine thread with that version and the seconds that a swap was held back.
        """

        def command() -> None:
            held_s = 0.0 if self._held_since is None else time.perf_counter() - self._held_since
            if upto is None:
                self._most = self._held_since = None
            elif self._most is None:
                self._most = max(upto, self.engine.version if self._swap is None else self._swap.version)
            else:
                self._most = max(upto, self._most)
            pinned(self.engine.version if self._most is None else self._most, held_s)

        self._commands.put(command)

    def close(self, timeout_s: float) -> None:
        """End the thread after the step that it is in; raises if that does not end in time."""

        def command() -> None:
            self._closed = True

        self._commands.put(command)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step did not end within {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            while not self._closed:
                self._take_commands()
                self._swap_when_due()
                self._step()
            self.engine.close()
        except BaseException as error:
            self._closed = True
            self._failed(error)

    def _take_commands(self) -> None:
        idle = not self._running and not self._swap_is_due
        if idle:
            self._progress("waiting for requests")
        while idle or not self._commands.empty():
            self._commands.get()()
            idle = False

    @property
    def _is_pinned(self) -> bool:
        """Weights have arrived and are held back."""
        return self._swap is not None and self._most is not None and self._swap.version > self._most

    @property
    def _swap_is_due(self) -> bool:
        """Weights have arrived and are not held back."""
        return self._swap is not None and not self._is_pinned and (self._swap.after <= 0 or not self._running)

    def _swap_when_due(self) -> None:
        if not self._swap_is_due:
            return
        swap = self._swap
        assert swap is not None
        if self._on_update == "restart":
            for request_id in self._running.keys() - swap.cancelled:
                self.engine.cancel(request_id)
                swap.cancelled.add(request_id)
        if self._on_update != "continue" and self._running:
            return  # the next steps end them
        start = time.perf_counter()
        self._progress(f"loading weights {swap.version}")
        self.engine.load_weights(swap.weights(), swap.version)
        pause_s = time.perf_counter() - start
        self.stats.busy_s += pause_s
        if swap.is_update:
            self.stats.pause_s += pause_s
            self.stats.swaps += 1
        self._swap = self._held_since = None
        swap.loaded(pause_s)
        while self._held:
            self._submit(*self._held.popleft())

    def _step(self) -> None:
        if not self._running:
            return
        self._progress("generating")
        recomputes, start = self.engine.recomputes, time.perf_counter()
        finished = self.engine.step()
        seconds = time.perf_counter() - start
        if self._swap is not None:
            self._swap.after -= 1
        self.stats.busy_s += seconds
        self.stats.recompute_s += seconds if recomputes else 0.0
        in_slots = self.engine.num_running + len(finished)
        self.stats.slot_s += seconds * in_slots
        self.stats.waiting_s += seconds * max(0, self.num_requests - in_slots)
        self.stats.kv_waiting_s += seconds * self.engine.num_lacking_kv
        for request_id, completion in finished:
            self._finish(request_id, self._running.pop(request_id), completion)

    def _submit(self, request_id: int, request: _Request) -> None:
        if self._swap_is_due and self._on_update != "continue":
            self._held.append((request_id, request))
            return
        try:
            self.engine.submit(request_id, request.prompt, request.sampling)
        except ValueError as error:  # the prompt does not fit: the episode's failure, not the engine's
            self._answer(request.future, error)
            return
        self._running[request_id] = request

    def _cancel(self, request_id: int) -> None:
        if request_id in self._running:
            self._running[request_id].cancelled = True
            self.engine.cancel(request_id)
        for held in [held for held in self._held if held[0] == request_id]:
            self._held.remove(held)
            self._answer(held[1].future, (Completion.empty("cancelled"), held[1].wasted_tokens))

    def _finish(self, request_id: int, request: _Request, completion: Completion) -> None:
        self.stats.tokens += len(completion.token_ids)
        if completion.finish_reason == "cancelled" and not request.cancelled:  # to be restarted
            self.stats.wasted_tokens += len(completion.token_ids)
            request.wasted_tokens += len(completion.token_ids)
            self._held.append((request_id, request))
            return
        self._answer(request.future, (completion, request.wasted_tokens))

    def _answer(self, future: asyncio.Future[Any], result: object) -> None:
        def answer() -> None:
            if future.done():  # the caller is gone
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        self._loop.call_soon_threadsafe(answer)
