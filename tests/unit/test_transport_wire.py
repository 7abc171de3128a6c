"""The wire form of messages: what goes in comes out, and what is malformed is named."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from spmd_rl.distributed.transport import (
    FIRST_BYTES,
    HEADER_BYTES,
    MAGIC,
    Kind,
    MalformedMessage,
    Message,
    decode,
    encode,
    header_of,
)
from spmd_rl.packing import packing
from spmd_rl.types import Rollout

WORDS = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)
NUMBERS = (
    st_numpy.boolean_dtypes()
    | st_numpy.integer_dtypes(endianness="=")
    | st_numpy.unsigned_integer_dtypes(endianness="=")
    | st_numpy.floating_dtypes(endianness="=", sizes=(16, 32, 64))
    | st_numpy.complex_number_dtypes(endianness="=")
)
ARRAYS = st.dictionaries(
    st.text(max_size=8),
    st_numpy.arrays(NUMBERS, st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)),
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(Kind), words=WORDS, arrays=ARRAYS, sequence=st.integers(0, 2**62))
def test_what_goes_in_comes_out(kind, words, arrays, sequence):
    (frame,) = encode(Message(kind, words, arrays), sequence=sequence)
    assert frame.dtype == np.uint8 and len(frame) == HEADER_BYTES + header_of(frame)[4]
    message = decode(frame, peer=3, sequence=sequence)
    assert (message.kind, message.words, message.peer, list(message.arrays)) == (kind, words, 3, list(arrays))
    for name, array in arrays.items():
        got = message.arrays[name]
        assert got.dtype == array.dtype and got.shape == array.shape and got.tobytes() == array.tobytes()
        assert got.size == 0 or got.base is not None  # a view, not a copy


def test_strided_and_big_endian_arrays_arrive_as_plain_ones():
    arrays = {"columns": np.arange(12).reshape(3, 4).T, "every second": np.arange(9, dtype=">i4")[::2]}
    (frame,) = encode(Message(Kind.BATCH, {}, arrays))
    got = decode(frame).arrays
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].dtype == array.dtype.newbyteorder("<") and got[name].flags.c_contiguous


def rollouts(num: int, num_tokens: int) -> packing.Packed:
    made = [Rollout(env="e", task_id=f"task {i}", ticket=i) for i in range(num)]
    for rollout in made:
        rollout.append(np.arange(num_tokens), np.zeros(num_tokens), np.full(num_tokens, rollout.ticket))
    return packing.pack(made)


@pytest.mark.parametrize("pack", [lambda packed: packed, lambda packed: packing.select(packed, [4, 1, 3])])
def test_large_packed_rollouts_are_sent_from_where_they_lie(pack):
    packed = pack(rollouts(5, 4444))
    message = Message(Kind.BATCH, {"words": packed.words}, packed.arrays())
    head, body = encode(message)
    assert len(head) < 4096 and all(np.shares_memory(body, array) for array in message.arrays.values())
    got = decode(np.concatenate([head, body]))
    assert got.words == message.words and list(got.arrays) == list(message.arrays)
    for name, array in message.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], array)


def test_large_arrays_that_lie_otherwise_are_copied_into_one_piece():
    packed = rollouts(5, 4444).arrays()
    lying_otherwise = [
        dict(reversed(packed.items())),  # in another order
        packed | {"versions": packed["versions"].copy()},  # elsewhere
        packed | {"versions": packed["versions"][1:]},  # with a gap
        {"x": np.arange(1 << 18, dtype=np.uint8).reshape(256, 1024).T},  # not contiguous
        {"x": np.arange(100_000)},
        {"x": np.arange(1 << 18, dtype=np.uint8)[3:]},  # its memory ends before its padding
    ]
    for arrays in lying_otherwise:
        head, body = encode(Message(Kind.BATCH, {}, arrays))
        assert not any(np.shares_memory(body, array) for array in arrays.values())
        got = decode(np.concatenate([head, body])).arrays
        for name, array in arrays.items():
            np.testing.assert_array_equal(got[name], array)


def test_words_beyond_the_first_piece_come_in_a_second_and_arrays_in_a_third():
    message = Message(Kind.BATCH, {"text": "x" * FIRST_BYTES}, {"x": np.arange(3)})
    pieces = encode(message)
    assert [len(piece) for piece in pieces[::2]] == [FIRST_BYTES, 24]
    assert decode(np.concatenate(pieces)).words == message.words
    assert len(encode(Message(Kind.BATCH, message.words))) == 2


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([object()]), np.array(0, "M8[s]")])
def test_an_array_that_is_not_of_numbers_is_refused_by_name(array):
    with pytest.raises(TypeError, match="array 'bad' has type"):
        encode(Message(Kind.STATS, {}, {"bad": array}))


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, 0, f"header begins with 0x0, expected {MAGIC:#x}"),
        (1, 1, "message schema 1, this is 2"),
        (2, 99, "message kind 99 is unknown"),
        (3, 5, "message number 5, expected 0"),
        (4, -8, "message of -8 bytes"),
        (4, 1 << 40, f"message of {1 << 40} bytes"),
        (4, 800, "payload of"),
        (4, 44, "message of 44 bytes with a JSON block of 44 bytes"),  # which is filled up to 48
        (5, 0, "JSON block of 0 bytes"),
        (5, 3, "JSON block of a STATS message"),
    ],
)
def test_a_malformed_header_is_named(position, value, words):
    (frame,) = encode(Message(Kind.STATS, {"a": 1}, {"x": np.arange(3)}))
    header_of(frame)[position] = value
    with pytest.raises(MalformedMessage, match=words):
        decode(frame)


def test_an_array_beyond_the_payload_is_named():
    (frame,) = encode(Message(Kind.STATS, {}, {"x": np.arange(3)}))
    frame[:] = np.frombuffer(frame.tobytes().replace(b"[3]", b"[9]"), np.uint8)
    with pytest.raises(MalformedMessage, match="array 'x' ends at byte"):
        decode(frame)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_payload_never_raises_anything_else(data):
    (frame,) = encode(Message(Kind.BATCH, {"a": [1, "b"]}, {"x": np.arange(3), "y": np.array(True)}))
    for _ in range(data.draw(st.integers(1, 6))):
        frame[data.draw(st.integers(HEADER_BYTES, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedMessage):
        decode(frame)
