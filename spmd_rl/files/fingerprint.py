"""What a model folder is by its content: its weights, its tokenizer, its chat template.

How weights are spread over files, and how a JSON file is laid out, makes no difference.  Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from spmd_rl.files.model_files import Stored, read_header, stored_tensors

NUM_READERS = 8  # tensors read at a time
PIECE = 2**24  # bytes read at once
BLOCK = 2**17  # values looked at at a time: they stay in the cache of the processor
EXPONENTS = {
    "BF16": (np.uint16, np.uint16(0x7F80)),
    "F16": (np.uint16, np.uint16(0x7C00)),
    "F32": (np.uint32, np.uint32(0x7F800000)),
    "F64": (np.uint64, np.uint64(0x7FF0000000000000)),
}
UNUSED = ("truncation", "padding")  # of tokenizer.json: never applied


def weights_digest(folder: Path) -> str:
    """Of all tensors of the folder with their names, types and shapes."""
    return _digest(json.dumps(sorted(tensor_digests(folder).items())))


def tensor_digests(folder: Path) -> dict[str, str]:
    """Digest by name of each tensor that a model is loaded from."""
    return {name: digests_of(tensor.file)[name] for name, tensor in stored_tensors(folder).items()}


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


def digests_of(file: Path) -> dict[str, str]:
    """Digest by name of each tensor of one safetensors file; one that is still as it was is not read again."""
    status = file.stat()
    return dict(_read_once(file, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))


@cache
def _read_once(file: Path, *seen_as: int) -> dict[str, str]:
    tensors = dict(read_header(file))
    with open(file, "rb") as opened, ThreadPoolExecutor(NUM_READERS) as pool:

        def digest(name: str) -> str:
            stored = tensors[name]
            known = hashlib.blake2b(f"{stored.dtype} {list(stored.shape)}".encode(), digest_size=16)
            for piece in _pieces(opened.fileno(), stored):
                known.update(piece)
                if not _finite(piece, stored.dtype):
                    raise ValueError(f"{file}: {name} has values that are infinite or not a number")
            return known.hexdigest()

        return dict(zip(tensors, pool.map(digest, tensors), strict=True))


def _pieces(descriptor: int, stored: Stored) -> Iterator[memoryview]:
    """The bytes of a tensor, as large reads: mapped pages come in small ones, at half the rate of a disk or less."""
    room = memoryview(bytearray(min(PIECE, stored.end - stored.begin)))
    for first in range(stored.begin, stored.end, PIECE):
        piece, num = room[: stored.end - first], 0
        while num < len(piece):
            read = os.preadv(descriptor, [piece[num:]], first + num)
            if not read:
                raise ValueError(f"{stored.file}: has become shorter while it was read")
            num += read
        yield piece


def _finite(part: memoryview, dtype: str) -> bool:
    """By exponents that have every bit set."""
    if dtype not in EXPONENTS:
        return True
    words, bits = EXPONENTS[dtype]
    values = np.frombuffer(part, words)
    return all(int((values[i : i + BLOCK] & bits).max()) != bits for i in range(0, len(values), BLOCK))


def file_digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text(token: object) -> object:
    """A special token is written as its text or as a table with its text."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, object]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
