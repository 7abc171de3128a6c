"""How the memory for keys and values is shared out, so that they never need more than there is.

A running request is sure of the longest row that it may come to need; others wait.  What is computed for it before it
has a row lies within that, and so does what it shares with others that have none yet.  Beside that there is room for
finished prompts that are kept, and for one sequence held twice: while its row is filled, or it moves to a longer one.
Not counted is one layer of the rows of one size, of which there are two while their number changes.  The states that
layers carry beside keys and values count as so many tokens more of each row and each prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from spmd_rl.engine.cache import Cache
from spmd_rl.model.causal_lm import kv_token_bytes

KEPT_PROMPTS = 4096  # tokens of finished prompts that are kept for members of a group that come later


@dataclass(frozen=True, slots=True)
class KvRoom:
    """In tokens."""

    total: int
    rows: int  # of running requests
    kept: int  # finished prompts
    state: int = 0  # of each row and prompt, beside its tokens
    token_bytes: int = 0  # 0: no bound

    @classmethod
    def of(
        cls,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype,
        num_bytes: int,  # 0: no bound
        max_seq_len: int,
        state_bytes: int = 0,  # that a sequence carries beside keys and values
    ) -> KvRoom:
        """ValueError if not one request of max_seq_len fits."""
        token_bytes = kv_token_bytes(config, dtype) or 1  # 1: no layer attends
        total, state = num_bytes // token_bytes if num_bytes else 1 << 62, -(-state_bytes // token_bytes)
        kept = min(KEPT_PROMPTS, max_seq_len) + state if num_bytes else KEPT_PROMPTS
        rows = total - kept - max_seq_len - state
        if rows < (row := Cache.capacity(max_seq_len) + state):
            raise ValueError(
                f"a KV cache of {num_bytes / 2**20:.1f} MiB holds {total} tokens, a request of max_seq_len = "
                f"{max_seq_len} needs room for {total - rows + row}: raise inference.kv_cache_mib or lower "
                "inference.max_seq_len"
            )
        return cls(total=total, rows=rows, kept=kept, state=state, token_bytes=token_bytes if num_bytes else 0)

    def confirm(self, num_bytes: int, num_tokens: int) -> None:
        """RuntimeError where keys and values of so many tokens take more than was counted with."""
        if self.token_bytes and num_bytes > self.token_bytes * num_tokens:
            raise RuntimeError(
                f"keys and values of a token take {num_bytes // num_tokens} bytes, {self.token_bytes} by config.json: "
                "leave inference.kv_cache_mib out, or use inference.engine = 'vllm'"
            )
