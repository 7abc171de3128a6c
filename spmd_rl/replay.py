"""`replay RUN_DIR --step N`: the loss of logged batch N again, in one process, beside the one that the run logged.

The weights of version N are those of the model folder (N = 0) or of a checkpoint; where neither is there, the batches
from the newest one before N on are trained again.  The batch is cut as the run's trainer ranks cut it, so that every
optimizer step sees the same rollouts.  Knows nothing of engines or the orchestrator.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from spmd_rl import batch_log, checkpoint, packing
from spmd_rl import config as config_module
from spmd_rl.make_trainer import make_trainer
from spmd_rl.model import hidden_size
from spmd_rl.run_dir import RunDir
from spmd_rl.trainer.microbatch import merged
from spmd_rl.trainer.trainer import Trainer


def replay(folder: Path, step: int) -> int:
    """Print what came out; 0 if it could be computed, whatever it was.  ValueError where the run does not have it."""
    run_dir = RunDir(folder.absolute())
    if not run_dir.config.exists():
        raise ValueError(f"{folder}: no config.toml, so not a run directory")
    batch = run_dir.batches / f"step_{step}.safetensors"
    if not batch.exists():
        have = sorted(int(p.stem.removeprefix("step_")) for p in run_dir.batches.glob("step_*.safetensors"))
        raise ValueError(f"{batch}: no such batch; logged are {have[0]} … {have[-1]}" if have else f"{batch}: none")
    config = config_module.load(run_dir.config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = make_trainer(config, device=device)
    version, restored = newest_until(run_dir.checkpoints, step)
    if restored is not None:
        checkpoint.verify(restored)
        state = trainer.state_dict()
        checkpoint.load_trainer(state, restored / "trainer", None)
        trainer.load_state_dict(state)
    print(f"version {version} from {restored or config.model.path}", flush=True)
    num, width, share_prefix = config.split.num_shares, hidden_size(config.model.path), config.trainer.share_prefix
    for index in range(version, step + 1):
        started = time.monotonic()
        logs = batch_log.read(run_dir.batches, index)
        shares = packing.shares(logs, num, width=width, share_prefix=share_prefix)
        metrics = train_again(trainer, shares, index)
        print(f"batch {index}  {compared(metrics, logged(run_dir, index + 1))}  {time.monotonic() - started:.1f} s")
    return 0


def newest_until(checkpoints: Path, version: int) -> tuple[int, Path | None]:
    """The newest complete checkpoint of at most `version`; (0, None) where there is none."""
    return max((pair for pair in checkpoint.all_complete(checkpoints) if pair[0] <= version), default=(0, None))


def train_again(trainer: Trainer, shares: list[packing.Packed], index: int) -> dict[str, float]:
    """One process takes the step that as many ranks as there are shares took together."""
    minibatches = zip(*(trainer.cut(packing.by_segment(share)) for share in shares), strict=True)
    return trainer.train([merged(parts) for parts in minibatches], index)


def logged(run_dir: RunDir, version: int) -> Mapping[str, float]:
    """What the run wrote about the step that made `version`; empty where it did not come to that."""
    for line in reversed(run_dir.metrics.read_text().splitlines() if run_dir.metrics.exists() else []):
        values = json.loads(line)
        if values["kind"] == "step" and values["version"] == version:
            return values
    return {}


def compared(metrics: Mapping[str, float], logged: Mapping[str, float]) -> str:
    """Example: loss 0.5 logged 0.5000001 difference -1.0e-07  grad_norm …"""
    parts = []
    for name in ("loss", "grad_norm"):
        before = logged.get(f"trainer/{name}")
        what = "not logged" if before is None else f"logged {before:.8g} difference {metrics[name] - before:+.1e}"
        parts.append(f"{name} {metrics[name]:.8g} {what}")
    return "  ".join(parts)
