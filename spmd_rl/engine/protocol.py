"""The one seam to whatever samples tokens.  An engine knows nothing of the orchestrator, environments or trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from spmd_rl.types import Completion, Sampling


class Engine(Protocol):
    """Driven by one thread, which calls `step` while there is work; nothing here blocks for longer than a step."""

    @property
    def version(self) -> int:
        """Version of the loaded weights, -1 before the first load."""

    @property
    def prefill_budget(self) -> int:
        """Prompt tokens that one step computes, at most."""

    @property
    def scored_choices(self) -> np.ndarray:
        """[T, layers · k] int16, experts of each token of the last `score`; [., 0]: not known."""

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""

    @property
    def num_lacking_kv(self) -> int:
        """Requests for which the newest step had a slot, and no room for keys and values."""

    @property
    def kv_used(self) -> float:
        """Share of the KV cache that is taken; like num_running, readable from any thread."""

    @property
    def recomputes(self) -> bool:
        """Whether a running request waits until what it has so far is computed again, under new weights."""

    def submit(self, request_id: int, prompt: np.ndarray, sampling: Sampling) -> None:
        """Queue a prompt ([T] token ids); ValueError, naming the numbers, for one that cannot be served."""

    def cancel(self, request_id: int) -> None:
        """End a request: the next step returns it as "cancelled" with its tokens so far.  Ended ones are ignored."""

    def step(self) -> list[tuple[int, Completion]]:
        """One engine step; the requests that ended in it."""

    def prepare(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """In any thread, beside a step: what can be done ahead of `load_weights`, which is then called with these."""

    def load_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Between two steps: go on under these weights, by name as in `named_parameters`; the engine keeps them."""

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """[T] float32 log-prob of each token given those before it, temperature 1; [0] = 0."""

    def close(self) -> None:
        """Free the device memory; nothing may be called afterwards."""
