import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.weights.delta import MOST, decode, encode, payload_bytes, word_of
from spmd_rl.weights.layout import ALIGN_BYTES, TensorSpec, shard_layout, views


def a_shard(dtype: torch.dtype, num: int, bucket_bytes: int = 1024):
    layout = shard_layout([TensorSpec("a", (num,), dtype)], bucket_bytes=bucket_bytes)
    buffer = torch.randint(0, 255, (layout.num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return layout, buffer


def applied(delta, layout, old, word):
    new = old.clone()
    for positions, words in decode(delta, layout, word=word):
        new.view(word)[positions] = words
    return new


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@given(where=st.sets(st.integers(0, 2999), max_size=300), flip=st.integers(1, 255))
def test_what_changed_comes_back_to_the_bit(dtype, where, flip):
    layout, old = a_shard(dtype, 3000)
    word, new = word_of([TensorSpec("a", (3000,), dtype)]), old.clone()
    for position in where:
        new[ALIGN_BYTES + position * dtype.itemsize] ^= flip
    delta = encode(old, new, layout, word=word, version=5)
    assert delta.table[:, 0].sum() == len(where)
    assert len(delta.payload) == payload_bytes(delta.table, word=word)
    assert int(delta.payload[:8].view(torch.int64)) == 5
    assert torch.equal(applied(delta, layout, old, word), new)


def test_one_percent_of_bfloat16_costs_less_than_two_percent_of_the_bytes():
    layout, old = a_shard(torch.bfloat16, 1_000_000, bucket_bytes=1 << 19)
    new = old.clone()
    chosen = torch.randperm(1_000_000, generator=torch.Generator().manual_seed(1))[:10_000]
    new.view(torch.int16)[ALIGN_BYTES // 2 + chosen] ^= 1
    delta = encode(old, new, layout, word=torch.int16, version=1)
    assert 0.01 < len(delta.payload) / layout.num_bytes < 0.02  # 2 bytes of bits and a little more than 1 of gap
    assert torch.equal(applied(delta, layout, old, torch.int16), new)


def test_a_shard_that_changed_too_much_is_no_delta():
    layout, old = a_shard(torch.float32, 4000)
    new = old.clone()
    new.view(torch.int32)[ALIGN_BYTES // 4 : ALIGN_BYTES // 4 + int(4100 * MOST)] ^= 1
    assert encode(old, new, layout, word=torch.int32, version=1) is None


def test_elements_of_several_sizes_are_words_of_the_smallest():
    """A router's correction bias is float32 in a bfloat16 model; ids of experts are int64."""
    specs = [
        TensorSpec("a", (9, 3), torch.bfloat16),
        TensorSpec("bias", (7,), torch.float32),
        TensorSpec("ids", (5,), torch.int64),
    ]
    layout = shard_layout(specs, bucket_bytes=512)
    old = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    new = old.clone()
    changed = views(new, layout)
    changed["a"][4, 1], changed["bias"][6], changed["ids"][2] = 1.5, 1 + 2**-20, 1 << 40
    word = word_of(specs)
    delta = encode(old, new, layout, word=word, version=3)
    for positions, words in decode(delta, layout, word=word):
        old.view(word)[positions] = words
    assert word == torch.int16 and all(torch.equal(views(old, layout)[name], changed[name]) for name in changed)


def test_elements_of_a_byte_are_refused():
    with pytest.raises(ValueError, match=r"\[1, 2\] bytes"):
        word_of([TensorSpec("a", (2,), torch.bool), TensorSpec("b", (2,), torch.bfloat16)])
