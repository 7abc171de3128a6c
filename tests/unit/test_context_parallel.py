"""Who computes which tokens of a packed micro-batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.model.attention import spans
from spmd_rl.trainer.context_parallel import deal


def tokens(lengths: list[int], num: int) -> list[list[int]]:
    cu_seqlens = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return [[t for _, a, b in pieces for t in range(a, b)] for pieces in deal(spans(cu_seqlens), num)]


def test_two_ranks_take_the_ends_and_the_middle() -> None:
    assert tokens([8], 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_sequences_of_one_token_go_round() -> None:
    assert tokens([1, 1, 1, 1], 2) == [[0, 2], [1, 3]]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 5))
def test_every_token_is_some_ranks(lengths: list[int], num: int) -> None:
    assert sorted(t for part in tokens(lengths, num) for t in part) == list(range(sum(lengths)))


@pytest.mark.parametrize("num", [2, 4, 8])
def test_all_ranks_have_the_same_number_of_keys_to_attend_to(num: int) -> None:
    """A shared start of 960 tokens, 320 and 640 that go on from it, and a sequence of 1280."""
    packed = spans([0, 960, 1280, 1920, 3200], [0, 0, 0, 3])
    keys = [
        sum(span.position + t - span.start + 1 for span, a, b in pieces for t in range(a, b))
        for pieces in deal(packed, num)
    ]
    assert max(keys) == min(keys) == (960 * 961 + 320 * 321 + 640 * 641 + 1280 * 1281) // 2 // num + 960 * 960 // num
