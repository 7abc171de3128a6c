"""Does asynchrony pay: steps per minute at S = 1 against S = 0, on the same two ranks, runs interleaved.

    python -m benchmarks.asynchrony [--repeats 3] [--steps 24]

Real jobs on the tiny model, with sequences long enough that generation and training take about equal time ("balance",
generation over training, measured in the synchronous runs, should be near 1; with equal times and nothing else in the
way the ratio would be 2).  Prints JSON; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LENGTH = 128  # sampled tokens of each of the 32 rollouts of a batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args()
    runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for staleness in runs:
                runs[staleness].append(job(Path(folder) / f"{repeat}-{staleness}", staleness, options.steps))
    per_minute = {
        staleness: statistics.median(run["steps_per_minute"] for run in found) for staleness, found in runs.items()
    }
    result = {
        "steps_per_minute": {f"S={staleness}": round(value, 1) for staleness, value in per_minute.items()},
        "ratio": round(per_minute[1] / per_minute[0], 3),
        "ratio_of_each_pair": [
            round(after["steps_per_minute"] / before["steps_per_minute"], 3)
            for before, after in zip(runs[0], runs[1], strict=True)
        ],
        "balance": round(statistics.median(run["balance"] for run in runs[0]), 2),
        "age_max": {f"S={staleness}": max(run["age_max"] for run in found) for staleness, found in runs.items()},
        "idle": {
            f"S={staleness}": {
                side: round(statistics.median(run[side] for run in found), 3)
                for side in ("trainer_idle", "engine_idle")
            }
            for staleness, found in runs.items()
        },
        "steps": options.steps,
        "repeats": options.repeats,
    }
    print(json.dumps(result, indent=1))


def job(folder: Path, staleness: int, steps: int) -> dict[str, float]:
    """One run's steps per minute, without its first three steps, and the balance of its two sides."""
    settings = (
        f"run.steps={steps}",
        "run.probe_every=0",
        "eval.every=-1",
        "rollout.batch_size=32",
        f"rollout.max_tokens={LENGTH}",
        f"env.fraction.args={{length={LENGTH}}}",
        f"inference.max_seq_len={LENGTH + 32}",
        f"staleness.max_staleness={staleness}",
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "spmd_rl", "configs/tiny_cpu_sync.toml", f"run.dir={folder}", *settings]
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=ROOT, env={**os.environ, **quiet}, check=True, stdout=subprocess.DEVNULL)
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    found = [record for record in records if record["kind"] == "step"][2:]
    waited = statistics.median(step["trainer/wait_s"] for step in found)
    worked = statistics.median(step["trainer/step_s"] for step in found)
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "steps_per_minute": 60 * (len(found) - 1) / (found[-1]["time"] - found[0]["time"]),
        "balance": waited / worked,
        "age_max": summary["age_max"],
        "trainer_idle": summary["trainer_idle"],
        "engine_idle": summary["engine_idle"],
    }


if __name__ == "__main__":
    main()
