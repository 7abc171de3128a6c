"""What a model folder is by its content: its weights, its tokenizer, its chat template.

How weights are spread over files, and how a JSON file is laid out, makes no difference.  Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from spmd_rl.model_files import Stored, stored_tensors

NUM_READERS = 8  # tensors read at a time
UNUSED = ("truncation", "padding")  # of tokenizer.json: never applied


def weights_digest(folder: Path) -> str:
    """Of all tensors of the folder with their names, types and shapes."""
    return _digest(json.dumps(sorted(tensor_digests(folder).items())))


def tensor_digests(folder: Path) -> dict[str, str]:
    """Digest by name of each tensor that a model is loaded from."""
    tensors = stored_tensors(folder)
    with ExitStack() as stack, ThreadPoolExecutor(NUM_READERS) as pool:
        contents = {
            file: mmap.mmap(stack.enter_context(open(file, "rb")).fileno(), 0, access=mmap.ACCESS_READ)
            for file in {tensor.file for tensor in tensors.values()}
        }

        def digest(tensor: Stored) -> str:
            known = hashlib.blake2b(f"{tensor.dtype} {list(tensor.shape)}".encode(), digest_size=16)
            with memoryview(contents[tensor.file])[tensor.begin : tensor.end] as part:
                known.update(part)
            return known.hexdigest()

        return dict(zip(tensors, pool.map(digest, tensors.values()), strict=True))


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


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text(token: object) -> object:
    """A special token is written as its text or as a table with its text."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, object]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
