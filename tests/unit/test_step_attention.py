"""The attention of a step over rows of a slab: the same in numpy (float32) and torch (float64), and as by hand."""

import pytest
import torch

from spmd_rl.engine.cache import Sequence, Slab
from spmd_rl.engine.sampling import Uniforms
from spmd_rl.engine.step_attention import StepAttention
from spmd_rl.model.attention import Rule
from spmd_rl.types import Sampling

LAYERS, KV_HEADS, HEADS, DIM, CAPACITY = 2, 2, 6, 4, 64
SCALE = 0.7


def _slab(held: list[int], dtype: torch.dtype) -> Slab:
    """Rows that hold so many random keys and values, the same for every type, and garbage after them."""
    torch.manual_seed(0)
    slab = Slab(CAPACITY)
    slab.resize(len(held) + 1)
    for num in held:
        sequence = Sequence(
            request_id=num, sampling=Sampling(max_tokens=1), tokens=[0] * (num + 1), num_prompt=1, uniforms=Uniforms(0)
        )
        slab.add(sequence, dict(enumerate(torch.randn(LAYERS, 2, KV_HEADS, num, DIM).to(dtype))))
    return slab


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("held", [[7, 7, 7], [3, 20, 9]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_row_attends_to_its_own_tokens(
    held: list[int], window: int | None, softcap: float | None, dtype: torch.dtype
) -> None:
    slab = _slab(held, dtype)
    before = [slab.kv[layer].clone() for layer in range(LAYERS)]
    first, num = 1, len(held) - 1
    attention = StepAttention([(slab, first, num)], [], torch.device("cpu"))
    assert attention.positions == held[first:]
    q, k, v = (torch.randn(1, heads, num, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    for layer in range(LAYERS):
        out = attention(layer, q, k, v, Rule(scale=SCALE, window=window, softcap=softcap))
        assert out.shape == (1, num, HEADS, DIM) and out.dtype == dtype
        for row in range(num):
            count = held[first + row]
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                keys, values = (
                    torch.cat([before[layer][i, first + row, kv_head, :count], new[0, kv_head, row][None]]).double()
                    for i, new in enumerate((k, v))
                )
                scores = keys @ q[0, head, row].double() * SCALE
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                start = 0 if window is None else max(0, count + 1 - window)
                expected = scores[start:].softmax(0) @ values[start:]
                torch.testing.assert_close(out[0, row, head].double(), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(slab.kv[layer][:, 0], before[layer][:, 0])  # a row that is not computed
