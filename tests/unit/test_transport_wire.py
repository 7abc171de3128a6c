"""The wire form of messages: what goes in comes out, and what is malformed is named."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from spmd_rl.transport import (
    HEADER_BYTES,
    MAGIC,
    Kind,
    MalformedMessage,
    Message,
    _Buffers,
    decode,
    encode,
    header_of,
)

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
    frame = encode(Message(kind, words, arrays), sequence=sequence)
    assert frame.dtype == np.uint8 and len(frame) == HEADER_BYTES + header_of(frame)[4]
    message = decode(frame, peer=3, sequence=sequence)
    assert (message.kind, message.words, message.peer, list(message.arrays)) == (kind, words, 3, list(arrays))
    for name, array in arrays.items():
        got = message.arrays[name]
        assert got.dtype == array.dtype and got.shape == array.shape and got.tobytes() == array.tobytes()
        assert got.size == 0 or got.base is not None  # a view, not a copy


def test_strided_and_big_endian_arrays_arrive_as_plain_ones():
    arrays = {"columns": np.arange(12).reshape(3, 4).T, "every second": np.arange(9, dtype=">i4")[::2]}
    got = decode(encode(Message(Kind.BATCH, {}, arrays))).arrays
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].dtype == array.dtype.newbyteorder("<") and got[name].flags.c_contiguous


def test_a_long_enough_buffer_is_used():
    buffer = np.empty(4096, np.uint8)
    assert encode(Message(Kind.STATS, {"a": 1}), buffer=buffer).base is buffer


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([object()]), np.array(0, "M8[s]")])
def test_an_array_that_is_not_of_numbers_is_refused_by_name(array):
    with pytest.raises(TypeError, match="array 'bad' has type"):
        encode(Message(Kind.STATS, {}, {"bad": array}))


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, 0, f"header begins with 0x0, expected {MAGIC:#x}"),
        (1, 2, "message schema 2, this is 1"),
        (2, 99, "message kind 99 is unknown"),
        (3, 5, "message number 5, expected 0"),
        (4, -8, "message of -8 bytes"),
        (4, 1 << 40, f"message of {1 << 40} bytes"),
        (4, 800, "payload of"),
        (5, 0, "JSON block of 0 bytes"),
        (5, 3, "JSON block of a STATS message"),
    ],
)
def test_a_malformed_header_is_named(position, value, words):
    frame = encode(Message(Kind.STATS, {"a": 1}, {"x": np.arange(3)}))
    header_of(frame)[position] = value
    with pytest.raises(MalformedMessage, match=words):
        decode(frame)


def test_an_array_beyond_the_payload_is_named():
    frame = encode(Message(Kind.STATS, {}, {"x": np.arange(3)}))
    frame[:] = np.frombuffer(frame.tobytes().replace(b"[3]", b"[9]"), np.uint8)
    with pytest.raises(MalformedMessage, match="array 'x' ends at byte"):
        decode(frame)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_payload_never_raises_anything_else(data):
    frame = encode(Message(Kind.BATCH, {"a": [1, "b"]}, {"x": np.arange(3), "y": np.array(True)}))
    for _ in range(data.draw(st.integers(1, 6))):
        frame[data.draw(st.integers(HEADER_BYTES, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedMessage):
        decode(frame)


def test_a_receive_buffer_is_used_again_only_when_no_view_is_left():
    buffers = _Buffers()
    first = buffers.take(100)
    view = first[:50].view(np.int16)[3:]
    owner = id(first.base)
    del first
    assert id(buffers.take(100).base) != owner
    del view
    assert id(buffers.take(100).base) == owner
