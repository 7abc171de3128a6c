"""Whether a change left the numbers of four small runs as they were, to the bit.

    python -m benchmarks.same_bits record before.json
    python -m benchmarks.same_bits compare before.json

Runs on this machine: synchronous; two versions stale with `drain`; LoRA; weights as what changed.  Of each: the SHA-256
of the trained model, and of every step the loss, gradient norm, ages and counts of the ledger.  Bits differ between
machines and versions of torch, so both halves belong on one.  Some three minutes each on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMON = ("run.steps=6", "rollout.batch_size=16", "inference.deterministic=true", "staleness.on_update=drain")
RUNS: dict[str, tuple[str, ...]] = {
    "synchronous": ("staleness.max_staleness=0", "staleness.max_concurrent=16"),
    "stale": ("staleness.max_staleness=2", "staleness.max_concurrent=48"),
    "lora": ("staleness.max_staleness=1", "staleness.max_concurrent=32", "lora.rank=8", "lora.sync=adapter"),
    "delta": ("staleness.max_staleness=1", "staleness.max_concurrent=32", "weights.mode=delta"),
}
STEP = ("trainer/loss", "trainer/grad_norm", "age/counts", "admission/per_step", "data/drawn", "reward")


def run(name: str, folder: Path) -> dict[str, object]:
    """What came of one of RUNS."""
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "spmd_rl"]
    words += [str(ROOT / "configs/tiny_cpu.toml"), f"run.dir={folder}", *COMMON, *RUNS[name]]
    subprocess.run(words, cwd=ROOT, env=os.environ | environment, check=True, stdout=subprocess.DEVNULL)
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [{key: record.get(key) for key in STEP} for record in records if record["kind"] == "step"]
    weights = (folder / "model" / "model.safetensors").read_bytes()
    ledger = json.loads((folder / "summary.json").read_text())["ledger"]
    counts = {name: ledger[name] for name in ("rollouts", "tokens")}
    return {"model": hashlib.sha256(weights).hexdigest(), "steps": steps, "ledger": counts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: run(name, Path(folder) / name) for name in RUNS}
    if args.do == "record":
        args.file.write_text(json.dumps(found, indent=1))
        return 0
    before, differ = json.loads(args.file.read_text()), False
    for name, now in found.items():
        other = [key for key in now if now[key] != before[name][key]]
        print(f"{name}: {'the same' if not other else 'another ' + ', '.join(other)}")
        differ |= bool(other)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
