"""Shards, buckets and checksums of weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.weights.checksum import checksum
from spmd_rl.weights.layout import ALIGN_BYTES, TensorSpec, chunk, manifest, manifest_hash, shard_layout, views

SPECS = [
    TensorSpec("embed", (7, 3), torch.float32),
    TensorSpec("bias", (5,), torch.float32),
    TensorSpec("one", (1, 9), torch.float32),
    TensorSpec("scalar", (), torch.float32),
    TensorSpec("none", (0, 4), torch.float32),
]


@given(num_rows=st.integers(0, 50), count=st.integers(1, 8))
def test_chunks_are_those_of_torch_and_cover_every_row_once(num_rows, count):
    rows = torch.arange(num_rows)
    chunks = [chunk(num_rows, index=index, count=count) for index in range(count)]
    assert torch.cat([rows[first : first + num] for first, num in chunks]).equal(rows)
    theirs = [len(part) for part in rows.chunk(count)] if num_rows else []
    assert [num for _, num in chunks if num] == [num for num in theirs if num]


def test_one_sender_holds_the_whole_model_in_its_shapes():
    layout = shard_layout(SPECS)
    tensors = views(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {spec.name: spec.shape for spec in SPECS}
    assert all(piece.start % ALIGN_BYTES == 0 for piece in layout.pieces)


def test_every_byte_is_in_one_bucket_that_names_its_tensors():
    layout = shard_layout(SPECS, bucket_bytes=ALIGN_BYTES)
    assert layout.buckets[0] == (0, 256) and layout.names(0) == []  # the version block
    assert layout.buckets[-1][1] == layout.num_bytes
    assert [layout.names(bucket) for bucket in range(1, 5)] == [["embed"], ["bias"], ["one"], ["scalar"]]


def test_tied_parameters_are_in_the_manifest_once():
    model = torch.nn.Sequential(torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    assert manifest(model, dtype=torch.bfloat16) == [TensorSpec("0.weight", (6, 4), torch.bfloat16)]


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "senders", "buckets"])
def test_the_hash_sees_every_difference(change):
    other = {
        "name": TensorSpec("b", (2,), torch.float32),
        "shape": TensorSpec("a", (3,), torch.float32),
        "dtype": TensorSpec("a", (2,), torch.bfloat16),
    }.get(change, TensorSpec("a", (2,), torch.float32))
    here = manifest_hash([TensorSpec("a", (2,), torch.float32)], num_senders=1, bucket_bytes=256)
    there = manifest_hash(
        [other], num_senders=2 if change == "senders" else 1, bucket_bytes=512 if change == "buckets" else 256
    )
    assert here != there and 0 <= here < 2**63


def by_the_formula(words: list[int]) -> int:
    row, multiplier = 512, -7046029254386353131
    num_rows = len(words) // row
    total = 0
    for position, word in enumerate(words):
        k, m = divmod(position, row)
        total += word * (2 * m + 1) * (multiplier ** (k + 1) if k < num_rows else 1)
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("num_words", [0, 1, 511, 512, 513, 3 * 512, 40 * 512 + 77])
def test_a_checksum_is_its_formula(num_words):
    torch.manual_seed(num_words)
    words = torch.randint(-(2**63), 2**63 - 1, (num_words,))
    assert int(checksum(words.view(torch.uint8))) == by_the_formula(words.tolist())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_byte_or_two_swapped_words_change_the_checksum(data):
    size = 40 * 512 + 100
    words = torch.arange(size) * 7919 + 1
    before = int(checksum(words.view(torch.uint8)))
    first, second = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
    if first != second:
        swapped = words.clone()
        swapped[first], swapped[second] = words[second], words[first]
        assert int(checksum(swapped.view(torch.uint8))) != before
    words.view(torch.uint8)[8 * first + data.draw(st.integers(0, 7))] += data.draw(st.integers(1, 255))
    assert int(checksum(words.view(torch.uint8))) != before
