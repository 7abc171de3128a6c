"""What a model folder is by its content: its weights, its tokenizer, its chat template.

How weights are spread over files, and how a JSON file is laid out, makes no difference.  Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NUM_READERS = 8  # tensors read at a time
UNUSED = ("truncation", "padding")  # of tokenizer.json: never applied


def weights_digest(folder: Path) -> str:
    """Of all tensors of the folder with their names, types and shapes."""
    return _digest(json.dumps(sorted(tensor_digests(folder).items())))


def tensor_digests(folder: Path) -> dict[str, str]:
    """Digest by name of each tensor that `transformers` would load; of each file where they are no safetensors."""
    files = _safetensors(folder)
    if not files:
        others = sorted(folder.glob("pytorch_model*.bin"))
        if not others:
            raise ValueError(f"{folder}: no model.safetensors and no model.safetensors.index.json")
        with ThreadPoolExecutor(NUM_READERS) as pool:
            return dict(zip((p.name for p in others), pool.map(_file_digest, others), strict=True))
    digests: dict[str, str] = {}
    for file in files:
        digests |= _digests_of(file)
    return digests


def tokenizer_digest(folder: Path) -> str:
    """Of what makes ids of text: tokenizer.json and the special tokens."""
    tokenizer = _read_json(folder / "tokenizer.json")
    settings = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    special = {key: _text(value) for key, value in settings.items() if key.endswith("_token") and value}
    kept = {key: value for key, value in tokenizer.items() if key not in UNUSED}
    return _digest(json.dumps([kept, special], sort_keys=True))


def template_digest(folder: Path) -> str:
    """Of the chat template, wherever it stands."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _digest(json.dumps(file.read_text(encoding="utf-8")))
    return _digest(json.dumps(_read_json(folder / "tokenizer_config.json").get("chat_template"), sort_keys=True))


def _safetensors(folder: Path) -> list[Path]:
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    weight_map = _read_json(folder / "model.safetensors.index.json").get("weight_map", {})
    return [folder / name for name in sorted(set(weight_map.values()))]


def _digests_of(file: Path) -> dict[str, str]:
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = 8 + int.from_bytes(content[:8], "little")
            header = json.loads(content[8:start])
            header.pop("__metadata__", None)

            def digest(entry: Mapping[str, object]) -> str:
                first, last = entry["data_offsets"]
                if not 0 <= first <= last <= len(content) - start:
                    raise ValueError(f"a tensor at {first} … {last} of {len(content) - start} bytes")
                known = hashlib.blake2b(f"{entry['dtype']} {entry['shape']}".encode(), digest_size=16)
                with memoryview(content)[start + first : start + last] as part:
                    known.update(part)
                return known.hexdigest()

            with ThreadPoolExecutor(NUM_READERS) as pool:
                return dict(zip(header, pool.map(digest, header.values()), strict=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not a readable safetensors file: {error}") from error


def _file_digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text(token: object) -> object:
    """A special token is written as its text or as a table with its text."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, object]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
