"""What layers carry from token to token beside keys and values: the states of recurrences and convolutions.

`States` has the interface of transformers' cache, as far as such layers and the attention beside them use it; what it
holds lies here, in rows of a batch, and keys and values pass through to whoever computes the attention.  A prompt is
computed whole and alone, its states are copied for each sequence that starts from it, and the states of the running
sequences are joined for their next step.  Knows nothing of attention, versions or sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from spmd_rl.model.causal_lm import cache_keyword
from spmd_rl.model.parts import body

KINDS = ("conv", "recurrent")


class Key(NamedTuple):
    """Which state of which layer."""

    layer: int
    kind: str  # of KINDS
    number: int  # of its kind in the layer


class _Layer(NamedTuple):
    """What layers of transformers before 5.24 read themselves."""

    conv_states: dict[int, Tensor]
    recurrent_states: dict[int, Tensor]
    record_past: bool = False


class _Layers:
    def __init__(self, held: dict[Key, Tensor]) -> None:
        self._held = held

    def __getitem__(self, layer: int) -> _Layer:
        conv, recurrent = ({k.number: x for k, x in self._held.items() if k[:2] == (layer, kind)} for kind in KINDS)
        return _Layer(conv, recurrent)


class States:
    """Of n sequences; empty before their first token."""

    def __init__(self, held: dict[Key, Tensor] | None = None) -> None:
        self.held = held or {}  # [n, ...] each

    @property
    def num_bytes(self) -> int:
        return sum(state.nbytes for state in self.held.values())

    def copy(self) -> States:
        return States({key: state.clone() for key, state in self.held.items()})

    # of transformers' cache

    is_compileable = False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.held.get(Key(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.held.get(Key(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> Tensor:
        """The inputs [n, channels, T] of a convolution after those before them; the last ones are kept."""
        key = Key(layer_idx, "conv", state_idx)
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        if key in self.held:
            inputs = torch.cat([self.held[key], conv_states], -1)
        else:
            inputs = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self.held[key] = inputs[..., -width:].clone()  # not a view of all of a prompt
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        self.held[Key(layer_idx, "recurrent", state_idx)] = recurrent_states
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return any(layer_idx in (None, key.layer) and state_idx in (None, key.number) for key in self.held)

    @property
    def layers(self) -> _Layers:
        return _Layers(self.held)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class Carrier(Protocol):
    """A sequence that has states of its own until it is computed beside others."""

    states: States | None  # of one row


_NO_STATE = torch.empty(0)  # of a sequence that the last step did not have


class Joined:
    """The states of the sequences of the last step, side by side: joined anew where others take part in the next."""

    def __init__(self) -> None:
        self._sequences: list[Carrier] = []
        self._states = States()

    def of(self, sequences: Seq[Carrier]) -> States:
        """In this order.  A sequence's own states, where it has any, are newer than those of the last step."""
        if list(sequences) != self._sequences or any(s.states is not None for s in sequences):
            rows = {id(s): row for row, s in enumerate(self._sequences)}
            old, held = self._states.held, {}
            for key in list(sequences[0].states.held if sequences[0].states is not None else old):
                before = old.pop(key, _NO_STATE)  # one state after the other, so that there are not two of all
                held[key] = torch.cat(
                    [before[rows[id(s)]][None] if s.states is None else s.states.held[key] for s in sequences]
                )
            for sequence in sequences:
                sequence.states = None
            self._sequences, self._states = list(sequences), States(held)
        return self._states

    def clear(self) -> None:
        self._sequences, self._states = [], States()


def state_bytes(model: PreTrainedModel, device: torch.device) -> int:
    """What one sequence carries, whatever its length: by a token through each kind of layer that holds a convolution.

    On the meta device, but where `device` may have kernels of its own for such layers.
    """
    place = device if torch.cuda.is_available() else torch.device("meta")
    hidden = torch.zeros(1, 1, model.config.get_text_config().hidden_size, dtype=model.dtype, device=place)
    found: dict[tuple[object, ...], int] = {}  # layers of one shape carry as much
    total = 0
    for module in body(model).modules():
        if any(isinstance(child, nn.Conv1d) for child in module.children()):
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
            kind = (type(module), *((name, x.shape) for name, x in tensors.items()))
            if kind not in found:
                states, here = States(), {name: torch.zeros_like(x, device=place) for name, x in tensors.items()}
                with torch.no_grad():
                    torch.func.functional_call(module, here, (hidden,), {cache_keyword(module): states})
                found[kind] = states.num_bytes
            total += found[kind]
    return total


def clamp_time_steps(model: PreTrainedModel) -> None:
    """Make Mamba 2 layers clamp their time steps in every form, in place.

    The form for many tokens clamps softplus(projection + bias) to a layer's limits and that for one token does not:
    here the projection is clamped, so that both do.  Example: 0.001 is a projection of at least -6.907 - bias.
    """
    for module in body(model).modules():
        low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
        projection = getattr(module, "in_proj", None)
        if isinstance(projection, nn.Module) and hasattr(module, "dt_bias") and (low > 0 or high < math.inf):
            projection.register_forward_hook(partial(_clamped, module, _before_softplus(low), _before_softplus(high)))


def _before_softplus(value: float) -> float:
    return math.log(math.expm1(value)) if 0 < value < math.inf else -math.inf if value <= 0 else math.inf


def _clamped(mixer: nn.Module, low: float, high: float, _: nn.Module, __: object, projected: Tensor) -> Tensor:
    bias = mixer.dt_bias
    assert isinstance(bias, Tensor)
    rest, steps = projected.split([projected.shape[-1] - len(bias), len(bias)], -1)
    return torch.cat([rest, steps.clamp((low - bias).to(steps.dtype), (high - bias).to(steps.dtype))], -1)
