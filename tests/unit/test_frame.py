"""Messages as bytes: what goes in comes out, and what is malformed is named."""

import contextlib
import dataclasses
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from spmd_rl.packing import messages, packing
from spmd_rl.packing.frame import FIRST_BYTES, HEADER_BYTES, MAGIC, Codec, MalformedMessage, header_of
from spmd_rl.packing.messages import AnyMessage, AskCounters, Bye, Counters, ProbeScored, StartGroup, TrainBatch
from spmd_rl.types import GroupWork, Rollout, Task

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = (
    st_numpy.boolean_dtypes()
    | st_numpy.integer_dtypes(endianness="=")
    | st_numpy.unsigned_integer_dtypes(endianness="=")
    | st_numpy.floating_dtypes(endianness="=", sizes=(16, 32, 64))
    | st_numpy.complex_number_dtypes(endianness="=")
)
ARRAYS = st_numpy.arrays(NUMBERS, st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
codec = Codec()


def scores(*arrays: np.ndarray) -> ProbeScored:
    names = ("packed", "alone", "plain", "choices")
    named = dict(zip(names, [*arrays, *[np.empty(0)] * (4 - len(arrays))], strict=True))
    return ProbeScored(number=1, version=2, seconds=0.5, **named)


def start(data: dict[str, object], task_id: str = "7") -> StartGroup:
    task = Task(env="e", task_id=task_id, data=data)
    return StartGroup(work=GroupWork(group_id=1, first_ticket=8, size=4, task=task, version=3))


def test_every_message_is_one_of_those_that_are_decoded() -> None:
    classes = {
        value for value in vars(messages).values() if isinstance(value, type) and value.__module__ == messages.__name__
    }
    bases = {messages.Message, messages.Answer, messages.OfVersion, messages.OfQuestion}
    assert classes - bases == set(get_args(AnyMessage))


@settings(max_examples=150, deadline=None)
@given(arrays=st.lists(ARRAYS, min_size=4, max_size=4), sequence=st.integers(0, 2**62))
def test_arrays_come_out_as_they_went_in(arrays: list[np.ndarray], sequence: int) -> None:
    (frame,) = codec.encode(scores(*arrays), sequence=sequence)
    assert frame.dtype == np.uint8 and len(frame) == HEADER_BYTES + header_of(frame)[4]
    message = codec.decode(frame, sequence=sequence)
    assert type(message) is ProbeScored and (message.number, message.version, message.seconds) == (1, 2, 0.5)
    for got, array in zip((message.packed, message.alone, message.plain, message.choices), arrays, strict=True):
        assert got.dtype == array.dtype and got.shape == array.shape and got.tobytes() == array.tobytes()
        assert got.size == 0 or got.base is not None  # a view, not a copy


@settings(max_examples=150, deadline=None)
@given(data=st.dictionaries(st.text(max_size=8), JSON, max_size=4), task_id=st.text(st.characters(), max_size=8))
def test_tasks_come_out_as_they_went_in(data: dict[str, object], task_id: str) -> None:
    """Also numbers beyond 64 bits and halves of surrogate pairs, which JSON of users may hold."""
    (frame,) = codec.encode(start(data, task_id))
    assert codec.decode(frame) == start(data, task_id)


@pytest.mark.parametrize("value", [2**70, -(2**64), float("inf"), "\ud800", {"deep": ["\udfff", 2**99]}])
def test_what_message_pack_does_not_know_travels_all_the_same(value: object) -> None:
    (frame,) = codec.encode(start({"value": value}))
    assert codec.decode(frame) == start({"value": value})


def test_numbers_keep_their_kind_and_numpys_are_plain_ones() -> None:
    counts = {"tokens": 8, "busy_s": 8.0, "nan": float("nan"), "numpy": np.float64(2.5), "int": np.int64(3)}
    (frame,) = codec.encode(Counters(number=1, counts=counts))
    message = codec.decode(frame)
    assert type(message) is Counters
    got = {name: (type(value), str(value)) for name, value in message.counts.items()}
    expected = {"tokens": (int, "8"), "busy_s": (float, "8.0"), "nan": (float, "nan")}
    assert got == expected | {"numpy": (float, "2.5"), "int": (int, "3")}


def test_strided_and_big_endian_arrays_arrive_as_plain_ones() -> None:
    arrays = np.arange(12).reshape(3, 4).T, np.arange(9, dtype=">i4")[::2]
    (frame,) = codec.encode(scores(*arrays))
    message = codec.decode(frame)
    for got, array in zip((message.packed, message.alone), arrays, strict=True):
        np.testing.assert_array_equal(got, array)
        assert got.dtype == array.dtype.newbyteorder("<") and got.flags.c_contiguous


def rollouts(num: int, num_tokens: int) -> packing.Packed:
    made = [Rollout(env="e", task_id=f"task {i}", ticket=i) for i in range(num)]
    for rollout in made:
        rollout.append(np.arange(num_tokens), np.zeros(num_tokens), np.full(num_tokens, rollout.ticket))
    return packing.pack(made)


def batch(packed: packing.Packed) -> TrainBatch:
    return TrainBatch(index=3, save=True, share=packed)


@pytest.mark.parametrize("pack", [lambda packed: packed, lambda packed: packing.select(packed, [4, 1, 3])])
def test_large_packed_rollouts_are_sent_from_where_they_lie(pack) -> None:
    packed = pack(rollouts(5, 4444))
    head, body = codec.encode(batch(packed))
    assert len(head) < 4096 and all(np.shares_memory(body, array) for array in packed.arrays().values())
    got = codec.decode(np.concatenate([head, body]))
    assert (got.index, got.save, got.share.words) == (3, True, packed.words)
    for name, array in packed.arrays().items():
        np.testing.assert_array_equal(getattr(got.share, name), array)


def test_large_arrays_that_lie_otherwise_are_copied_into_one_piece() -> None:
    packed = rollouts(5, 4444)
    lying_otherwise = [
        batch(dataclasses.replace(packed, versions=packed.versions.copy())),  # elsewhere
        batch(dataclasses.replace(packed, advantage=packed.advantage[::-1])),  # backwards
        scores(np.arange(1 << 18, dtype=np.uint8).reshape(256, 1024).T),  # not contiguous
        scores(np.arange(100_000)),
        scores(np.arange(1 << 18, dtype=np.uint8)[3:]),  # its memory ends before its padding
    ]
    for message in lying_otherwise:
        head, body = codec.encode(message)
        whole = message.share.arrays() if isinstance(message, TrainBatch) else {"packed": message.packed}
        assert not any(np.shares_memory(body, array) for array in whole.values())
        got = codec.decode(np.concatenate([head, body]))
        for name, array in whole.items():
            np.testing.assert_array_equal(getattr(got.share if isinstance(got, TrainBatch) else got, name), array)


def test_a_block_beyond_the_first_piece_comes_in_a_second_and_arrays_in_a_third() -> None:
    packed = rollouts(1, 1)
    long = dataclasses.replace(packed, words=packed.words | {"error": ["x" * FIRST_BYTES]})
    pieces = codec.encode(batch(long))
    assert len(pieces) == 3 and len(pieces[0]) == FIRST_BYTES
    assert codec.decode(np.concatenate(pieces)).share.words == long.words
    assert len(codec.encode(start({"text": "x" * FIRST_BYTES}))) == 2


@pytest.mark.parametrize("array", [np.array(["text"]), np.array([object()]), np.array(0, "M8[s]")])
def test_an_array_that_is_not_of_numbers_is_refused(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match=r"an array of type .* does not travel"):
        codec.encode(scores(array))


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, 0, f"header begins with 0x0, expected {MAGIC:#x}"),
        (1, 1, "message schema 1, this is 3"),
        (3, 5, "message number 5, expected 0"),
        (4, -8, "message of -8 bytes"),
        (4, 1 << 40, f"message of {1 << 40} bytes"),
        (4, 800, "payload of"),
        (5, 0, "a block of 0 bytes"),
        (5, 3, "a block of 3 bytes: "),
        (6, 1, "a block of .* bytes: "),
    ],
)
def test_a_malformed_header_is_named(position: int, value: int, words: str) -> None:
    (frame,) = codec.encode(Counters(number=1, counts={"a": 1}))
    header_of(frame)[position] = value
    with pytest.raises(MalformedMessage, match=words):
        codec.decode(frame)


