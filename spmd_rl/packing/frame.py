"""A message as a frame of plain bytes, and back; nothing is ever unpickled.

    int64[16]  header: magic, schema, 1 if it is the last of its direction, sequence number, payload bytes,
               bytes of the block, form of the block, 0 …
    uint8[N]   the block: the message without its arrays; then the arrays, each aligned to 8 bytes

The block is MessagePack, or JSON where a number or a text is none of MessagePack's.  In place of an array it has the
array's type, shape and place.  A frame of up to 128 KiB, for which a receiver always has room, is one piece.  Of a
longer one the last piece is the arrays, sent from where they lie if they lie as in a frame (`packing` makes them so),
and what comes before them is cut at 128 KiB, if it is longer.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import msgspec
import numpy as np

from spmd_rl.packing.buffers import aligned
from spmd_rl.packing.messages import AnyMessage, Bye, Message

MAGIC = 0x53504D445F524C31  # "SPMD_RL1"
SCHEMA = 3
HEADER_LENGTH = 16
HEADER_BYTES = 8 * HEADER_LENGTH
FIRST_BYTES = 1 << 17  # most messages need no second piece; a copy of as much costs less than one
MAX_PAYLOAD_BYTES = 1 << 33
MESSAGE_PACK, AS_JSON = 0, 1
NUMBERS = "biufc"  # kinds of dtypes that travel


class MalformedMessage(RuntimeError):
    """What came is not what `encode` makes."""


class Codec:
    """Frames of messages, messages of frames; for one thread at a time."""

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []  # of the message that is being encoded
        self._offset = 0  # of the next of them
        self._payload = np.empty(0, np.uint8)  # the arrays of the message that is being decoded
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._place)
        self._decoder = msgspec.msgpack.Decoder(AnyMessage, dec_hook=self._view)

    def encode(self, message: Message, *, sequence: int = 0) -> list[np.ndarray]:  # uint8
        """The wire form of a message, in pieces; TypeError for an array that is not of plain numbers."""
        self._arrays, self._offset = [], 0
        try:
            block, form = self._encoder.encode(message), MESSAGE_PACK
        except (OverflowError, UnicodeEncodeError):  # an int beyond 64 bits, a lone surrogate
            self._arrays, self._offset = [], 0
            block, form = json.dumps(msgspec.to_builtins(message, enc_hook=self._place)).encode(), AS_JSON
        arrays, self._arrays = self._arrays, []
        num_bytes = aligned(len(block)) + self._offset
        known = [MAGIC, SCHEMA, isinstance(message, Bye), sequence, num_bytes, len(block), form]
        header = np.array(known + [0] * (HEADER_LENGTH - len(known)))
        *first, last = pieces_of(header)
        body = _in_place(arrays) if first else None
        frame = np.empty(last.stop if body is None else last.start, np.uint8)
        start = _write(frame, _write(frame, 0, header), np.frombuffer(block, np.uint8))
        if body is None:
            for array in arrays:
                start = _write(frame, start, array)
            body = frame[last]
        return [*(frame[piece] for piece in first), body]

    def decode(self, frame: np.ndarray, *, sequence: int = 0) -> AnyMessage:
        """The message of a frame; its arrays are views on it.  MalformedMessage for what is none."""
        header, payload = header_of(frame), frame[HEADER_BYTES:]
        if frame_bytes(header, sequence=sequence) != len(frame):
            raise MalformedMessage(f"payload of {len(payload)} bytes, the header says {int(header[4])}")
        block_bytes, form = int(header[5]), int(header[6])
        block = payload[:block_bytes].tobytes()
        self._payload = payload[aligned(block_bytes) :]
        try:
            if form == AS_JSON:
                message: AnyMessage = msgspec.convert(json.loads(block), AnyMessage, dec_hook=self._view)
                return message
            return self._decoder.decode(block)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise MalformedMessage(f"a block of {block_bytes} bytes: {error}") from error
        finally:
            self._payload = np.empty(0, np.uint8)

    def _place(self, value: object) -> object:
        """What stands in the block for a value that is neither text nor number."""
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray) or value.dtype.kind not in NUMBERS:
            what = f"an array of type {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise TypeError(f"{what} does not travel: only arrays of bool, integer, float and complex do")
        array = value.astype(value.dtype.newbyteorder("<"), copy=False)
        place = (array.dtype.str, array.shape, self._offset)
        self._arrays.append(array)
        self._offset += aligned(array.nbytes)
        return place

    def _view(self, wanted: type, value: Any) -> object:
        """The array at a place, as a view on the payload."""
        if wanted is not np.ndarray:
            return value
        name, shape, offset = value
        dtype = np.dtype(name)
        if dtype.kind not in NUMBERS or not all(type(count) is int and count >= 0 for count in (*shape, offset)):
            raise ValueError(f"array of type {name} and shape {shape}")
        end = offset + dtype.itemsize * math.prod(shape)
        if end > len(self._payload):
            raise ValueError(f"array of shape {shape} ends at byte {end} of {len(self._payload)}")
        return self._payload[offset:end].view(dtype).reshape(shape)


def header_of(frame: np.ndarray) -> np.ndarray:  # [16] int64
    """The header at the beginning of a frame."""
    return frame[:HEADER_BYTES].view(np.int64)


def is_last(header: np.ndarray) -> bool:
    """Whether nothing follows the message of this header."""
    return bool(header[2])


def frame_bytes(header: np.ndarray, *, sequence: int) -> int:
    """The size of the frame that begins with this header; MalformedMessage if it is not the one expected next."""
    magic, schema, _, number, num_bytes, block_bytes = (int(value) for value in header[:6])
    if magic != MAGIC:
        raise MalformedMessage(f"header begins with {magic:#x}, expected {MAGIC:#x}")
    if schema != SCHEMA:
        raise MalformedMessage(f"message schema {schema}, this is {SCHEMA}: do all ranks run the same code?")
    if number != sequence:
        raise MalformedMessage(f"message number {number}, expected {sequence}: one was lost or repeated")
    if not 0 < block_bytes <= aligned(block_bytes) <= num_bytes <= MAX_PAYLOAD_BYTES:
        raise MalformedMessage(f"message of {num_bytes} bytes with a block of {block_bytes} bytes")
    return HEADER_BYTES + num_bytes


def pieces_of(header: np.ndarray) -> list[slice]:
    """Where the frame that begins with this header is cut."""
    size, head = HEADER_BYTES + int(header[4]), HEADER_BYTES + aligned(int(header[5]))
    cuts = {0, size} if size <= FIRST_BYTES else {0, min(head, FIRST_BYTES), head, size}
    return list(itertools.starmap(slice, itertools.pairwise(sorted(cuts))))


def _in_place(arrays: list[np.ndarray]) -> np.ndarray | None:  # uint8
    """The memory of arrays that lie one after another in one piece, as in a frame."""
    owner = arrays[0].base if arrays else None
    if not isinstance(owner, np.ndarray) or owner.dtype != np.uint8 or owner.ndim != 1:
        return None
    origin = owner.ctypes.data
    start = end = arrays[0].ctypes.data - origin
    for array in arrays:
        if array.base is not owner or array.ctypes.data - origin != end or not array.flags.c_contiguous:
            return None
        end += aligned(array.nbytes)
    return owner[start:end] if start < end <= len(owner) else None


def _write(payload: np.ndarray, start: int, array: np.ndarray) -> int:
    if array.nbytes:
        payload[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    end = start + aligned(array.nbytes)
    payload[start + array.nbytes : end] = 0
    return end
