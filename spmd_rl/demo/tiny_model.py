"""Makes a tiny model on the spot: Qwen3-shaped, 0.35M parameters, one character a token, an ordinary folder.

Big enough to learn the environments fraction, echo and lookup in seconds on one CPU core, small enough to be made
anew for a test.  `make` has random weights; `make_warm` has half learned lookup.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from spmd_rl.envs import lookup
from spmd_rl.files import tensor_file
from spmd_rl.files.atomic_folder import written_aside
from spmd_rl.model.tokenizer import Tokenizer

SPECIAL = {"pad": "<pad>", "bos": "<bos>", "eos": "<eos>"}  # ids 0, 1, 2
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=<>?:;,.! ()[]{}#@$%&^_~"
VOCAB = [*SPECIAL.values(), *CHARACTERS]  # 67
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
MAX_LEN = 256  # positions
MAX_WARM_STEPS = 500


def make(folder: Path, seed: int = 0) -> None:
    """Random weights, N(0, 0.02)."""
    print(f"making {folder}: a Qwen3-shaped model of 0.35M parameters, random weights", flush=True)
    with written_aside(folder) as aside:
        write_tokenizer(aside)
        write_model(aside, random_model(seed))


def make_warm(folder: Path, seed: int = 0, reward: float = 0.5) -> None:
    """Trained on lookup's right answers until sampling would earn `reward` on average: some 30 steps, 2 s."""
    print(f"making {folder}: a Qwen3-shaped model of 0.35M parameters, warmed up on lookup", flush=True)
    with written_aside(folder) as aside:
        write_tokenizer(aside)
        model = random_model(seed)
        warm_up(model, Tokenizer(aside), reward)
        write_model(aside, model)


def random_model(seed: int) -> Qwen3ForCausalLM:
    special: dict[str, Any] = {f"{name}_token_id": i for i, name in enumerate(SPECIAL)}
    config = Qwen3Config(
        vocab_size=len(VOCAB),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        dtype="float32",
        architectures=["Qwen3ForCausalLM"],
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02, generator=generator)
    return model


def warm_up(model: Qwen3ForCausalLM, tokenizer: Tokenizer, reward: float) -> None:
    """Supervised steps on all ten right episodes at once, none of them on the tool's tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    episodes = [_right_episode(tokenizer, digit) for digit in lookup.DIGITS]
    token_ids = torch.from_numpy(np.stack([e[0] for e in episodes])).long()  # [10, T]
    sampled = torch.from_numpy(episodes[0][1])[1:]  # [T - 1], the same in all
    for _ in range(MAX_WARM_STEPS):
        logits = model(input_ids=token_ids[:, :-1], use_cache=False).logits
        logprobs = logits.log_softmax(-1).gather(2, token_ids[:, 1:, None])[:, sampled, 0]  # [10, 2]
        if _expected_reward(logprobs) >= reward:
            return
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
    raise RuntimeError(f"the warm-up did not reach a reward of {reward} in {MAX_WARM_STEPS} steps")


def _right_episode(tokenizer: Tokenizer, digit: str) -> tuple[np.ndarray, np.ndarray]:  # [T] ids, [T] bool: sampled
    prompt = tokenizer.render(lookup.PROMPT)
    turns = [(prompt, False), (lookup.CALL, True), (lookup.tool_reply(digit), False), (digit, True)]
    ids = [np.asarray(tokenizer.encode(part) if isinstance(part, str) else part) for part, _ in turns]
    sampled = [np.full(len(part), is_sampled) for part, (_, is_sampled) in zip(ids, turns, strict=True)]
    return np.concatenate(ids), np.concatenate(sampled)


def _expected_reward(logprobs: Tensor) -> float:  # [10, 2], of the call and of the answer after it
    """Exact mean of lookup's reward when both tokens are sampled at temperature 1."""
    call, answer = logprobs.detach().exp().unbind(1)
    weights = lookup.WEIGHTS
    return float((weights["call"] * call + weights["answer"] * call * answer).mean())


def write_tokenizer(folder: Path) -> None:
    """One token a character; others are left out.  The chat template says BOS and then what was said."""
    characters = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(VOCAB)}, merges=[]))
    characters.decoder = tokenizers.decoders.Fuse()
    characters.add_special_tokens([tokenizers.AddedToken(t, normalized=False) for t in SPECIAL.values()])
    characters.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **{f"{name}_token": token for name, token in SPECIAL.items()},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def write_model(folder: Path, model: Qwen3ForCausalLM) -> None:
    """config.json, generation_config.json, model.safetensors."""
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tied_once = dict(model.named_parameters())
    tensor_file.write(tied_once, folder / "model.safetensors", {"format": "pt"})
