"""What orchestration itself costs: gate, dispatcher, sink and ledger with an environment that returns at once.

Prints JSON: rollouts per second on one core and CPU microseconds per rollout at three concurrencies; then the time from
an event that opens the gate (a group ends; a version goes live) to the next admission while 1,024 rollouts run, with
the loop alone and beside a native engine that generates in its thread of the same process.
`python benchmarks/orchestration.py [--rollouts N]`
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from itertools import repeat
from pathlib import Path

import numpy as np

from spmd_rl.config.age_bound import age_bound
from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.gate import Gate
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.orchestrator.order import make_order
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.train_path import TrainPath
from spmd_rl.orchestrator.train_sink import TrainSink
from spmd_rl.types import GroupWork, Rollout, Task

TOKENS = np.zeros(1, np.int32), np.ones(1, np.bool_), np.zeros(1, np.float32)
RUNNING = 1024  # rollouts, while admission is timed


class Parts:
    """Everything of the orchestrator that a rollout passes, joined as in a run."""

    def __init__(
        self, *, max_concurrent: int, batch_size: int, group_size: int, instant: bool, max_staleness: int = 10**6
    ) -> None:
        bound = age_bound(gate="admission", order="completion", max_staleness=max_staleness, batch_size=batch_size)
        self.policy = Policy()
        self.submitted: list[tuple[GroupWork, int]] = []  # and when, in ns
        self.gate = Gate(self.policy, max_staleness=max_staleness, batch_size=batch_size, max_concurrent=max_concurrent)
        self.dispatcher = Dispatcher(
            tasks=repeat(Task(env="instant", task_id="0")),
            gate=self.gate,
            policy=self.policy,
            submit=self.run_at_once if instant else self.remember,
            group_size=group_size,
        )
        self.sink = TrainSink(
            batch_size=batch_size,
            group_size=group_size,
            advantages=lambda rewards, usable: rewards.astype(np.float32),
            order=make_order("completion"),
            bound=bound,
        )
        self.path = TrainPath(
            dispatcher=self.dispatcher, sink=self.sink, gate=self.gate, policy=self.policy, ledger=Ledger()
        )

    def run_at_once(self, work: GroupWork) -> None:
        asyncio.get_running_loop().call_soon(self.end, work)

    def remember(self, work: GroupWork) -> None:
        self.submitted.append((work, time.perf_counter_ns()))

    def end(self, work: GroupWork) -> None:
        tokens, mask, logprobs = TOKENS
        versions = np.full(1, work.version, np.int32)
        for sample in range(work.size):
            self.path.ended(
                Rollout(
                    env="instant",
                    task_id="0",
                    group_id=work.group_id,
                    sample=sample,
                    ticket=work.first_ticket + sample,
                    token_ids=tokens,
                    loss_mask=mask,
                    behavior_logprobs=logprobs,
                    versions=versions,
                    reward=float(sample),
                    finish_reason="stop",
                )
            )


async def throughput(max_concurrent: int, rollouts: int, group_size: int) -> dict[str, float]:
    """Batches are formed and trained in no time."""
    parts = Parts(max_concurrent=max_concurrent, batch_size=64, group_size=group_size, instant=True)
    wall, cpu = time.perf_counter(), time.process_time()
    running = [asyncio.create_task(parts.dispatcher.run()), asyncio.create_task(parts.path.collect())]
    for index in range(rollouts // 64):
        await parts.path.form(index)
        parts.policy.advance(index + 1)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    parts.path.assert_closed()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return {"rollouts_per_s": round(rollouts / wall), "cpu_us_per_rollout": round(cpu / rollouts * 1e6, 1)}


async def a_group_ends(group_size: int, events: int) -> dict[str, float]:
    """The gate is full of running rollouts; a group ends, and the next one is submitted."""
    parts = Parts(max_concurrent=RUNNING, batch_size=64, group_size=group_size, instant=False)
    running = await started(parts, group_size)
    times_us = []
    for event in range(events):
        before, start = len(parts.submitted), time.perf_counter_ns()
        parts.end(parts.submitted[event][0])
        while len(parts.submitted) == before:
            await asyncio.sleep(0)
        times_us.append((parts.submitted[before][1] - start) / 1e3)
    await stopped(running)
    return spread(times_us)


async def a_version_goes_live(group_size: int, events: int) -> dict[str, float]:
    """(S + version + 1)·B rollouts are admitted; the version rises with nothing else, and B more are submitted."""
    parts = Parts(
        max_concurrent=2 * RUNNING, batch_size=64, group_size=group_size, instant=False, max_staleness=RUNNING // 64 - 1
    )
    running = await started(parts, group_size)
    first_us, last_us = [], []
    for index in range(events):
        for group in range(64 // group_size):
            parts.end(parts.submitted[index * 64 // group_size + group][0])
        await parts.path.form(index)
        for _ in range(3):  # whatever the batch set going is done
            await asyncio.sleep(0)
        before, start = len(parts.submitted), time.perf_counter_ns()
        parts.policy.advance(index + 1)
        while len(parts.submitted) < before + 64 // group_size:
            await asyncio.sleep(0)
        first_us.append((parts.submitted[before][1] - start) / 1e3)
        last_us.append((parts.submitted[-1][1] - start) / 1e3)
    await stopped(running)
    return {"first": spread(first_us), "last of B": spread(last_us)}


async def started(parts: Parts, group_size: int) -> list[asyncio.Task[None]]:
    running = [asyncio.create_task(parts.dispatcher.run()), asyncio.create_task(parts.path.collect())]
    while len(parts.submitted) < RUNNING // group_size:
        await asyncio.sleep(0)
    return running


async def stopped(running: list[asyncio.Task[None]]) -> None:
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def spread(times_us: list[float]) -> dict[str, float]:
    times_us = sorted(times_us)
    return {
        "median_us": round(statistics.median(times_us), 1),
        "p99_us": round(times_us[int(0.99 * len(times_us))], 1),
        "max_us": round(times_us[-1], 1),
    }


@contextmanager
def an_engine_at_work() -> Iterator[None]:
    """A native engine with the tiny model that decodes 64 sequences for ever, in a thread of this process."""
    import torch

    from spmd_rl.demo import tiny_model
    from spmd_rl.engine.native import NativeEngine
    from spmd_rl.model.causal_lm import build
    from spmd_rl.types import Sampling

    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        tiny_model.make(Path(folder) / "tiny")
        model = build(str(Path(folder) / "tiny"), device="cpu", dtype=torch.float32, weights=True)
    engine = NativeEngine(model=model, device=torch.device("cpu"), max_slots=64, max_seq_len=256)
    engine.load_weights(dict(model.named_parameters()), 0)
    gc.collect()
    gc.freeze()  # as rank 0 does once everything is built
    ended = threading.Event()

    def generate() -> None:
        number = 0
        while not ended.is_set():
            while engine.num_running + engine.num_waiting < 64:
                engine.submit(number, np.arange(3, 6), Sampling(max_tokens=200, seed=number))
                number += 1
            engine.step()

    thread = threading.Thread(target=generate)
    thread.start()
    yield
    ended.set()
    thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=64_000)
    options = parser.parse_args()
    report: dict[str, object] = {"rollouts": options.rollouts, "batch_size": 64}
    gc.freeze()
    for group_size in (8, 1):
        for concurrent in (64, 1024, 16384):
            name = f"G={group_size} C={concurrent}"
            report[name] = asyncio.run(throughput(concurrent, options.rollouts, group_size))
    for beside, company in (("alone", nullcontext()), ("beside an engine", an_engine_at_work())):
        gc.collect()  # what the cases before left is not this one's to clean up
        with company:
            report[f"a group ends, {beside}"] = asyncio.run(a_group_ends(8, 1000))
            report[f"a version goes live, {beside}"] = asyncio.run(a_version_goes_live(8, 200))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
