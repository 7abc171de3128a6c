"""Weight matrices as an engine multiplies them: a few rows of activations by a large weight.

On the CPU large weights are laid out anew: packed, several rows are multiplied half again to twice as fast as by the
weights as they arrive; transposed, one row is, up to twice.  Elsewhere weights are used where they lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

PACKED_ABOVE = 1 << 18  # elements: smaller weights stay in the processor's cache, and there plain calls are faster
FEWEST_ROWS = 4  # that packed weights are multiplied by: fewer take longer
MANY_ROWS = 32  # are what weights are packed for; any number from FEWEST_ROWS on has the same layout


class Matrix:
    """x [n, K] -> [n, N], for one weight [N, K] or several of the same K side by side, which must stay as they are."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._parts = _side_by_side([w.detach() for w in weights])  # [N, K] each
        first, self._packed = self._parts[0], None
        self._lies_anew = first.device.type == "cpu"
        self._is_numpys = self._lies_anew and first.dtype == torch.float32
        if self._lies_anew and sum(w.numel() for w in weights) > PACKED_ABOVE and _can_pack(first.dtype):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(self._parts), MANY_ROWS)
        elif self._lies_anew:
            self._columns  # noqa: B018, made here and not in the first step

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        num = len(x)
        if not self._lies_anew:
            parts = [F.linear(x, weight) for weight in self._parts]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        elif num == 1 and self._is_numpys:  # numpy's BLAS multiplies a vector faster than torch's
            out = torch.from_numpy(x.numpy() @ self._array)
        elif self._packed is None:
            out = x @ self._columns
        else:
            rows = x if num >= FEWEST_ROWS else F.pad(x, (0, 0, 0, FEWEST_ROWS - num))
            out = torch.ops.mkldnn._linear_pointwise.default(rows, self._packed, None, "none", [], "")[:num]
        return out if bias is None else out.add_(bias)

    @cached_property
    def _columns(self) -> Tensor:  # [K, N]; of large weights made only once a sequence is alone
        return torch.cat([weight.t() for weight in self._parts], 1).contiguous()

    @cached_property
    def _array(self) -> np.ndarray:  # the same memory
        return self._columns.numpy()


def _can_pack(dtype: torch.dtype) -> bool:
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
