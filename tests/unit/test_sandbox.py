import asyncio
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.sandbox import CONFINED, OUTPUT_BYTES, Execution, Sandbox
from tests.unit.test_workers import ends


def run(code: str, stdin: str = "", **settings) -> Execution:
    return asyncio.run(Sandbox(**settings).run(code, stdin))


def test_code_prints_reads_and_ends():
    execution = run("print(int(input()) * 2)", stdin="21")
    assert (execution.stdout, execution.exit_code, execution.ok) == ("42\n", 0, True)


def test_an_error_is_its_traceback_and_exit_code():
    execution = run("1 / 0")
    assert "ZeroDivisionError" in execution.stderr and execution.exit_code == 1 and not execution.ok


def test_an_endless_loop_is_killed():
    execution = run("print('begun', flush=True)\nwhile True: pass", timeout_s=1.0)
    assert execution.timed_out and not execution.ok and execution.stdout == "begun\n"


def test_memory_and_file_size_are_limited():
    assert "MemoryError" in run("x = bytearray(1 << 31)", memory_bytes=1 << 29).stderr
    assert "File too large" in run("open('x', 'wb').write(bytes(1 << 25))").stderr


def test_open_files_and_processes_are_limited():
    assert "Too many open files" in run("[open('/dev/null') for _ in range(200)]").stderr
    execution = run("import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(1); os._exit(0)")
    if os.getuid() == 0 or not execution.isolated:
        pytest.skip("processes are limited for other users than root, where the kernel grants namespaces")
    assert "BlockingIOError" in execution.stderr


def test_output_without_end_is_cut():
    execution = run("while True: print('x' * 1000)", timeout_s=5.0)
    assert len(execution.stdout) == OUTPUT_BYTES and not execution.ok


def test_the_working_directory_is_its_own_and_is_removed():
    execution = run("import os; open('mine', 'w').close(); print(os.getcwd(), os.environ.get('PYTHONPATH'))")
    folder, path = execution.stdout.split()
    assert path == "None" and not Path(folder).exists() and Path(folder) != Path.cwd()


def test_what_it_started_does_not_stay(tmp_path):
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    open({str(tmp_path / "child")!r}, 'w').write(os.readlink('/proc/self'))
    time.sleep(3600)
while not os.path.exists({str(tmp_path / "child")!r}): time.sleep(0.01)
time.sleep(0.05)
"""
    run(code)
    assert ends(int((tmp_path / "child").read_text()))


def test_there_is_no_network():
    code = "import socket; s = socket.socket(); s.settimeout(2); s.connect(('127.0.0.1', {port}))"
    with socket.create_server(("127.0.0.1", 0)) as server:
        execution = run(code.format(port=server.getsockname()[1]))
    if not execution.isolated:
        pytest.skip("this kernel grants no namespaces")
    assert execution.exit_code == 1 and "OSError" in execution.stderr


def test_a_signal_that_ends_it_is_told():
    assert run("import ctypes; ctypes.string_at(0)").exit_code == 128 + 11


def test_without_namespaces_the_limits_still_hold_and_nothing_stays():
    code = """
import asyncio
from spmd_rl.sandbox import Sandbox
hangs = "import os, time\\nif os.fork() == 0: os.setsid(); print(os.getpid(), flush=True)\\ntime.sleep(60)"
a = asyncio.run(Sandbox().run("print(1)"))
b = asyncio.run(Sandbox(timeout_s=1.0).run(hangs))
print(a.stdout.strip(), a.isolated, b.timed_out, b.isolated, b.stdout)
"""
    inner = f"echo 0 > /proc/sys/user/max_user_namespaces && exec {sys.executable} -c '{code}'"
    done = subprocess.run(["unshare", "-Ur", "sh", "-c", inner], capture_output=True, text=True, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip("this kernel grants no namespaces")
    *said, child = done.stdout.split()
    assert said == ["1", "False", "True", "False"], done.stderr
    assert ends(int(child))


def test_without_linux_the_other_limits_still_hold(tmp_path):
    (tmp_path / "code.py").write_text("import resource as r; print(*map(r.getrlimit, (r.RLIMIT_CPU, r.RLIMIT_AS)))")
    code = f"""
import ctypes, os, sys
from spmd_rl.sandbox import _launch
sys.platform, ctypes.CDLL = "darwin", None
_launch({str(tmp_path)!r}, os.getppid(), 1 << 30, 7, os.open({str(tmp_path / "mark")!r}, os.O_WRONLY | os.O_CREAT))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "(7, 7) (-1, -1)\n", done.stderr
    assert (tmp_path / "mark").read_bytes() == CONFINED


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="num = 0 must be at least 1"):
        Sandbox(num=0)


def test_no_more_run_at_a_time_than_there_are_places():
    async def main():
        sandbox = Sandbox(num=1)
        code = "import time; a = time.monotonic(); time.sleep(0.05); print(a, time.monotonic())"
        return await asyncio.gather(*(sandbox.run(code) for _ in range(3)))

    spans = sorted(tuple(map(float, execution.stdout.split())) for execution in asyncio.run(main()))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
