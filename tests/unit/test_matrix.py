"""Weight matrices as engines lay them out: whatever the layout, the product is that of the weights."""

import pytest
import torch
import torch.nn.functional as F

from spmd_rl.engine.matrix import LARGE as LARGE_ABOVE
from spmd_rl.engine.matrix import Matrix

SMALL, LARGE = (40, 24), (700, 400)  # [N, K]
assert SMALL[0] * SMALL[1] < LARGE_ABOVE < LARGE[0] * LARGE[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("one_row", [True, False])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_any_number_of_rows_is_multiplied_by_all_weights(
    shape: tuple[int, int], together: bool, one_row: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    rows, width = shape
    whole, bias = torch.randn(rows, width).to(dtype), torch.randn(rows).to(dtype)
    parts = [whole[:10], whole[10:11], whole[11:]]
    matrix = Matrix(parts if together else [part.clone() for part in parts], one_row=one_row)
    for num in (1, 2, 3, 4, 5, 33, 512, 1):
        x = torch.randn(num, width).to(dtype)
        expected = F.linear(x.double(), whole.double(), bias.double())
        out = matrix(x, bias)
        assert out.dtype == dtype and out.shape == (num, rows)
        torch.testing.assert_close(out.double(), expected, atol=3e-5 if dtype == torch.float32 else 0.5, rtol=1e-2)
        torch.testing.assert_close(matrix(x), out - bias, atol=3e-5 if dtype == torch.float32 else 0.5, rtol=1e-2)
