"""How a model's own forward makes logits of the products of its head: the scale and the softcap.

Config attributes of one name mean different things in different families (`logits_scaling` divides in Granite and
multiplies in HyperCLOVA X), so the forward itself is asked, with hidden states and products that are given.  Knows
nothing of folders or weights: these may be on the meta device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spmd_rl.model.parts import body

_TINY = 2.0**-20  # so small that no softcap shows


def logit_form(model: PreTrainedModel) -> tuple[float, float | None]:
    """(scale, softcap) by which a model's own forward makes logits of what its output embedding gives.

    ValueError for logits that are neither scale * (h W^T + bias) nor softcap * tanh(scale * (h W^T + bias) / softcap).
    """
    name, out = type(model).__name__, model.get_output_embeddings()
    if out is None or not hasattr(out, "weight"):
        raise ValueError(f"{name}: it has no output embedding")
    num, width = out.weight.shape
    hidden = torch.linspace(-2, 3, width, dtype=torch.float64)[None, None]
    points = torch.tensor([_TINY, 1e9, -1e9, *range(-60, 61, 4)], dtype=torch.float64)
    products = points[:, None].expand(-1, num)[None]  # [1, points, V]
    seen: list[Tensor] = []
    bodies = [m for m in body(model).modules() if isinstance(m, PreTrainedModel)]  # OPT calls one within its body
    for one in bodies:
        one.forward = lambda *_, **__: _Given(hidden.expand(1, len(points), width))

    def given(x: Tensor) -> Tensor:
        seen.append(x)
        return products

    out.forward = given
    try:
        ids = torch.zeros(1, len(points), dtype=torch.long)
        logits = model(input_ids=ids, use_cache=False).logits[0].double()  # [points, V]
    except Exception as error:  # whatever a forward of another form trips over
        raise ValueError(
            f"{name}: its logits are no projection of the last hidden state: {_first_line(error)}"
        ) from error
    finally:
        for one in (*bodies, out):
            del one.forward
    if len(seen) != 1 or seen[0].shape != (1, len(points), width) or seen[0].is_meta or logits.is_meta:
        raise ValueError(f"{name}: its logits are no projection of the last hidden state")
    if logits.shape != products.shape[1:]:
        raise ValueError(f"{name}: it has logits of {logits.shape[-1]} of the {num} rows of its head")
    before = float(seen[0][0, 0, -1] / hidden[0, 0, -1])  # some divide the hidden states
    tiny, most = float(logits[0, 0]) / _TINY, float(logits[1, 0])
    scale, softcap = before * tiny, None if abs(most) > 1e8 * abs(tiny) else most
    expected = tiny * points if softcap is None else softcap * torch.tanh(tiny * points / softcap)
    same = torch.allclose(logits, expected[:, None].expand_as(logits), rtol=1e-5, atol=1e-12)
    if not same or not torch.allclose(seen[0].double(), before * hidden, rtol=1e-5):
        raise ValueError(f"{name}: its logits are neither scaled nor capped products of head and hidden states")
    if before != 1 and getattr(out, "bias", None) is not None:
        raise ValueError(f"{name}: a head with a bias behind scaled hidden states is not supported")
    return (1.0 if abs(scale - 1) < 1e-6 else scale), softcap


class _Given:
    """What a body returns, however its caller takes it apart: last hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int | slice) -> Tensor | tuple[()]:
        return self.last_hidden_state if index == 0 else ()

    def __getattr__(self, name: str) -> None:
        return None


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else error!r}"
