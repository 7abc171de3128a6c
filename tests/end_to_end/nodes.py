"""Two nodes on one machine: network namespaces joined by a cable, each with a host name that nobody can resolve.

with Nodes(tmp_path) as nodes:
    with nodes.start(0, run_dir) as first, nodes.start(1, run_dir) as second:
        nodes.cut("drop")
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.end_to_end.jobs import ROOT
from tests.end_to_end.live_jobs import LiveJob

ADDRESSES = ("10.88.0.1", "10.88.0.2")
NOBODY = "02:00:00:00:00:99"  # what is sent to it arrives at no one


class NotPermitted(Exception):
    """This machine makes no network namespaces for this user, or has no iproute2."""


class Nodes:
    """launch/multi_node.sh on two nodes, one rank each; leaving the block kills all that runs there."""

    def __init__(self, folder: Path) -> None:
        self._names = [f"spmd{index}-{os.getpid()}" for index in range(2)]
        self._cables = [f"sp{index}-{os.getpid()}" for index in range(2)]
        self._venv = folder / "venv"  # this environment, as scripts/setup would have made it
        self._venv.mkdir()
        for name in ("bin", "lib", "pyvenv.cfg"):
            (self._venv / name).symlink_to(Path(sys.prefix) / name)
        shutil.copy(ROOT / "pyproject.toml", self._venv / ".installed")

    def __enter__(self) -> Nodes:
        try:
            for name in self._names:
                _ip("netns", "add", name)
            _ip("link", "add", self._cables[0], "type", "veth", "peer", "name", self._cables[1])
            for name, cable, address in zip(self._names, self._cables, ADDRESSES, strict=True):
                _ip("link", "set", cable, "netns", name)
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                _ip("-n", name, "link", "set", cable, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            self.__exit__()
            raise NotPermitted(getattr(error, "stderr", "") or str(error)) from error
        return self

    def __exit__(self, *error: object) -> None:
        for index, name in enumerate(self._names):
            with suppress(FileNotFoundError, subprocess.CalledProcessError):
                self.kill(index, ranks=True)
                _ip("netns", "del", name)  # and its end of the cable

    def start(self, index: int, run_dir: Path, *settings: str, **environment: str) -> LiveJob:
        """The script on a node; node 0 is MASTER."""
        variables = {
            "NNODES": "2", "NPROC": "1", "MASTER": f"{ADDRESSES[0]}:29500", "PAUSE_S": "5", "SPMD_RL_VENV": self._venv,
            **environment,
        }  # fmt: skip
        inside = f'hostname node{index} && exec env "$@"'
        enter = ("ip", "netns", "exec", self._names[index], "unshare", "--uts", "sh", "-c", inside, "node")
        words = (f"{name}={value}" for name, value in variables.items())
        return LiveJob(run_dir, *settings, script=(*enter, *words, str(ROOT / "launch/multi_node.sh")))

    def kill(self, index: int, *, ranks: bool = False) -> None:
        """Script and torchrun of a node; ranks go with them by themselves."""
        for pid in _ip("netns", "pids", self._names[index]).split():
            with suppress(FileNotFoundError, ProcessLookupError):
                if not ranks and "\0RANK=" in Path(f"/proc/{pid}/environ").read_text():
                    continue
                os.kill(int(pid), signal.SIGKILL)

    def cut(self, how: str) -> None:
        """From now on nothing gets through: one end is down, or packets go astray on their way both ways."""
        if how == "down":
            _ip("-n", self._names[1], "link", "set", self._cables[1], "down")
            return
        for name, cable, other in zip(self._names, self._cables, reversed(ADDRESSES), strict=True):
            _ip("-n", name, "neigh", "replace", other, "lladdr", NOBODY, "dev", cable, "nud", "permanent")

    def listeners(self, index: int) -> list[str]:
        """Addresses on which processes of a node wait for connections."""
        lines = _run("ip", "netns", "exec", self._names[index], "ss", "-ltnH").splitlines()
        return sorted(line.split()[3].rpartition(":")[0] for line in lines)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
