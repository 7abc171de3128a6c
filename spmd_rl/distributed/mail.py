"""Mail between this rank and its peers: messages of `packing/messages.py`, as frames over gloo.

gloo blocks a sender until its peer receives and a receiver until data comes, and a wait that times out kills the group.
So one thread owns one (peer, direction): an `Outbox` sends what is put into its bounded queue, an `Inbox` hands each
message to a callable.  Whatever goes wrong in such a thread ends in a call of `failed(peer, error)`, once.
Knows nothing of rollouts, batches or who listens.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from spmd_rl.packing.buffers import Buffers
from spmd_rl.packing.frame import FIRST_BYTES, Codec, frame_bytes, header_of, is_last, pieces_of
from spmd_rl.packing.messages import AnyMessage, Bye, Message

Failed = Callable[[int, Exception], None]  # (peer, error)
Deliver = Callable[[int, AnyMessage], None]  # (peer, message)
DEPTH = 1 << 16  # messages that may wait for one peer


class PeerLost(RuntimeError):
    """The peer no longer takes messages."""


class Mail:
    """`send` messages to peers; every message of theirs is given to `deliver`, in a thread of its peer."""

    def __init__(self, *, peers: Iterable[int], group: ProcessGroup, deliver: Deliver, failed: Failed) -> None:
        peers = tuple(peers)
        self._outboxes = {peer: Outbox(peer=peer, group=group, failed=failed, depth=DEPTH) for peer in peers}
        self._inboxes = [Inbox(peer=peer, group=group, deliver=deliver, failed=failed) for peer in peers]

    def send(self, rank: int, message: Message) -> None:
        """Queue a message; it belongs to the mail from here on, its arrays are read later.  PeerLost."""
        self._outboxes[rank].put(message)

    def close(self, *, timeout_s: float) -> None:
        """Wait until all is sent and every peer has said Bye; TimeoutError where one does not in time."""
        for outbox in self._outboxes.values():
            outbox.close(timeout_s=timeout_s)
        for inbox in self._inboxes:
            inbox.join(timeout_s=timeout_s)


class Outbox:
    """Sends messages to one peer from a thread of its own, in the order in which they were put.

    A message belongs to the outbox once it is put: its arrays are read later.
    """

    def __init__(self, peer: int, group: ProcessGroup, *, failed: Failed, depth: int = 64) -> None:
        self.peer = peer
        self._group = group
        self._failed = failed
        self._codec = Codec()
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
            pieces = self._codec.encode(message, sequence=sequence)
            for work in [self._send(piece) for piece in pieces]:
                work.wait()
            del message, pieces, work  # or their memory would be kept until the next one
            sequence += 1

    def _send(self, piece: np.ndarray) -> dist.Work:
        work = dist.isend(torch.from_numpy(piece), self.peer, group=self._group)
        assert work is not None  # this rank is in the group
        return work


class Inbox:
    """Receives from one peer in a thread of its own and hands each message to `deliver`, until Bye (delivered too).

    While `deliver` blocks no more than the first piece of the next message is taken: that is the back-pressure.
    """

    def __init__(self, peer: int, group: ProcessGroup, *, deliver: Deliver, failed: Failed) -> None:
        self.peer = peer
        self._group = group
        self._deliver = deliver
        self._failed = failed
        self._codec = Codec()
        self._buffers = Buffers()
        self._first = np.zeros(FIRST_BYTES, np.uint8)
        self._thread = threading.Thread(target=self._run, name=f"inbox from rank {peer}", daemon=True)
        self._thread.start()

    def join(self, *, timeout_s: float = 10.0) -> None:
        """Wait until the peer has said Bye, or was lost; raises if it does neither in time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"rank {self.peer} did not say Bye within {timeout_s:.0f} s")

    def _run(self) -> None:
        try:
            sequence = 0
            coming: dist.Work | None = self._expect()
            while coming is not None:
                coming.wait()
                header = header_of(self._first)
                frame = self._buffers.take(frame_bytes(header, sequence=sequence))
                first, *others = pieces_of(header)
                works = [self._receive(frame[piece]) for piece in others]
                frame[first] = self._first[first]
                coming = None if is_last(header) else self._expect()  # arrives while this one is delivered
                for work in works:
                    work.wait()
                message = self._codec.decode(frame, sequence=sequence)
                self._deliver(self.peer, message)
                del frame, message, works  # or the buffer could not be used again
                sequence += 1
        except Exception as error:
            self._failed(self.peer, error)

    def _expect(self) -> dist.Work:
        return self._receive(self._first)

    def _receive(self, piece: np.ndarray) -> dist.Work:
        work = dist.irecv(torch.from_numpy(piece), self.peer, group=self._group)
        assert work is not None  # this rank is in the group
        return work


def farewell(mail: Mail, *, timeout_s: float) -> None:
    """End the mail of a rank whose only peer is rank 0."""
    mail.send(0, Bye())
    mail.close(timeout_s=timeout_s)
