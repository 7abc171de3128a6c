"""`spmd_rl export RUN_DIR [--step N] [--adapter] DIR`: a checkpoint's model as a Hugging Face folder.

Reads the sharded checkpoint of any number of trainer ranks in one process on the CPU; configs, tokenizer and chat
template come from the folder of the start that made it.  What LoRA trained is merged, or alone in the form of PEFT.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from spmd_rl.files.atomic_folder import check_writable
from spmd_rl.model.causal_lm import build
from spmd_rl.ranks.build_trainer import make_lora
from spmd_rl.storage import checkpoint, history
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.trainer.hf_folder import export as write
from spmd_rl.trainer.hf_folder import export_adapter
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.ranks import TrainerRanks


def export(run: Path, folder: Path, step: int | None, dtype: str, *, adapter: bool = False) -> int:
    """Write `folder` from the checkpoint at version `step`, or the newest one; exit code 0."""
    run_dir = RunDir(run)
    starts = history.starts(run_dir)
    if folder.exists():
        raise ValueError(f"{folder} exists already")
    check_writable(folder)
    found = _find(run_dir.checkpoints, step)
    start = history.start_of(starts, checkpoint.version_of(found) - 1)
    config = history.config_of(run_dir, start)
    lora, cpu = make_lora(config), torch.device("cpu")
    if adapter and lora is None:
        raise ValueError(f"--adapter: {run} was trained without LoRA")
    source = Path(config.model.path)
    if not source.is_dir():
        raise ValueError(f"model.path = {str(source)!r} of {run_dir.path / start.config}: no such folder from here")
    if lora is not None:
        history.check_weights(config, start)
    model = build(source, device=cpu, dtype=torch.float32, weights=lora is not None)
    if lora is None:
        model.to_empty(device=cpu)
        model.tie_weights()
    models = Models(policy=model, lora=lora, mesh=None, device=cpu)
    state = models.state_dict()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        checkpoint.load_trainer(state, found / "trainer", None)
    models.load_state_dict(state)
    models.refresh()
    ranks = TrainerRanks(group=None, device=cpu)
    if adapter:
        assert lora is not None
        export_adapter(models.additions(), ranks, folder=folder, lora=lora, base=source)
    else:
        dtypes = models.dtypes(getattr(torch, dtype))
        write(models.named_parameters(), ranks, folder=folder, source=source, dtypes=dtypes)
    print(f"{found} → {folder}")
    return 0


def _find(checkpoints: Path, step: int | None) -> Path:
    """A complete and undamaged checkpoint."""
    newest = checkpoint.newest(checkpoints)
    if newest is None:
        raise ValueError(f"no complete checkpoint in {checkpoints}")
    folder = newest[1] if step is None else checkpoints / f"step_{step}"
    if not (folder / checkpoint.MARKER).is_file():
        raise ValueError(f"no complete checkpoint of version {step} in {checkpoints}: the newest is {newest[1].name}")
    checkpoint.verify(folder)
    return folder
