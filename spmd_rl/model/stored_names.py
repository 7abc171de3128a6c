"""The names that weights have in the files of a model folder, where they are others than in memory.

Transformers joins, splits or renames what a folder holds: `experts.0.gate_proj.weight` … become one
`experts.gate_up_proj`.  Other readers know the names of the files, so what leaves for them is turned back by the
reverse conversion of transformers.  Knows nothing of ranks or engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from spmd_rl.files import tensor_file
from spmd_rl.files.model_files import stored_tensors
from spmd_rl.model.causal_lm import load_config, loaded_from, on_meta, stored_weights

Shapes = dict[str, tuple[int, ...]]


class StoredNames:
    """Of one folder, as its files are when this is made."""

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """dtype: in which `loaded` makes what the folder has in no type of its own."""
        # made here and kept: making one sets the default dtype of all threads for a moment
        self._folder, self._model = folder, on_meta(folder, load_config(folder), dtype)
        stored, self._part = stored_weights(folder, self._model)  # of a text part by the names of one alone
        self._stored: Shapes = {name: entry.shape for name, entry in stored.items()}
        self._whole = self._part.whole if self._part else {}
        tied = self._model.all_tied_weights_keys  # copy to original
        self._names = [name for name in self._model.state_dict() if name not in tied]
        self._copies = {original: copy for copy, original in tied.items()}
        empty = {name: torch.empty(shape, device="meta") for name, shape in self._stored.items()}
        report = loaded_from(self._model, empty)  # after this the model knows which conversions the folder needs
        self._unread = _unread(self._model, self._stored) if report.unexpected_keys else []
        self._renames = set(self._names) != set(self._stored) or bool(self._model._weight_conversions)

    def of(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Weights by the model's names, layer by layer, to the same under the folder's; no tensor is held for long."""
        return ((self._whole.get(name, name), tensor) for name, tensor in self._of(tensors))

    def rest(self) -> Iterator[tuple[str, Tensor]]:
        """What else the folder stores, as it is, under its names: all but the text part of a multimodal model, and what
        the architecture does not read, such as layers that predict several tokens."""
        names = {self._whole.get(name, name) for name in self._unread} | (self._part.rest if self._part else set())
        if names:
            stored = stored_tensors(Path(self._folder))
            yield from ((name, tensor_file.read(stored[name].file, name)) for name in sorted(names))

    def _of(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        if not self._renames:
            yield from tensors
            return
        for _, layer in groupby(tensors, key=lambda item: _layer_of(item[0])):
            yield from self._turned_back(dict(layer)).items()

    def loaded(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights by the folder's names to the same under the model's, as loading it as `dtype` would make them."""
        if self._part:
            tensors = {self._part.text[name]: t for name, t in tensors.items() if name in self._part.text}
        if not self._renames:
            return dict(tensors)
        loaded_from(self._model, tensors, device=next(iter(tensors.values())).device)
        made = self._model.state_dict()
        # a copy: what was made is not held
        self._model.to("meta")  # type: ignore[arg-type]  # transformers wraps it and loses `self`
        return {name: made[name] for name in self._names}

    def _turned_back(self, layer: dict[str, Tensor]) -> dict[str, Tensor]:
        """The first of a few ways that gives names and shapes of the folder; else the model's own names."""
        reverted = revert_weight_conversion(self._model, layer)
        prefix = f"{self._model.base_model_prefix}."
        for way in (reverted, layer):
            if self._fits(way):
                return way
            bare = {name.removeprefix(prefix): tensor for name, tensor in way.items()}  # a base model's folder
            if self._fits(bare):
                return bare
            tied = {self._copies.get(name, name): tensor for name, tensor in way.items()}  # stored as its copy
            if self._fits(tied):
                return tied
        return layer

    def _fits(self, tensors: Mapping[str, Tensor]) -> bool:
        return all(self._stored.get(name) == tuple(tensor.shape) for name, tensor in tensors.items())


def original_names(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights by the model's names, layer by layer, to the same under those that its architecture was published with.

    For readers that know the architecture and no folder; `model` was built from a config alone.
    """
    for _, layer in groupby(tensors, key=lambda item: _layer_of(item[0])):
        yield from revert_weight_conversion(model, dict(layer)).items()


def _unread(model: PreTrainedModel, stored: Iterable[str]) -> list[str]:
    """The names in a folder that transformers makes no weight of the model of."""
    changes, weights = get_model_conversion_mapping(model), model.state_dict()
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    made = (
        (name, rename_source_key(name, renamings, converters, model.base_model_prefix, weights)[0]) for name in stored
    )
    return [name for name, renamed in made if name not in weights and renamed not in weights]


def _layer_of(name: str) -> str:
    """What comes before the first number, and it: the layer that a weight is in; the whole name outside of layers."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: at + 1])