def framed(block: object) -> np.ndarray:
    """A frame with this block, as a rank that runs other code would send it."""
    (frame,) = codec.encode(start({"room": "x" * 400}))
    new = msgspec.msgpack.encode(block)
    frame[HEADER_BYTES : HEADER_BYTES + len(new)] = np.frombuffer(new, np.uint8)
    header_of(frame)[5] = len(new)
    return frame


WORK = msgspec.to_builtins(start({}).work)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"type": "AskCounters"}, "missing required field `number`"),
        ({"type": "AskCounters", "number": "1"}, r"Expected `int`, got `str` - at `\$\.number`"),
        ({"type": "AskCounters", "number": 1.5}, r"Expected `int`, got `float` - at `\$\.number`"),
        ({"type": "StopTheWorld"}, "Invalid value 'StopTheWorld'"),
        ({"type": "StartGroup", "work": {**WORK, "size": None}}, r"Expected `int`, got `None` - at `\$\.work\.size`"),
        ({"type": "StartGroup", "work": {k: v for k, v in WORK.items() if k != "task"}}, r"missing .* `task`"),
        ([1, 2], "Expected `object`, got `array`"),
    ],
)
def test_a_message_that_is_none_of_ours_is_refused_with_the_place(block: object, words: str) -> None:
    with pytest.raises(MalformedMessage, match=words):
        codec.decode(framed(block))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (["<i8", [1 << 40], 0], "ends at byte"),
        (["<i8", [-1], 0], "of type <i8 and shape"),
        (["<i8", [1], -8], "of type <i8 and shape"),
        (["<i8", [True], 0], "of type <i8 and shape"),
        (["|O", [1], 0], "of type |O and shape"),
        (["nonsense", [1], 0], "nonsense"),
        (["<i8", [1]], "not enough values"),
        (7, "cannot unpack"),
    ],
)
def test_an_array_that_is_not_there_is_refused(place: object, words: str) -> None:
    block = {"type": "ProbeScored", "number": 1, "version": 2, "seconds": 0.5}
    block |= {name: ["|b1", [0], 0] for name in ("packed", "plain", "choices")} | {"alone": place}
    with pytest.raises(MalformedMessage, match=words):
        codec.decode(framed(block))


def test_packed_rollouts_whose_arrays_do_not_fit_together_are_refused() -> None:
    packed = rollouts(2, 3)
    (frame,) = codec.encode(batch(packed))
    ends = frame[-8 * 3 :].view(np.int64)
    assert ends.tolist() == [0, 3, 6]
    ends[1] = 9
    with pytest.raises(MalformedMessage, match="2 rollouts and 6 tokens do not fit together"):
        codec.decode(frame)


def test_only_the_last_message_says_that_it_is_the_last() -> None:
    assert [int(header_of(codec.encode(m)[0])[2]) for m in (AskCounters(number=1), Bye())] == [0, 1]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_makes_anything_but_a_message_or_a_refusal(data: st.DataObject) -> None:
    (frame,) = codec.encode(batch(rollouts(1, 2)))
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(HEADER_BYTES, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedMessage):
        codec.decode(frame)
