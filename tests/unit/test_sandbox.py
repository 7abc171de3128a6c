import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmd_rl.processes import sandbox
from spmd_rl.processes.sandbox import CONFINED, OUTPUT_BYTES, Execution, Sandbox, not_isolated_because
from tests.unit.test_workers import ends

WAYS = [
    pytest.param(way, marks=pytest.mark.skipif(bool(because), reason=f"no isolation by {way}: {because}"))
    for way in sandbox.ISOLATIONS
    for because in [not_isolated_because(way)]
]
isolated = pytest.mark.usefixtures("each_way")


@pytest.fixture(params=WAYS)
def each_way(request, monkeypatch) -> str:
    monkeypatch.setitem(Sandbox.__init__.__kwdefaults__, "isolation", request.param)
    return request.param


def run(code: str, stdin: str = "", **settings) -> Execution:
    return asyncio.run(Sandbox(require_isolation=False, **settings).run(code, stdin))


def told(code: str, **settings) -> object:
    """What isolated code says in JSON."""
    execution = asyncio.run(Sandbox(**settings).run(f"import ctypes, json, os, socket\n{code}"))
    assert execution.isolated and execution.ok, execution
    return json.loads(execution.stdout)


def wait_until(true) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes_with(word: str) -> list[str]:
    """Of this machine, by what is on their command line or in their environment."""
    files = [file for name in ("cmdline", "environ") for file in Path("/proc").glob(f"[0-9]*/{name}")]
    found = []
    for file in files:
        try:
            found += [file.parent.name] if word.encode() in file.read_bytes() else []
        except OSError:  # it has just ended
            continue
    return found


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


FAMILY = """
import os, time
for _ in range({children}):
    if not os.fork():
        {first}
        held = bytearray({mib} << 20)
        print("holds", flush=True)
        time.sleep({sleeps})
        os._exit(0)
for _ in range({children}):
    os.wait()
print("all")
"""
HIDES = "__import__('ctypes').CDLL(None).prctl(4, 0, 0, 0, 0)"  # from whoever would look into it


@isolated
@pytest.mark.parametrize("first", ["pass", HIDES])
def test_memory_is_limited_for_all_processes_together(first: str) -> None:
    ended = run(FAMILY.format(children=6, first=first, mib=100, sleeps=30), memory_bytes=1 << 29)
    assert (ended.exit_code, ended.timed_out, ended.stdout.count("all")) == (128 + 9, False, 0)
    fits = run(FAMILY.format(children=3, first=first, mib=100, sleeps=0.2), memory_bytes=1 << 29)
    assert fits.ok and fits.stdout.count("holds") == 3 and fits.stdout.endswith("all\n")


@isolated
def test_memory_that_processes_share_counts_once() -> None:
    shares = "held = bytearray(300 << 20)\n" + FAMILY.format(children=4, first="pass", mib=10, sleeps=0.3)
    assert run(shares, memory_bytes=1 << 29).ok


def test_open_files_are_limited():
    assert "Too many open files" in run("[open('/dev/null') for _ in range(200)]").stderr


def test_output_without_end_is_cut():
    execution = run("while True: print('x' * 1000)", timeout_s=5.0)
    assert len(execution.stdout) == OUTPUT_BYTES and not execution.ok


def test_the_working_directory_is_its_own_and_is_removed():
    execution = run("import os; open('mine', 'w').close(); print(os.getcwd(), os.environ.get('PYTHONPATH'))")
    folder, path = execution.stdout.split()
    assert path == "None" and not Path(folder).exists() and Path(folder) != Path.cwd()


STAYS = """
import ctypes, os, sys, time
ctypes.CDLL(None).prctl(1, 0)  # no signal when the parent ends
if os.fork() == 0:
    os.setsid()
    os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)"], {"WORD": "%s"})
if os.getpid() != os.getpgrp():
    os.setsid()
time.sleep(0.5)
print("begun", flush=True)
time.sleep(%d)
"""


@pytest.mark.parametrize("sleeps", [0, 3600])
def test_what_it_started_does_not_stay(sleeps: int):
    word = f"{os.getpid()}-{sleeps}-stays"
    execution = run(STAYS % (word, sleeps), timeout_s=10.0 if not sleeps else 2.0)
    assert execution.stdout == "begun\n" and execution.timed_out == bool(sleeps)
    assert not processes_with(word)


