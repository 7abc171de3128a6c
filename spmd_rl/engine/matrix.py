"""Weight matrices as an engine multiplies them: a few rows of activations by a large weight.

On the CPU weights are laid out anew: packed, several rows are multiplied half again to twice as fast as by the weights
as they arrive; transposed, one row is, up to twice.  Elsewhere weights are used where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE = 1 << 18  # elements: smaller weights stay in the processor's cache, and there plain calls are faster
FEWEST_ROWS = 4  # that packed weights are multiplied by: fewer take longer
MANY_ROWS = 32  # are what weights are packed for; any number from FEWEST_ROWS on has the same layout


class Matrix:
    """x [n, K] -> [n, N], for one weight [N, K] or several of the same K side by side.

    They are copied on the CPU; elsewhere they must stay as they are.
    """

    def __init__(self, weights: Sequence[Tensor], *, one_row: bool = False) -> None:
        """`one_row`: most products are of one."""
        parts = _side_by_side([w.detach() for w in weights])  # [N, K] each
        self._parts: list[Tensor] = []  # elsewhere than on the CPU
        self._packed: Tensor | None = None
        self._columns: Tensor | None = None  # [K, N]
        self._array = None  # the same memory
        self._onednn = sum(w.numel() for w in weights) > LARGE and _has_onednn(parts[0].dtype)
        if parts[0].device.type != "cpu":
            self._parts = parts
        elif self._onednn and not one_row:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(parts), MANY_ROWS)
        else:
            self._columns = torch.cat([weight.t() for weight in parts], 1).contiguous()
            self._array = self._columns.numpy() if self._columns.dtype == torch.float32 else None

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        num = len(x)
        out: Tensor
        if self._packed is not None:
            rows = x if num >= FEWEST_ROWS else F.pad(x, (0, 0, 0, FEWEST_ROWS - num))
            out = torch.ops.mkldnn._linear_pointwise.default(rows, self._packed, None, "none", [], "")[:num]
        elif self._columns is None:
            parts = [F.linear(x, weight) for weight in self._parts]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        elif num == 1 and self._array is not None:  # numpy's BLAS multiplies a vector faster than torch's
            out = torch.from_numpy(x.numpy() @ self._array)
        elif self._onednn:
            out = torch.ops.mkldnn._linear_pointwise.default(x, self._columns.t(), None, "none", [], "")
        else:
            out = x @ self._columns
        return out if bias is None else out.add_(bias)


def _has_onednn(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _side_by_side(weights: list[Tensor]) -> list[Tensor]:
    """One matrix of all rows if they are neighbours in memory, else the weights as given."""
    first, end = weights[0], weights[0].data_ptr()
    for w in weights:
        same_storage = w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same_storage and w.is_contiguous() and w.data_ptr() == end):
            return weights
        end += w.nbytes
    return [first.as_strided((sum(len(w) for w in weights), first.shape[1]), first.stride())]
