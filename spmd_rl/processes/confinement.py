"""The program that becomes the code of a sandbox, confined: `spmd_rl.processes.sandbox` starts it.

Isolated, the code has namespaces of its own: no other process, no network, no file but the system's and Python's, which
it can only read, and an empty file system in memory of a fixed size, /tmp and /dev/shm, that ends with it.
Where the trainer runs as root the code is nobody; it has no capabilities in any case.
Where bubblewrap makes the namespaces, this program starts it, and is started in there again for what is left to do.
Confined, it has the same limits on itself, and sees what its user sees.

On the status pipe it says ISOLATED or CONFINED right before the code begins, or FAILED and why there is no isolation.
Imports the standard library only, and guard.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import resource
import runpy
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ISOLATED, CONFINED, FAILED = b"i", b"c", b"f"
BUBBLEWRAP, IN_BUBBLEWRAP = b"b", b"n"  # modes alone: what is said is ISOLATED
FILE_BYTES = 1 << 24  # of a file that the code writes, its output among them
DISK_BYTES = 1 << 26  # of all files of isolated code, in memory
NUM_FILES, NUM_PROCESSES = 128, 64  # open at a time; the latter for isolated code, each thread counts
LOOK_S = 0.05  # between two looks at the memory of all processes of isolated code
NOBODY = 65534
WORK, SHARED = "tmp/work", "tmp/shm"  # in the new file system: the working directory, and what is at /dev/shm
BASE = "/tmp"  # where the new file system is put together; it is there for every user
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
NEW_NS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PID, NEW_NET = (
    0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
)  # fmt: skip
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18
)  # fmt: skip
KEPT = {"noexec": MS_NOEXEC, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}  # options that mounts come with
MNT_DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "arm64": 41, "ppc64le": 203, "s390x": 217, "riscv64": 41}  # system calls
CAPABILITY_V3 = 0x20080522


def launch(
    mode: bytes, folder: str, python: list[str], parent: int, memory_bytes: int, cpu_s: int, status: int
) -> None:
    """Run code.py of `folder` in this process, with the folders `python` in sight."""
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if mode != IN_BUBBLEWRAP and os.getppid() != parent:  # bubblewrap sees to that itself
        os._exit(1)
    code, work = os.path.join(folder, "code.py"), os.path.join(folder, "work")
    temporary = work
    if sys.platform == "linux":
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        if mode != IN_BUBBLEWRAP:  # where memory ends, the kernel takes this process first
            Path("/proc/self/oom_score_adj").write_text("1000")
    if mode == BUBBLEWRAP:
        numbers = map(str, (parent, memory_bytes, cpu_s, status))
        inside = (f"/{Path(__file__).name}", IN_BUBBLEWRAP.decode(), folder, json.dumps(python), *numbers)
        words = [*_bubblewrap(folder, python), sys.executable, "-I", "-S", *inside]
        os.execve(words[0], words, {})
    if mode == ISOLATED:
        try:
            _isolate(Path(code).read_bytes(), python, memory_bytes)
        except OSError as error:
            os.write(status, FAILED + str(error).encode())
            os._exit(1)
    elif mode == IN_BUBBLEWRAP:
        _fork_watched(memory_bytes)
    else:
        runpy.run_path(str(Path(__file__).with_name("guard.py")))["guarded"](parent)
    isolated = mode in (ISOLATED, IN_BUBBLEWRAP)
    if isolated:
        code, work, temporary = "/code.py", f"/{WORK}", "/tmp"
    _limit(memory_bytes, cpu_s, isolated=isolated)
    os.chdir(work)
    os.write(status, ISOLATED if isolated else CONFINED)
    os.close(status)
    environment = {"PATH": "/usr/bin:/bin", "HOME": work, "TMPDIR": temporary, "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    os.execve(sys.executable, [sys.executable, "-I", code], environment)


def _limit(memory_bytes: int, cpu_s: int, *, isolated: bool) -> None:
    limits = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: NUM_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "linux":  # macOS knows the limit and refuses to set it
        limits[resource.RLIMIT_AS] = memory_bytes
    if isolated:  # counted per namespace; elsewhere it would count all that this user runs
        limits[resource.RLIMIT_NPROC] = NUM_PROCESSES
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _bubblewrap(folder: str, python: list[str]) -> list[str]:
    """The beginning of a command that runs in namespaces made by bubblewrap, with what isolated code sees."""
    words = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--die-with-parent",
        "--cap-drop",
        "ALL",
        "--clearenv",
    ]
    for path in _roots([*SYSTEM, *python]):
        words += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    words += ["--proc", "/proc", "--remount-ro", "/proc"]
    words += ["--size", str(DISK_BYTES), "--tmpfs", "/tmp", "--dir", f"/{WORK}", "--dir", f"/{SHARED}"]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": f"/{SHARED}"}
    for name, target in links.items():
        words += ["--symlink", target, f"/dev/{name}"]
    words += ["--ro-bind", f"{folder}/code.py", "/code.py"]
    words += ["--ro-bind", __file__, f"/{Path(__file__).name}"]
    return [*words, "--remount-ro", "/", "--chdir", "/"]


# ---- isolation


def _isolate(code: bytes, python: list[str], memory_bytes: int) -> None:
    """Return in a process of new namespaces, as a user without rights; OSError where the kernel does not let it."""
    if sys.platform != "linux" or platform.machine() not in PIVOT_ROOT:
        raise OSError(f"{sys.platform} on {platform.machine()} has no namespaces that are known here")
    is_root = os.getuid() == 0
    uid, gid = (NOBODY, NOBODY) if is_root else (os.getuid(), os.getgid())
    with _id_maps(uid, gid, by_another=is_root):
        _call("unshare", NEW_USER | NEW_NS | NEW_PID | NEW_NET | NEW_IPC | NEW_UTS)
    with contextlib.suppress(OSError):  # /proc is read-only in some containers; such a namespace shows nothing more
        Path("/proc/sys/user/max_user_namespaces").write_text("0")
    sources = {  # opened while this user still is the trainer's, who may see more than the code's
        path: os.readlink(path) if os.path.islink(path) else os.open(path, os.O_PATH)
        for path in _roots([*SYSTEM, *python, *DEVICES])
    }
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    alive, held = os.pipe()  # hangs up when the launcher ends
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a new user has none
    if child := os.fork():  # the child is process 1 of its namespace: with it everything in there ends
        _wait(child)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(held)
    if select.select([alive], [], [], 0)[0]:
        os._exit(1)
    os.close(alive)
    _new_root(sources, code, uid, gid)
    _drop_capabilities()
    _fork_watched(memory_bytes)  # process 1 is not the code, which could wish to outlive the launcher


def _wait(child: int) -> NoReturn:
    """End as the child does, which is then the last of its own."""
    while True:
        process, ended = os.wait()
        if process == child:
            os._exit(_code(ended))


def _code(ended: int) -> int:
    """The exit code for how a process ended: 128 + signal where one ended it."""
    return ended >> 8 if os.WIFEXITED(ended) else 128 + os.WTERMSIG(ended)


def _fork_watched(memory_bytes: int) -> None:
    """Return in a child; this process waits for it and looks at the memory of all."""
    if child := os.fork():
        _prctl(PR_SET_DUMPABLE, 0)  # the code cannot look into this one
        _wait_within(child, memory_bytes)


def _wait_within(child: int, memory_bytes: int) -> NoReturn:
    """End as the child does, or as one that was killed once all processes together hold more memory; all end with this.

    Looks again and again, for nothing tells of memory; where /proc is hidden there is nothing to look at.
    """
    ends = os.pidfd_open(child)
    while True:
        select.select([ends], [], [], LOOK_S)
        while (ended := _ended())[0]:
            if ended[0] == child:
                os._exit(_code(ended[1]))
        if _memory_together() > memory_bytes:
            os._exit(128 + signal.SIGKILL)


def _ended() -> tuple[int, int]:
    """A process of the namespace that has ended, and how; (0, 0) where none has."""
    return os.waitpid(-1, os.WNOHANG)


def _memory_together() -> int:
    """Bytes that all processes but this one hold; what two of them share counts once, where they let it be seen."""
    held = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError, ValueError):  # it has ended meanwhile
                held += _memory_of(f"/proc/{name}")
    return held


def _memory_of(process: str) -> int:
    try:
        rollup = Path(process, "smaps_rollup").read_text()
        return 1024 * int(re.findall(r"^Pss: +(\d+) kB$", rollup, re.MULTILINE)[0])
    except (OSError, IndexError):  # it does not let itself be looked into, or the kernel does not sum up
        return int(Path(process, "statm").read_text().split()[1]) * resource.getpagesize()


def _roots(paths: list[str]) -> list[str]:
    """Those that are there and lie in no other one."""
    there = sorted({path for path in paths if os.path.exists(path)})
    return [p for p in there if not any(p != q and p.startswith(q + "/") for q in there if not os.path.islink(q))]


@contextlib.contextmanager
def _id_maps(uid: int, gid: int, *, by_another: bool) -> Iterator[None]:
    """The one user and group of the user namespace that is entered within.

    Root may give it another user than itself, from outside only: a process that stays there does.
    """
    texts = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}

    def write(process: int | str) -> None:
        for name, text in texts.items():
            Path(f"/proc/{process}/{name}").write_text(text)

    if not by_another:
        yield
        write("self")
        return
    this, (entered, enters) = os.getpid(), os.pipe()
    if (other := os.fork()) == 0:
        os.close(enters)
        try:
            if os.read(entered, 1):
                write(this)
            os._exit(0)
        finally:
            os._exit(1)
    try:
        yield
        os.write(enters, b".")
    finally:
        os.close(enters)
        os.close(entered)
        _, ended = os.waitpid(other, 0)
    if ended:
        raise PermissionError("the user of a new namespace cannot be set")


def _new_root(sources: dict[str, int | str], code: bytes, uid: int, gid: int) -> None:
    """An empty file system with the sources in it, read-only, as the root of this process: nothing else is left."""
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _mount("tmpfs", BASE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.chdir(BASE)
    for path in ("tmp", "proc", "dev/shm", "etc"):
        os.makedirs(path)
    _mount("tmpfs", "tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={DISK_BYTES},nr_inodes=4096,mode=755")
    os.mkdir(WORK)
    os.mkdir(SHARED)
    _mount(SHARED, "dev/shm", "", MS_BIND)
    before = {number for number, *_ in _mounts()}
    for path, source in sources.items():
        _show(path.lstrip("/"), source)
    for number, mount, options in _mounts():
        if number not in before and not mount.startswith(f"{BASE}/dev/"):
            kept = sum(flag for name, flag in KEPT.items() if name in options)
            _mount("none", mount, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"dev/{name}")
    Path("etc/passwd").write_text(f"sandbox:x:{uid}:{gid}::/{WORK}:/bin/sh\n")
    Path("code.py").write_bytes(code)
    with contextlib.suppress(OSError):  # a container that hides parts of /proc allows no whole one: then there is none
        _mount("proc", "proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    _mount("none", BASE, "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)
    _call("syscall", PIVOT_ROOT[platform.machine()], b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def _show(place: str, source: int | str) -> None:
    """An open file or folder, or a link to a path, in the new root."""
    os.makedirs(os.path.dirname(place) or ".", exist_ok=True)
    if isinstance(source, str):
        os.symlink(source, place)
        return
    if os.path.isdir(f"/proc/self/fd/{source}"):
        os.makedirs(place, exist_ok=True)
    else:
        Path(place).touch()
    _mount(f"/proc/self/fd/{source}", place, "", MS_BIND | MS_REC)


def _mounts() -> Iterator[tuple[str, str, list[str]]]:
    """Number, mount point and options of each mount of this process."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        number, _, _, _, point, options, *_ = line.split()
        yield number, re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point), options.split(",")


def _drop_capabilities() -> None:
    for capability in range(64):
        if ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # the kernel knows no more
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_V3, 0), (ctypes.c_uint32 * 6)()
    _call("capset", header, none)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    try:
        _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode() or None)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({target})") from None


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    _mode, _folder, _python, *_numbers = sys.argv[1:]
    launch(_mode.encode(), _folder, json.loads(_python), *map(int, _numbers))