@isolated
def test_what_it_started_ends_with_the_process_that_started_it():
    word = f"{os.getpid()}-outlives"
    runs = f"asyncio.run(Sandbox().run({STAYS % (word, 60)!r}))"
    code = f"import asyncio; from spmd_rl.processes.sandbox import Sandbox; {runs}"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        wait_until(lambda: processes_with(word))
        parent.kill()
    wait_until(lambda: not processes_with(word))


# ---- what isolated code sees and reaches


@isolated
def test_processes_are_limited_for_root_too():
    assert "BlockingIOError" in run("import os, time\nfor _ in range(100):\n    if not os.fork(): time.sleep(9)").stderr


@isolated
def test_it_is_nobody_and_cannot_become_anybody():
    code = """
libc = ctypes.CDLL(None, use_errno=True)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
became = [libc.setuid(0), libc.setgroups(0, None), libc.unshare(0x10000000), libc.unshare(0x20000),
          libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.umount2(b"/usr", 2), libc.chroot(b"/tmp")]
print(json.dumps([os.getuid(), [status[f"Cap{s}"].strip() for s in ("Inh", "Prm", "Eff", "Bnd", "Amb")], became]))
"""
    uid, capabilities, became = told(code)
    assert uid == (os.getuid() or 65534) and set(capabilities) == {"0" * 16} and set(became) == {-1}


def test_it_sees_the_system_and_nothing_else(tmp_path: Path, each_way: str):
    (tmp_path / "secret").write_text("s")
    code = f"""
seen = {{path: os.path.exists(path) for path in ({str(tmp_path)!r}, {str(Path.cwd())!r} + "/README.md", "/run", "/var",
    "/sys", "/etc/shadow", "/etc/hosts", "/home", "/dev/sda", "/dev/kvm", "/dev/tty", "/dev/mem")}}
print(json.dumps([seen, sorted(os.listdir("/tmp")), [p for p in os.listdir("/proc") if p.isdigit()],
    sorted(os.listdir("/proc/self/fd"))[:3], len(os.listdir("/proc/self/fd")), os.path.exists("/usr")]))
"""
    seen, temporary, processes, first, num_open, system = told(code)
    assert not any(seen.values()) and system
    python = {path.parts[2] for path in map(Path, (sys.prefix, sys.base_prefix)) if path.parts[1] == "tmp"}
    assert set(temporary) == {"shm", "work"} | python
    assert len(processes) == {"namespaces": 2, "bubblewrap": 3}[each_way]  # its own among them
    assert first == ["0", "1", "2"] and num_open == 4  # the fourth is of the listing


@isolated
def test_it_can_write_to_its_own_file_system_alone():
    code = """
def writes(path):
    try:
        with open(path, "w"): return True
    except OSError: return False
places = ["/usr/x", "/usr/bin/env", "/bin/x", "/x", "/code.py", "/etc/passwd", "/etc/x", "/dev/x", os.__file__,
    "/proc/sys/kernel/hostname", "/proc/sysrq-trigger", "/proc/1/oom_score_adj"]
own = ["x", "/tmp/x", "/dev/shm/x", "/dev/null"]
print(json.dumps([[path for path in paths if writes(path)] for paths in (places, own)]))
"""
    assert told(code) == [[], ["x", "/tmp/x", "/dev/shm/x", "/dev/null"]]


@isolated
def test_its_files_have_one_limit_together():
    code = """
written = 0
try:
    for i in range(200):
        with open(("x", "/tmp/x", "/dev/shm/x")[i % 3] + str(i), "wb") as file: written += file.write(bytes(1 << 20))
except OSError as error: print(json.dumps([error.errno, written]))
"""
    errno, written = told(code)
    assert errno == 28 and 60 << 20 <= written <= 64 << 20


def test_it_reaches_no_socket_of_this_machine(tmp_path: Path, each_way: str):
    code = """
def reaches(family, address):
    with socket.socket(family) as s:
        s.settimeout(2)
        try: s.connect(address)
        except OSError as error: return type(error).__name__
unix = [reaches(socket.AF_UNIX, address) for address in (%r, %r)]
print(json.dumps([reaches(socket.AF_INET, ("127.0.0.1", %d)), *unix]))
"""
    abstract = f"\0spmd-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as named,
        socket.socket(socket.AF_UNIX) as other,
    ):
        for server, address in ((named, str(tmp_path / "s")), (other, abstract)):
            server.bind(address)
            server.listen()
        answers = told(code % (str(tmp_path / "s"), abstract, tcp.getsockname()[1]))
    there_is_no_network = {
        "namespaces": "OSError",
        "bubblewrap": "ConnectionRefusedError",
    }  # its own loopback
    assert answers == [there_is_no_network[each_way], "FileNotFoundError", "ConnectionRefusedError"]


