"""A policy that says what a test tells it to, and a tokenizer's folder in which one text has several spellings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.types import Completion

CHATML = """{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""


class Says:
    """A policy at version 5 that says the given texts or ids, one a turn, and remembers what it was asked."""

    def __init__(self, tokenizer: Tokenizer, *turns: str | list[int], finish_reason: str = "stop") -> None:
        self.tokenizer, self.turns, self.finish_reason = tokenizer, list(turns), finish_reason
        self.stops: list[tuple[str, ...]] = []
        self.asked: list[tuple[str, int | None]] = []

    async def __call__(
        self, token_ids: np.ndarray, max_tokens: int | None = None, *, stop: Sequence[str] = ()
    ) -> Completion:
        self.stops.append(tuple(stop))
        self.asked.append((self.tokenizer.decode(token_ids, special=True), max_tokens))
        turn = self.turns.pop(0)
        ids = self.tokenizer.encode(turn) if isinstance(turn, str) else np.array(turn, np.int32)
        return Completion(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, np.float32),
            versions=np.full(len(ids), 5, np.int32),
            finish_reason=self.finish_reason,
        )


def write_folder(folder: Path, *, template: str = CHATML, eos: str = "<|eos|>", pad: str = "<|eos|>") -> Path:
    """Byte-level BPE that merges "hello" from "he" and "llo"; the template ends turns with <|end|>."""
    bytes_ = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate(["<|eos|>", "<|start|>", "<|end|>", *bytes_, "he", "ll", "llo", "hello"])}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>", "<|start|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": eos, "pad_token": pad}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def trained_text(tokenizer: Tokenizer, rollout) -> str:
    """What of a rollout is under the loss mask."""
    return tokenizer.decode(rollout.token_ids[rollout.loss_mask], special=True)
