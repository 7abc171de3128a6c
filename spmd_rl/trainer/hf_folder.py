"""The trained model as an ordinary Hugging Face folder.

Parameter by parameter: every trainer rank takes part in gathering it, the first keeps it.  (torch's full-state-dict
helper keeps the data on global rank 0 only, which is no trainer here.)  Knows nothing of training.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from spmd_rl.files import tensor_file
from spmd_rl.files.atomic_folder import written_aside
from spmd_rl.model.causal_lm import is_multimodal, text_layers
from spmd_rl.model.stored_names import StoredNames
from spmd_rl.trainer.lora import write_adapter
from spmd_rl.trainer.optimizer import whole
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.weights.low_rank import Lora

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf", ".onnx"}
SUMS = "SHA256SUMS"


def export(
    parameters: Mapping[str, Tensor],
    ranks: TrainerRanks,
    *,
    folder: Path,
    source: Path,
    names: StoredNames | None = None,  # of `source`; made here if None
    dtypes: Mapping[str, torch.dtype] | None,  # by name in memory
) -> dict[str, Tensor]:
    """Write `folder`, complete or not at all; returns on every rank when it is there, with its tensors on the first.

    Tensors have the names that they have in `source`, in which experts may lie one by one; tied ones are written once.
    What `source` holds beside them, other parts than text or layers that the architecture does not read, comes along as
    it is.  All files of `source` but its weights come along: configs, tokenizer, chat template; SHA256SUMS is of all
    files, for readers on the far side of a file system or network (`sha256sum -c SHA256SUMS`).  dtypes None keeps the
    precision that is trained in.
    """
    gathered = _gathered(parameters, ranks, dtypes)
    if ranks.index == 0:
        names = names or StoredNames(source)
        tensors = dict(names.of(gathered)) | dict(names.rest())
    else:
        tensors = dict(gathered)
    if tensors:
        _write(tensors, Path(folder), Path(source))
    ranks.barrier()
    return tensors


def export_adapter(
    parameters: Mapping[str, Tensor], ranks: TrainerRanks, *, folder: Path, lora: Lora, base: Path
) -> None:
    """Write the additions of LoRA alone, in the form of PEFT."""
    tensors = dict(_gathered(parameters, ranks, None))
    if tensors:
        inside = text_layers(base) if is_multimodal(base) else None
        write_adapter(Path(folder), tensors, lora, Path(base).absolute(), inside)
    ranks.barrier()


def _gathered(
    parameters: Mapping[str, Tensor], ranks: TrainerRanks, dtypes: Mapping[str, torch.dtype] | None
) -> Iterator[tuple[str, Tensor]]:
    """Whole and on the CPU on the first rank, nothing on the others."""
    for name, parameter in parameters.items():
        full = whole(parameter.detach())
        if ranks.index == 0:
            yield name, full.to("cpu", full.dtype if dtypes is None else dtypes[name]).contiguous()


def _write(tensors: dict[str, Tensor], folder: Path, source: Path) -> None:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    with written_aside(folder, replace=True) as aside:
        for file in sorted(source.iterdir()):
            if file.is_file() and file.suffix not in WEIGHT_SUFFIXES and not file.name.endswith(".index.json"):
                shutil.copyfile(file, aside / file.name)
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tensor_file.write(tensors, aside / "model.safetensors", {"format": "pt"})
        (aside / SUMS).unlink(missing_ok=True)  # of a source that was itself exported
        sums = [f"{_sha256(path)}  {path.name}\n" for path in sorted(aside.iterdir())]
        (aside / SUMS).write_text("".join(sums))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