def test_signals_stay_inside(each_way: str):
    """There is nobody to signal; beside bubblewrap's process there is the one that waits, and with it all ends."""
    execution = run("import os; print('begun', flush=True); os.kill(-1, 9)")
    assert execution.stdout == "begun\n"
    ended = {"namespaces": (1, True), "bubblewrap": (128 + 9, False)}[each_way]
    assert (execution.exit_code, "ProcessLookupError" in execution.stderr) == ended


@isolated
def test_its_environment_is_its_own():
    code = (
        "print(json.dumps([sorted(os.environ), [open(f'/proc/{p}/environ', 'rb').read().decode() for p in ('self',)]]))"
    )
    names, others = told(code)
    assert not {"USER", "PYTHONPATH", "HF_TOKEN", "LOGNAME"} & set(names) and "PYTHONPATH" not in others[0]


LOCKED = {
    "nested": "for _ in range(1200): os.mkdir('d'); os.chdir('d')",
    "locked": "os.makedirs('a/b/c'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)",
    "replaced": "os.chdir('..'); os.rmdir('work') if os.path.isdir('work') else None; os.mkfifo('work')",
    "links": "os.symlink('/proc/self/environ', 'out'); os.symlink('/', 'root'); os.link('out', 'other')",
}


@pytest.mark.parametrize("mode", ["isolated", "confined"])
@pytest.mark.parametrize("damage", LOCKED)
def test_whatever_it_does_to_its_folder_the_folder_is_gone(damage: str, mode: str, tmp_path: Path, monkeypatch) -> None:
    if mode == "confined":
        monkeypatch.setattr(sandbox, "not_isolated_because", lambda isolation: "tried")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    execution = run(f"import os\n{LOCKED[damage]}\nprint('done')")
    assert execution.stdout == "done\n", execution.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_isolation_a_sandbox_is_refused_unless_that_is_allowed(monkeypatch) -> None:
    monkeypatch.setattr(sandbox, "not_isolated_because", lambda isolation: "unshare: Operation not permitted")
    with pytest.raises(ValueError, match=r"\(unshare: Operation not permitted\).*require_isolation = false"):
        Sandbox(require_isolation=True)
    assert not run("print(1)").isolated


def test_a_signal_that_ends_it_is_told():
    assert run("import ctypes; ctypes.string_at(0)").exit_code == 128 + 11


def test_without_namespaces_the_limits_still_hold_and_nothing_stays():
    code = """
import asyncio
from spmd_rl.processes.sandbox import Sandbox
hangs = "import os, time\\nif os.fork() == 0: os.setsid(); print(os.getpid(), flush=True)\\ntime.sleep(60)"
a = asyncio.run(Sandbox(require_isolation=False).run("print(1)"))
b = asyncio.run(Sandbox(timeout_s=1.0, require_isolation=False).run(hangs))
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
    (tmp_path / "work").mkdir()
    code = f"""
import ctypes, os, sys
from spmd_rl.processes import confinement
sys.platform, ctypes.CDLL = "darwin", None
mark = os.open({str(tmp_path / "mark")!r}, os.O_WRONLY | os.O_CREAT)
confinement.launch(confinement.CONFINED, {str(tmp_path)!r}, [], os.getppid(), 1 << 30, 7, mark)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "(7, 7) (-1, -1)\n", done.stderr
    assert (tmp_path / "mark").read_bytes() == CONFINED


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="num = 0 must be at least 1"):
        Sandbox(num=0)
    with pytest.raises(ValueError, match="isolation = 'docker': must be one of namespaces, bubblewrap"):
        Sandbox(isolation="docker")


def test_no_more_run_at_a_time_than_there_are_places():
    async def main():
        sandbox = Sandbox(num=1)
        code = "import time; a = time.monotonic(); time.sleep(0.05); print(a, time.monotonic())"
        return await asyncio.gather(*(sandbox.run(code) for _ in range(3)))

    spans = sorted(tuple(map(float, execution.stdout.split())) for execution in asyncio.run(main()))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
