"""A long run grows nothing: memory, threads, file descriptors, temporary files."""

import itertools
import json
import os
import re
from pathlib import Path

import pytest

from tests.end_to_end.live_jobs import LiveJob, summary

STEPS, FROM = 2000, 200
INTERVAL_S = 2.0


def sizes(pid: int) -> dict[str, int]:
    found = dict(re.findall(r"(VmRSS|Threads):\s+(\d+)", Path(f"/proc/{pid}/status").read_text()))
    return {"kB": int(found["VmRSS"]), "threads": int(found["Threads"]), "files": len(os.listdir(f"/proc/{pid}/fd"))}


@pytest.mark.full
def test_two_thousand_steps_grow_nothing(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    settings = ["rollout.batch_size=8", "rollout.group_size=4", "staleness.max_concurrent=24", "eval.every=-1"]
    settings += [f"run.steps={STEPS}", "checkpoint.every=100", "run.stall_timeout_s=60"]
    settings += [f"run.metrics_interval_s={INTERVAL_S}"]
    settings += ["trainer.learning_rate=0.0", "trainer.max_empty_batches=1000"]  # else all is solved soon
    looks = [*range(FROM, STEPS, 200), STEPS - 10]
    seen: dict[str, list[dict[str, int]]] = {"torchrun": [], "rank 0": [], "rank 1": []}
    temporary: list[int] = []
    with LiveJob(tmp_path / "run", *settings) as job:
        for step in looks:
            job.wait_for(rf"step +{step}/", limit_s=300.0)
            for name, pid in zip(seen, (job.launcher, job.pid(0), job.pid(1)), strict=True):
                seen[name].append(sizes(pid))
            temporary.append(len(list((tmp_path / "temporary").rglob("*"))))
        assert job.wait() == 0, job.output
    assert summary(tmp_path / "run")["version"] == STEPS
    for name, (early, *later) in seen.items():
        for step, size in zip(looks, seen[name], strict=True):
            print(f"{name} at step {step}: {size}")
        assert max(size["kB"] for size in later) <= 1.05 * early["kB"], name
        assert later[-1]["threads"] <= early["threads"] + 2, name  # some come and go
        assert later[-1]["files"] <= early["files"] + 4, name
    assert temporary == temporary[:1] * len(looks)
    assert not list((tmp_path / "run").rglob("*.tmp"))
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    times = [line["time"] for line in lines if line["kind"] == "interval"]
    pause_s = max(later - earlier for earlier, later in itertools.pairwise(times))
    print(f"{times[-1] - times[0]:.0f} s, metrics every {INTERVAL_S} s, longest pause {pause_s:.2f} s")
    assert pause_s <= 2 * INTERVAL_S
