"""Evaluations beside training: how many episodes run at once, and what is left of one that is cancelled."""

import asyncio

from spmd_rl.orchestrator.eval_runner import EvalRunner
from tests import fakes
from tests.clock import run_virtual


def evaluation(num_tasks: int, *, samples: int = 2) -> tuple[EvalRunner, list]:
    submitted: list = []
    tasks = {"fake": list(fakes.tasks(num_tasks))}
    return EvalRunner(tasks=tasks, samples=samples, submit=submitted.append, version=lambda: 3), submitted


def end(runner: EvalRunner, work) -> None:
    for sample in range(work.size):
        runner.ended(fakes.rollout(work, sample))


def test_no_more_episodes_run_at_once_than_allowed_and_the_last_one_brings_the_report():
    async def main():
        runner, submitted = evaluation(5)
        running = asyncio.create_task(runner.run("e", concurrent=4))
        await asyncio.sleep(0)
        assert (len(submitted), runner.in_flight) == (2, 4)
        for number in range(5):
            assert not running.done()
            end(runner, submitted[number])
            assert runner.in_flight <= 4
        report, rollouts = await running
        assert report.eval_id == "e" and [r.ticket for r in rollouts] == list(range(10))
        assert runner.sampled_tokens == 10

    run_virtual(main())


def test_what_is_in_flight_when_an_evaluation_is_cancelled_ends_and_nothing_follows():
    async def main():
        for concurrent in (4, 10):  # some wait for a place, all have one
            runner, submitted = evaluation(5)
            running = asyncio.create_task(runner.run("e", concurrent=concurrent))
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait({running})
            for work in list(submitted):
                end(runner, work)
            assert len(submitted) == concurrent // 2 and runner.in_flight == 0

    run_virtual(main())
