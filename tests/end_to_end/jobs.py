"""Real jobs for tests: a torchrun of this package in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests import forks

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
MODELS = ROOT / "models"  # made by the first test that needs one, and kept
LIMIT_S = 240.0  # no test's job comes near it


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    code: int  # of torchrun: 0, or 1 for any rank's failure
    output: str  # of all ranks
    folder: Path  # run directory

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def probe_difference(self) -> float:
        """Largest between log-probs of engines and trainer at one version, of sampled tokens and of whole forwards."""
        return max(max(probe["probe/max_difference"], probe["probe/sampled_max"]) for probe in self.metrics("probe"))

    def metrics(self, kind: str) -> list[dict]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]


def command(
    config: str,
    folder: Path,
    *settings: str,
    num_ranks: int = 2,
    launcher: tuple[str, ...] = (),
    module: str = "spmd_rl",
) -> list[str]:
    """What a user would type."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    return [*torchrun, *launcher, "-m", module, str(CONFIGS / config), f"run.dir={folder}", *settings]


def environment() -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, "PYTHONPATH": str(ROOT), **quiet}


def run(
    config: str,
    folder: Path,
    *settings: str,
    num_ranks: int = 2,
    launcher: tuple[str, ...] = (),
    start: Callable[..., subprocess.Popen] = forks.job,
) -> Job:
    """Run a job to its end; `start`: `subprocess.Popen` for what tests the start itself."""
    words = command(config, folder, *settings, num_ranks=num_ranks, launcher=launcher)
    with start(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as job:
        try:
            output, _ = job.communicate(timeout=LIMIT_S)
        except BaseException:
            job.kill()
            raise
    return Job(job.returncode, output, folder)
