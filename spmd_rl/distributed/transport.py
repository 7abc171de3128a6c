"""Messages between two ranks: a frame of plain bytes, sent in a few pieces; nothing is ever unpickled.

    int64[16]  header: magic, schema, kind, sequence number, payload bytes, bytes of the JSON block, 0 …
    uint8[N]   JSON block {"words": {…}, "arrays": [[name, dtype, shape], …]}, then the arrays, each aligned to 8 bytes

A frame of up to 128 KiB, for which a receiver always has room, is one piece.  Of a longer one the last piece is the
arrays, sent from where they lie if they lie as in a frame (`packing` makes them so), and what comes before them is cut
at 128 KiB, if it is longer.
gloo blocks a sender until its peer receives and a receiver until data comes, and a wait that times out kills the group.
So one thread owns one (peer, direction): an `Outbox` sends what is put into its bounded queue, an `Inbox` hands each
message to a callable. Whatever goes wrong in such a thread ends in a call of `failed(peer, error)`, once.
Knows nothing of rollouts, batches or who listens.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, unique

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from spmd_rl.packing.buffers import Buffers, aligned
from spmd_rl.types import JSON

MAGIC = 0x53504D445F524C31  # "SPMD_RL1"
SCHEMA = 2
HEADER_LENGTH = 16
HEADER_BYTES = 8 * HEADER_LENGTH
FIRST_BYTES = 1 << 17  # most messages need no second piece; a copy of as much costs less than one
MAX_PAYLOAD_BYTES = 1 << 33

Failed = Callable[[int, Exception], None]  # (peer, error)


class MalformedMessage(RuntimeError):
    """What came is not what an `Outbox` sends."""


class PeerLost(RuntimeError):
    """The peer no longer takes messages."""


@unique
class Kind(IntEnum):
    WORK = 1
    CANCEL = 2
    ROLLOUT = 3
    BATCH = 4
    STEP = 5
    LOADED = 6
    PROBE = 7
    PROBED = 8
    STATS = 9
    SAVED = 10
    ASKED = 11  # a signal asked this rank to stop
    STOP = 12  # the last message of a direction
    PIN = 13
    PINNED = 14
    SWAP = 15
    SENT = 16
    FAILED = 17  # an attempt of an episode
    GAVE_UP = 18  # the trainers, on a batch: they keep the version before it
    SAMPLE = 19  # sequences for the probe, on an engine's rank
    SAMPLED = 20


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What is sent and what comes; the arrays of a received message are views on one buffer."""

    kind: Kind
    words: dict[str, JSON] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # bool, integer, float or complex
    peer: int = -1  # the rank that it came from


def encode(message: Message, *, sequence: int = 0) -> list[np.ndarray]:  # uint8
    """The wire form of a message, in pieces; an array that is not of plain numbers is refused by name."""
    arrays = {name: _little_endian(name, array) for name, array in message.arrays.items()}
    table = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    block = json.dumps({"words": message.words, "arrays": table}, separators=(",", ":")).encode()
    num_bytes = aligned(len(block)) + sum(aligned(array.nbytes) for array in arrays.values())
    header = np.array([MAGIC, SCHEMA, message.kind, sequence, num_bytes, len(block)] + [0] * (HEADER_LENGTH - 6))
    *first, last = _pieces(header)
    body = _in_place([*arrays.values()]) if first else None
    frame = np.empty(last.stop if body is None else last.start, np.uint8)
    start = _write(frame, _write(frame, 0, header), np.frombuffer(block, np.uint8))
    if body is None:
        for array in arrays.values():
            start = _write(frame, start, array)
        body = frame[last]
    return [*(frame[piece] for piece in first), body]


def header_of(frame: np.ndarray) -> np.ndarray:  # [16] int64
    return frame[:HEADER_BYTES].view(np.int64)


def frame_bytes(header: np.ndarray, *, sequence: int) -> int:
    """Size of the frame that begins with this header; raises if it is not the one expected next."""
    magic, schema, kind, number, num_bytes, block_bytes = (int(value) for value in header[:6])
    if magic != MAGIC:
        raise MalformedMessage(f"header begins with {magic:#x}, expected {MAGIC:#x}")
    if schema != SCHEMA:
        raise MalformedMessage(f"message schema {schema}, this is {SCHEMA}: do all ranks run the same code?")
    if kind not in Kind.__members__.values():
        raise MalformedMessage(f"message kind {kind} is unknown")
    if number != sequence:
        raise MalformedMessage(f"message number {number}, expected {sequence}: one was lost or repeated")
    if not 0 < block_bytes <= aligned(block_bytes) <= num_bytes <= MAX_PAYLOAD_BYTES:
        raise MalformedMessage(f"message of {num_bytes} bytes with a JSON block of {block_bytes} bytes")
    return HEADER_BYTES + num_bytes


