"""The trained model as an ordinary Hugging Face folder.

Parameter by parameter: every trainer rank takes part in gathering it, the first keeps it.  (torch's full-state-dict
helper keeps the data on global rank 0 only, which is no trainer here.)  Knows nothing of training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmd_rl.folders import written_aside
from spmd_rl.trainer.ranks import TrainerRanks

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}


def export(
    parameters: Mapping[str, Tensor], ranks: TrainerRanks, *, folder: Path, source: Path, dtype: torch.dtype | None
) -> None:
    """Write `folder`, complete or not at all; returns on every rank when it is there.

    All files of `source` but its weights come along: configs, tokenizer, chat template.  dtype None keeps the precision
    that is trained in.  Tied parameters are written once.
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        whole = parameter.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if ranks.index == 0:
            tensors[name] = whole.to("cpu", dtype or whole.dtype).contiguous()
    if tensors:
        _write(tensors, Path(folder), Path(source))
    ranks.barrier()


def _write(tensors: dict[str, Tensor], folder: Path, source: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    with written_aside(folder) as aside:
        for file in sorted(source.iterdir()):
            if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and not file.name.endswith(".index.json"):
                shutil.copy(file, aside / file.name)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, aside / "model.safetensors", {"format": "pt"})
        if folder.exists():  # of an earlier end of the same run
            shutil.rmtree(folder)
