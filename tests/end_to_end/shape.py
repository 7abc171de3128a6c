"""What small models that a test makes for a whole run have in common: the vocabulary of the tiny model, two layers."""

from __future__ import annotations

from typing import Any

from spmd_rl.demo.tiny_model import MAX_LEN, SPECIAL, VOCAB

SMALL: dict[str, Any] = dict(
    vocab_size=len(VOCAB),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_LEN,
    **{f"{name}_token_id": i for i, name in enumerate(SPECIAL)},
)
