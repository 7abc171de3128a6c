import asyncio
import math
import os
import select
import subprocess
import sys

import pytest

from spmd_rl.processes.workers import TimedOut, WorkerDied, Workers
from tests.unit import cold_jobs, jobs


def run(job, **settings):
    """`await job(workers)` with workers that are closed afterwards."""

    async def main():
        workers = Workers(**settings)
        try:
            return await job(workers)
        finally:
            await workers.close()

    return asyncio.run(main())


def ends(pid: int) -> bool:
    """Waits for the end of a process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([descriptor], [], [], 20.0)
    os.close(descriptor)
    return bool(ended)


def test_a_function_runs_in_another_process_that_is_used_again():
    async def job(workers):
        assert await workers.call(jobs.add, 2, 3) == 5
        return [await workers.call(jobs.own_id) for _ in range(2)]

    ids = run(job, num=2)
    assert ids[0] == ids[1] != os.getpid()


def test_the_time_of_a_job_begins_after_its_module_is_warm():
    async def job(workers):
        return [await workers.call(cold_jobs.times_warmed) for _ in range(2)]

    assert run(job, num=1, timeout_s=0.5) == [1, 1]


def test_a_function_may_use_alarms_and_give_nan():
    async def job(workers):
        assert math.isnan(await workers.call(jobs.not_a_number))
        return await workers.call(jobs.use_an_alarm)

    assert run(job, num=1) == "ok"


@pytest.mark.parametrize("function", [jobs.sleep_for_ever, jobs.spin_without_signals])
def test_a_function_that_hangs_is_killed_and_the_next_one_runs(function):
    async def job(workers):
        with pytest.raises(TimedOut, match=r"tests\.unit\.jobs:.* did not end within 0\.2 s"):
            await workers.call(function)
        return await workers.call(jobs.add, 1, 1)

    assert run(job, num=1, timeout_s=0.2) == 2


def test_a_function_that_never_begins_is_told_from_one_that_does_not_end():
    async def job(workers):
        await workers.call(jobs.add, 1, 1)

    with pytest.raises(TimedOut, match=r"tests\.unit\.jobs:add did not begin, its module imported, within 0\.001 s"):
        run(job, num=1, start_s=0.001)


def test_what_a_killed_function_has_started_is_killed_too(tmp_path):
    async def job(workers):
        with pytest.raises(TimedOut):
            await workers.call(jobs.fork_and_hang, str(tmp_path / "children"))
        return [ends(int(child)) for child in (tmp_path / "children").read_text().split()]

    assert run(job, num=1, timeout_s=0.5) == [True, True]


def test_what_a_function_has_started_does_not_outlive_its_process(tmp_path):
    async def job(workers):
        with pytest.raises(WorkerDied, match="code 7"):
            await workers.call(jobs.fork_and_die, str(tmp_path / "children"))
        return [ends(int(child)) for child in (tmp_path / "children").read_text().split()]

    assert run(job, num=1) == [True, True]


def test_a_process_that_dies_is_an_error_and_is_replaced():
    async def job(workers):
        with pytest.raises(WorkerDied, match="code 7"):
            await workers.call(jobs.die)
        return await workers.call(jobs.add, 1, 1)

    assert run(job, num=1) == 2


def test_what_a_function_raises_is_raised():
    async def job(workers):
        with pytest.raises(RuntimeError, match=r"tests\.unit\.jobs:add: TypeError: unsupported operand"):
            await workers.call(jobs.add, 1, "x")
        with pytest.raises(RuntimeError, match="no attribute 'gone'"):
            await workers.call(type("gone", (), {"__module__": "tests.unit.jobs"}))

    run(job, num=1)


def test_the_pool_is_bounded():
    async def job(workers):
        return await asyncio.gather(*(workers.call(jobs.own_id) for _ in range(6)))

    assert len(set(run(job, num=2))) <= 2


def test_a_cancelled_call_frees_its_place():
    async def job(workers):
        call = asyncio.create_task(workers.call(jobs.sleep_for_ever))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await workers.call(jobs.add, 1, 1)

    assert run(job, num=1) == 2


def test_where_there_is_no_prctl_a_process_goes_on_as_long_as_its_parent_is_there():
    code = """
import ctypes, os, sys
from spmd_rl.processes.guard import die_with_parent
sys.platform, ctypes.CDLL = "darwin", None
die_with_parent(os.getppid())
print("alive", flush=True)
die_with_parent(0)
print("dead")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("alive\n", 1), done.stderr


def test_processes_and_what_they_have_started_die_with_the_one_that_started_them(tmp_path):
    code = """
import asyncio, sys
from spmd_rl.processes.workers import Workers
from tests.unit import jobs
async def main():
    workers = Workers(num=2, timeout_s=60.0)
    idle = await workers.call(jobs.own_id)
    print(idle, await workers.call(jobs.parent_id), flush=True)
    await asyncio.gather(*(workers.call(jobs.fork_and_hang, path) for path in sys.argv[1:]))
asyncio.run(main())
"""
    pipes = [tmp_path / "one", tmp_path / "other"]
    for pipe in pipes:
        os.mkfifo(pipe)
    with subprocess.Popen([sys.executable, "-c", code, *pipes], stdout=-1, text=True) as parent:
        processes = parent.stdout.readline().split()
        processes += [child for pipe in pipes for child in pipe.read_text().split()]
        assert len(processes) == 6
        for process in processes:
            os.kill(int(process), 0)  # it is there
        parent.kill()
    assert [ends(int(process)) for process in processes] == [True] * 6
