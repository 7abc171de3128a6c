"""What was trained on, on disk before it is shipped: batches/step_<n>.safetensors and step_<n>.json.

The JSON is for people and for `simulate --latency replay:`; the tensors are everything, readable without this package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from spmd_rl.packing import packing
from spmd_rl.storage.run_dir import write_whole
from spmd_rl.types import Batch, Rollout


def write(
    folder: Path,
    batch: Batch,
    usable: Callable[[Rollout], bool],
    *,
    num_minibatches: int = 1,
    whole_groups: bool = False,  # in minibatches
) -> packing.Packed:
    """Log a batch, cut into minibatches, and return its packed form.  Blocks on the disk: for a worker thread."""
    group_id = np.array([r.group_id for r in batch.rollouts], np.int64)
    cut = packing.minibatches(group_id, num_minibatches, whole_groups=whole_groups)
    packed = packing.pack(batch.rollouts, batch.advantages, [usable(r) for r in batch.rollouts], cut)
    path = folder / f"step_{batch.index}.safetensors"
    aside = path.with_name(f".{path.name}.tmp")
    packing.save(packed, aside)
    aside.replace(path)
    rollouts = [
        {
            "ticket": r.ticket,
            "group_id": r.group_id,
            "env": r.env,
            "task_id": r.task_id,
            "reward": r.reward,
            "reward_parts": r.reward_parts,
            "advantage": round(float(advantage), 6),
            "usable": bool(use),
            "minibatch": int(m),
            "tokens": len(r.token_ids),
            "trainable": r.num_trainable,
            "versions": r.version_runs(),
            "admission_version": r.admission_version,
            "finished_version": r.finished_version,
            "finish_reason": r.finish_reason,
            "generation_s": round(r.generation_s, 6),
        }
        for r, advantage, use, m in zip(batch.rollouts, batch.advantages, packed.usable, cut, strict=True)
    ]
    write_whole(folder / f"step_{batch.index}.json", json.dumps({"index": batch.index, "rollouts": rollouts}, indent=1))
    return packed


def read(folder: Path, index: int) -> packing.Packed:
    """The logged batch that version `index` was trained on."""
    return packing.load(folder / f"step_{index}.safetensors")
