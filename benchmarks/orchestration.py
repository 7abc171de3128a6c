"""What orchestration itself costs: gate, dispatcher, sink and ledger with an environment that returns at once.

Prints JSON: rollouts per second on one core and CPU microseconds per rollout at three concurrencies, and the time from
a slot's opening to the next admission while many rollouts run.  `python benchmarks/orchestration.py [--rollouts N]`
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from itertools import repeat

import numpy as np

from spmd_rl.bounds import age_bound
from spmd_rl.ledger import Ledger
from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.gate import Gate
from spmd_rl.orchestrator.order import make_order
from spmd_rl.orchestrator.train_path import TrainPath
from spmd_rl.orchestrator.train_sink import TrainSink
from spmd_rl.policy import Policy
from spmd_rl.types import GroupWork, Rollout, Task

TOKENS = np.zeros(1, np.int32), np.ones(1, np.bool_), np.zeros(1, np.float32)


class Parts:
    """Everything of the orchestrator that a rollout passes, joined as in a run."""

    def __init__(self, *, max_concurrent: int, batch_size: int, group_size: int, instant: bool) -> None:
        bound = age_bound(gate="admission", order="admission", max_staleness=10**6, batch_size=batch_size)
        self.policy = Policy()
        self.submitted: list[tuple[GroupWork, int]] = []  # and when, in ns
        self.gate = Gate(self.policy, max_staleness=10**6, batch_size=batch_size, max_concurrent=max_concurrent)
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
            order=make_order("admission"),
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


async def opening(max_concurrent: int, group_size: int, events: int) -> dict[str, float]:
    """The gate is full and `max_concurrent` rollouts run; a group ends, and the next one is submitted."""
    parts = Parts(max_concurrent=max_concurrent, batch_size=64, group_size=group_size, instant=False)
    running = [asyncio.create_task(parts.dispatcher.run()), asyncio.create_task(parts.path.collect())]
    while len(parts.submitted) < max_concurrent // group_size:
        await asyncio.sleep(0)
    times_us = []
    for event in range(events):
        before, start = len(parts.submitted), time.perf_counter_ns()
        parts.end(parts.submitted[event][0])
        while len(parts.submitted) == before:
            await asyncio.sleep(0)
        times_us.append((parts.submitted[before][1] - start) / 1e3)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return {"median_us": round(statistics.median(times_us), 1), "max_us": round(max(times_us), 1)}


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
    report["slot opening to next admission, G=8 C=1024"] = asyncio.run(opening(1024, 8, 1000))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