def decode(frame: np.ndarray, *, peer: int = -1, sequence: int = 0) -> Message:
    """The message of a frame; its arrays are views on it."""
    header, payload = header_of(frame), frame[HEADER_BYTES:]
    if frame_bytes(header, sequence=sequence) != len(frame):
        raise MalformedMessage(f"payload of {len(payload)} bytes, the header says {int(header[4])}")
    block_bytes = int(header[5])
    try:
        block = json.loads(payload[:block_bytes].tobytes())
        words, table = (
            dict(block["words"]),
            [(str(name), np.dtype(dtype), shape) for name, dtype, shape in block["arrays"]],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedMessage(f"JSON block of a {Kind(int(header[2])).name} message: {error}") from error
    arrays = {}
    start = aligned(block_bytes)
    for name, dtype, shape in table:
        if dtype.kind not in "biufc" or not all(isinstance(length, int) and length >= 0 for length in shape):
            raise MalformedMessage(f"array {name!r} of type {dtype} and shape {shape}")
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        if start + num_bytes > len(payload):
            raise MalformedMessage(f"array {name!r} ends at byte {start + num_bytes} of {len(payload)}")
        arrays[name] = payload[start : start + num_bytes].view(dtype).reshape(shape)
        start += aligned(num_bytes)
    return Message(Kind(int(header[2])), words, arrays, peer)


class Outbox:
    """Sends messages to one peer from a thread of its own, in the order in which they were put.

    A message belongs to the outbox once it is put: its arrays are read later.
    """

    def __init__(self, peer: int, group: ProcessGroup, *, failed: Failed, depth: int = 64) -> None:
        self.peer = peer
        self._group = group
        self._failed = failed
        self._queue: queue.Queue[Message | None] = queue.Queue(depth)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"outbox to rank {peer}", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Waits for room in the queue; unblocked by the sender thread, also when the peer is lost."""
        self._check()
        self._queue.put(message)

    @property
    def num_waiting(self) -> int:
        """Messages in the queue, the one being sent not counted."""
        return self._queue.qsize()

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Send what is queued and end the thread; raises if the peer does not take it in time."""
        try:
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        except queue.Full:
            pass  # named below: the thread is alive
        if self._thread.is_alive():
            raise TimeoutError(
                f"rank {self.peer} took nothing for {timeout_s:.0f} s, {self.num_waiting} messages unsent"
            )

    def _check(self) -> None:
        if self._error is not None:
            raise PeerLost(f"rank {self.peer} takes no more messages: {self._error}")

    def _run(self) -> None:
        try:
            self._send_all()
        except Exception as error:
            self._error = error
            self._failed(self.peer, error)
            while self._queue.get() is not None:  # frees whoever waits in put
                pass

    def _send_all(self) -> None:
        sequence = 0
        while (message := self._queue.get()) is not None:
            pieces = encode(message, sequence=sequence)
            for work in [dist.isend(torch.from_numpy(piece), self.peer, group=self._group) for piece in pieces]:
                work.wait()
            del message, pieces, work  # or their memory would be kept until the next one
            sequence += 1


class Inbox:
    """Receives from one peer in a thread of its own and hands each message to `deliver`, until STOP (delivered too).

    While `deliver` blocks no more than the first piece of the next message is taken: that is the back-pressure.
    """

    def __init__(self, peer: int, group: ProcessGroup, *, deliver: Callable[[Message], None], failed: Failed) -> None:
        self.peer = peer
        self._group = group
        self._deliver = deliver
        self._failed = failed
        self._buffers = Buffers()
        self._first = np.zeros(FIRST_BYTES, np.uint8)
        self._thread = threading.Thread(target=self._run, name=f"inbox from rank {peer}", daemon=True)
        self._thread.start()

    def join(self, *, timeout_s: float = 10.0) -> None:
        """Wait until the peer has said STOP, or was lost; raises if it does neither in time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"rank {self.peer} did not say STOP within {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            sequence, coming = 0, self._expect()
            while coming is not None:
                coming.wait()
                header = header_of(self._first)
                frame = self._buffers.take(frame_bytes(header, sequence=sequence))
                first, *others = _pieces(header)
                works = [self._receive(frame[piece]) for piece in others]
                frame[first] = self._first[first]
                stops, cut = header[2] == Kind.STOP, header[5] > first.stop - HEADER_BYTES
                coming = None if stops else self._expect()  # arrives while this one is delivered
                if cut:  # the JSON block ends in the second piece
                    works.pop(0).wait()
                message = decode(frame, peer=self.peer, sequence=sequence)
                for work in works:
                    work.wait()
                self._deliver(message)
                del frame, message, works  # or the buffer could not be used again
                sequence += 1
        except Exception as error:
            self._failed(self.peer, error)

    def _expect(self) -> dist.Work:
        return self._receive(self._first)

    def _receive(self, piece: np.ndarray) -> dist.Work:
        return dist.irecv(torch.from_numpy(piece), self.peer, group=self._group)


def _pieces(header: np.ndarray) -> list[slice]:
    """Of the frame that begins with this header."""
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


def _little_endian(name: str, array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"array {name!r} has type {array.dtype}; only bool, integer, float and complex arrays travel")
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _write(payload: np.ndarray, start: int, array: np.ndarray) -> int:
    if array.nbytes:
        payload[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
    end = start + aligned(array.nbytes)
    payload[start + array.nbytes : end] = 0
    return end
