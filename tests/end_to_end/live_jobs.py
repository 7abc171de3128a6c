"""Real jobs that a test signals, watches and kills while they run.

with LiveJob(run_dir, "run.steps=6") as job:
    job.wait_for("step 2/6")
    job.send(signal.SIGKILL, rank=1)
    assert job.wait() != 0
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import forks
from tests.end_to_end.jobs import ROOT, command, environment
from tests.ledgers import closed
from tests.recomputed import differences

MARK = "LIVE_JOB"  # in the environment of all processes of a job
LIMIT_S = 90.0  # for anything to come; a test that runs into it has failed


class LiveJob:
    """One torchrun with its ranks; leaving the block kills what is left of it."""

    def __init__(
        self,
        run_dir: Path,
        *settings: str,
        ranks: int = 2,
        max_restarts: int = 0,
        module: str = "spmd_rl",
        script: tuple[str, ...] = (),
        cwd: Path = ROOT,
        start: Callable[..., subprocess.Popen] = forks.job,
    ) -> None:
        """`script` starts torchrun by itself; without one it is started here, with its imports made or by `start`."""
        launcher = (f"--max-restarts={max_restarts}", "--monitor-interval=0.1")
        settings = (f"model.path={ROOT}/models/tiny", "run.metrics_interval_s=0.5", *settings)
        argv = command("tiny_cpu.toml", run_dir, *settings, num_ranks=ranks, launcher=launcher, module=module)
        if script:
            argv = [*script, *argv[argv.index("spmd_rl") + 1 :]]
        self.lines: list[str] = []
        self._mark = f"{MARK}={run_dir}"
        self._changed = threading.Condition()
        self._process = (subprocess.Popen if script else start)(
            argv,
            cwd=cwd,
            env={**environment(), MARK: str(run_dir)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> LiveJob:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in [*self._children(), self._process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._process.stdout.close()

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, *, after: int = 0, limit_s: float = LIMIT_S) -> str:
        """The first line after so many that has the pattern; an AssertionError with all output if none comes."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while True:
                for line in self.lines[after:]:
                    if re.search(pattern, line):
                        return line
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not self._reader.is_alive():
                    raise AssertionError(f"{pattern!r} never came:\n{self.output}")
                self._changed.wait(min(left_s, 0.5))

    @property
    def launcher(self) -> int:
        """The process of torchrun."""
        return self._process.pid

    def pid(self, rank: int) -> int:
        """The process of a rank, of the newest start of the world."""
        found = [pid for pid in self._children() if f"\0RANK={rank}\0" in "\0" + _read(f"/proc/{pid}/environ")]
        return max(found)

    def send(self, number: signal.Signals, *, rank: int | None = None) -> None:
        """To the rank's process; without one to torchrun, which passes it on to all."""
        os.kill(self._process.pid if rank is None else self.pid(rank), number)

    def wait(self, *, limit_s: float = LIMIT_S) -> int:
        """Exit code of torchrun, once everybody is gone."""
        code = self._process.wait(limit_s)
        self._reader.join(limit_s)
        return code

    @property
    def exit_codes(self) -> dict[int, int]:
        """Exit codes of ranks as torchrun reports them, where any was not 0."""
        entries = re.findall(r"rank +: (\d+) .*\n.*exitcode +: (-?\d+)", self.output)
        return {int(rank): int(code) for rank, code in entries}

    @property
    def left(self) -> list[int]:
        """Processes of this job that are there, children of its ranks too."""
        paths = [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
        return [int(path.name) for path in paths if self._mark in _read(path / "environ").split("\0")]

    def _read(self) -> None:
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def _children(self) -> list[int]:
        stats = [(int(path.name), _read(path / "stat")) for path in Path("/proc").iterdir() if path.name.isdecimal()]
        parents = {pid: stat.rpartition(")")[2].split()[1] for pid, stat in stats if stat}
        return [pid for pid, parent in parents.items() if int(parent) == self._process.pid]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def steps(run_dir: Path) -> list[dict]:
    """The metrics of every step, in the order of the file."""
    return metrics(run_dir, "step")


def metrics(run_dir: Path, kind: str) -> list[dict]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def trained_tickets(run_dir: Path) -> list[int]:
    """Tickets of all trained batches, in order of training."""
    batches = sorted((run_dir / "batches").glob("step_*.json"), key=lambda path: int(path.stem.split("_")[1]))
    return [rollout["ticket"] for path in batches for rollout in json.loads(path.read_text())["rollouts"]]


def assert_whole(run_dir: Path, *, num_steps: int, max_staleness: int = 2, batch_size: int = 64) -> None:
    """A run that ended well, whatever happened on the way: nothing is missing and nothing came twice."""
    end = summary(run_dir)
    assert (end["status"], end["version"]) == ("done", num_steps)
    assert [record["version"] for record in steps(run_dir)] == list(range(1, num_steps + 1))
    tickets = trained_tickets(run_dir)
    assert sorted(tickets) == list(range(num_steps * batch_size))  # nothing is filtered, failed or left over here
    bound = (max_staleness + 1) * batch_size
    assert all(record["admission/per_step"] <= bound for record in steps(run_dir))
    recorded = steps(run_dir)
    assert end["age_max"] == max(record["age/rollout_max"] for record in recorded) <= max_staleness
    assert (end["steps"], end["tokens_trained"]) == (num_steps, sum(record["trainer/tokens"] for record in recorded))
    shown = EventAccumulator(str(run_dir / "tensorboard")).Reload().Scalars("reward")
    assert [event.step for event in shown] == list(range(1, num_steps + 1))
    ledger = closed(end["ledger"])
    assert ledger["admitted"] == num_steps * batch_size == ledger["rollouts"]["trained"]
    evaluated = [record["version"] for record in metrics(run_dir, "eval")]
    assert evaluated == sorted(set(evaluated))
    assert not list(run_dir.glob("checkpoints/*.tmp"))
    assert differences(run_dir) == []


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
