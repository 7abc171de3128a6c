"""Weight matrices as an engine multiplies them: a few rows of activations by a large weight.

On the CPU a matrix lies transposed in memory of its own, which every load overwrites: one row is multiplied twice as
fast as by the weights as they arrive, 32 rows a third faster.  On other devices the weights are used where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ONEDNN_ABOVE = 1 << 18  # elements: smaller weights stay in the processor's cache, and there MKL is faster


class Matrix:
    """x [n, K] -> [n, N], for one weight [N, K] or several of the same K side by side."""

    def __init__(self, weights: Sequence[Tensor], device: torch.device) -> None:
        """Their shapes and type count, not their values."""
        self._parts: list[Tensor] = []  # [N, K] each, elsewhere than on the CPU
        self._columns: Tensor | None = None  # [K, N], on the CPU
        self._array = None  # the same memory
        self._onednn = False
        if device.type == "cpu":
            num_rows = sum(len(w) for w in weights)
            self._columns = torch.empty(weights[0].shape[1], num_rows, dtype=weights[0].dtype)
            self._array = self._columns.numpy() if self._columns.dtype == torch.float32 else None
            self._onednn = torch.backends.mkldnn.is_available() and self._columns.numel() > ONEDNN_ABOVE

    def load(self, weights: Sequence[Tensor]) -> None:
        if self._columns is None:
            self._parts = _side_by_side([w.detach() for w in weights])
        else:
            for columns, weight in zip(self._columns.split([len(w) for w in weights], 1), weights, strict=True):
                columns.copy_(weight.detach().t())

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._columns is None:
            parts = [F.linear(x, weight) for weight in self._parts]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        elif len(x) == 1 and self._array is not None:  # numpy's BLAS multiplies a vector faster than torch's
            out = torch.from_numpy(x.numpy() @ self._array)
        elif self._onednn:
            out = torch.ops.mkldnn._linear_pointwise(x, self._columns.t(), None, "none", [], "")
        else:
            out = x @ self._columns
        return out if bias is None else out.add_(bias)

    def rows(self, index: Tensor) -> Tensor:  # [n, K]
        """Rows of the one weight: of a head that is the embedding too."""
        if self._columns is None:
            return self._parts[0][index]
        return self._columns.index_select(1, index).t().contiguous()

    @property
    def weight(self) -> Tensor:  # [N, K]
        return self._parts[0] if self._columns is None else self._columns.t()


def _side_by_side(weights: list[Tensor]) -> list[Tensor]:
    """One matrix of all rows if they are neighbours in memory, else the weights as given."""
    first, end = weights[0], weights[0].data_ptr()
    for w in weights:
        same_storage = w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same_storage and w.is_contiguous() and w.data_ptr() == end):
            return weights
        end += w.nbytes
    return [first.as_strided((sum(len(w) for w in weights), first.shape[1]), first.stride())]
