"""Stop strings: whether the newest token of a request completes one.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

TOKENS_PER_CHARACTER = 4  # at most: a character of UTF-8 is up to four bytes, each of which may be a token

Decode = Callable[[Sequence[int]], str]  # token ids → text, special tokens written out


def completes_stop(token_ids: Sequence[int], stop: Sequence[str], decode: Decode | None) -> bool:
    """Whether the text of the sampled tokens holds one of the strings, none of which it held before the last token."""
    if not stop:
        return False
    assert decode is not None  # or `check_stop` has refused the strings
    tail = decode(token_ids[-TOKENS_PER_CHARACTER * (max(map(len, stop)) + 1) :])
    return any(text in tail for text in stop)


def check_stop(request_id: int, stop: Sequence[str], decode: Decode | None) -> None:
    """ValueError for what no text completes, and where the engine cannot tell what its tokens say."""
    if stop and decode is None:
        raise ValueError(f"request {request_id}: stop = {list(stop)}, and this engine was built without a tokenizer")
    if not all(stop):
        raise ValueError(f"request {request_id}: stop = {list(stop)}: an empty string")
