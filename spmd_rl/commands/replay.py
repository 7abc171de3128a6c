"""`replay RUN_DIR --step N`: the loss of logged batch N again, in one process, beside the one that the run logged.

The weights of version N are those of the model folder (N = 0) or of a checkpoint; where neither is there, the batches
from the newest one before N on are trained again.  Each batch is trained with the config of the start that trained it,
and cut as its trainer ranks cut it, so that every optimizer step sees the same rollouts.  Knows nothing of engines or
the orchestrator.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spmd_rl.config import Config
from spmd_rl.model.causal_lm import hidden_size
from spmd_rl.packing import packing
from spmd_rl.ranks.build_trainer import make_trainer
from spmd_rl.storage import batch_log, checkpoint, history
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.trainer.microbatch import merged
from spmd_rl.trainer.trainer import Trainer


def replay(folder: Path, step: int) -> int:
    """Print what came out; 0 if it could be computed, whatever it was.  ValueError where the run does not have it."""
    run_dir = RunDir(folder.absolute())
    starts = history.starts(run_dir)
    batch = run_dir.batches / f"step_{step}.safetensors"
    if not batch.exists():
        have = sorted(int(p.stem.removeprefix("step_")) for p in run_dir.batches.glob("step_*.safetensors"))
        raise ValueError(f"{batch}: no such batch; logged are {have[0]} … {have[-1]}" if have else f"{batch}: none")
    version, restored = newest_until(run_dir.checkpoints, step)
    start: history.Start | None = None
    trainer: Trainer | None = None
    for index in range(version, step + 1):
        if (now := history.start_of(starts, index)) is not start:
            start, config = now, history.config_of(run_dir, now)
            if index == 0 or config.trainer.kl_coefficient or config.lora.rank:
                history.check_weights(config, start)
            origin = "the batches before" if trainer else restored or config.model.path
            trainer = _continued(config, trainer, restored)
            print(f"version {index} from {origin}, with {start.config}", flush=True)
            num, width = config.split.num_shares, hidden_size(config.model.path)
        assert trainer is not None
        started = time.monotonic()
        logs = batch_log.read(run_dir.batches, index)
        shares = packing.shares(logs, num, width=width, share_prefix=config.trainer.share_prefix)
        metrics = train_again(trainer, shares, index)
        print(f"batch {index}  {compared(metrics, logged(run_dir, index + 1))}  {time.monotonic() - started:.1f} s")
    return 0


def _continued(config: Config, before: Trainer | None, restored: Path | None) -> Trainer:
    """With these settings, where the trainer before or the checkpoint ends."""
    trainer = make_trainer(config, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if before is not None:
        trainer.load_state_dict(before.state_dict())
    elif restored is not None:
        checkpoint.verify(restored)
        state = trainer.state_dict()
        checkpoint.load_trainer(state, restored / "trainer", None)
        trainer.load_state_dict(state)
    return trainer


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
        values: dict[str, Any] = json.loads(line)
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
