"""Messages between ranks over gloo."""

import queue
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch
import torch.distributed as dist

from spmd_rl.distributed.mail import Inbox, Outbox, PeerLost
from spmd_rl.packing.frame import FIRST_BYTES, MalformedMessage
from spmd_rl.packing.messages import AskCounters, Bye, Message, ProbeScored
from tests.ranks import run_ranks

LIMIT_S = 20.0


def message(number: int, *arrays: np.ndarray) -> ProbeScored:
    """One that carries arrays."""
    none = [np.empty((0, 3))] * (4 - len(arrays))
    packed, alone, plain, choices = [*arrays, *none]
    return ProbeScored(number=number, version=0, packed=packed, alone=alone, plain=plain, choices=choices, seconds=0.0)


def raises(peer: int, error: Exception) -> None:
    raise error


def echoes(rank: int, num_messages: int) -> None:
    """Rank 0 sends messages of many sizes; rank 1 sends each back; both directions at once."""
    group, peer = dist.group.WORLD, 1 - rank
    outbox = Outbox(peer=peer, group=group, failed=raises, depth=4)
    if rank == 1:
        Inbox(peer=peer, group=group, deliver=lambda _, message: outbox.put(message), failed=raises).join(
            timeout_s=LIMIT_S
        )
        outbox.close(timeout_s=LIMIT_S)
        dist.barrier(group)
        return
    received: queue.Queue[tuple[int, Message]] = queue.Queue()
    inbox = Inbox(peer=peer, group=group, deliver=lambda *pair: received.put(pair), failed=raises)
    sent = [[np.arange(number**3, dtype=np.int32), np.array(number / 4)] for number in range(num_messages)]
    sent[3] = [np.arange(300_000.0).reshape(500, 600).T, np.ones(150_001, np.bool_)]
    memory = np.arange(300_000, dtype=np.uint8)
    sent[0] = []
    sent[5] = [memory[8:200_008].view(np.int16), memory[200_008:]]
    for number, arrays in enumerate(sent):
        outbox.put(message(number, *arrays))
    outbox.put(Bye())
    outbox.close(timeout_s=LIMIT_S)
    inbox.join(timeout_s=LIMIT_S)
    dist.barrier(group)  # a rank that ends resets connections that its peers still look at
    came = [received.get_nowait() for _ in range(num_messages + 1)]  # held together: no buffer was used twice
    for number, ((sender, got), arrays) in enumerate(zip(came, sent, strict=False)):
        assert (type(got), got.number, sender) == (ProbeScored, number, 1)
        for one, array in zip((got.packed, got.alone), arrays, strict=False):
            np.testing.assert_array_equal(one, array)
    assert came[-1] == (1, Bye())


def test_messages_arrive_whole_in_order_and_stay_valid():
    run_ranks(echoes, 2, 20)


def fills_up(rank: int) -> None:
    group = dist.group.WORLD
    if rank == 1:
        dist.barrier(group)  # nobody takes messages until the sender has seen its queue full
        received: queue.Queue[Message] = queue.Queue()
        Inbox(peer=0, group=group, deliver=lambda _, message: received.put(message), failed=raises).join(
            timeout_s=LIMIT_S
        )
        assert [received.get_nowait() for _ in range(3)] == [AskCounters(number=n) for n in range(3)]
        dist.barrier(group)
        return
    outbox = Outbox(peer=1, group=group, failed=raises, depth=2)
    outbox.put(AskCounters(number=0))
    outbox.put(AskCounters(number=1))
    outbox.put(AskCounters(number=2))  # returns once the thread has taken the first, which nobody receives
    assert outbox.num_waiting == 2
    with pytest.raises(TimeoutError, match=r"rank 1 took nothing for 0 s, 2 messages unsent"):
        outbox.close(timeout_s=0.1)
    dist.barrier(group)
    outbox.put(Bye())
    outbox.close(timeout_s=LIMIT_S)
    dist.barrier(group)


def test_a_slow_peer_fills_the_queue_and_is_named():
    run_ranks(fills_up, 2)


def sends_to_the_dead(rank: int) -> str:
    if rank == 1:
        dist.recv(torch.empty(FIRST_BYTES, dtype=torch.uint8), 0)
        return "left in the middle of a message"
    lost: Future[tuple[str, int]] = Future()
    outbox = Outbox(
        peer=1, group=dist.group.WORLD, failed=lambda peer, error: lost.set_result(("outbox", peer)), depth=1
    )
    with pytest.raises(PeerLost, match="rank 1 takes no more messages"):
        for _ in range(10_000):  # more than the queue and the socket hold: one of these waits, and is freed
            outbox.put(message(0, np.zeros(100_000)))
    outbox.close(timeout_s=LIMIT_S)
    assert lost.result(timeout=LIMIT_S) == ("outbox", 1)
    return "saw it"


def test_a_dead_receiver_becomes_a_call_and_frees_whoever_waits():
    assert run_ranks(sends_to_the_dead, 2)[0] == "saw it"


def receives_from_the_dead(rank: int) -> str:
    dist.barrier()  # or rank 1 might leave before they are connected
    if rank == 1:
        return "left without a word"
    lost: Future[tuple[int, str]] = Future()
    inbox = Inbox(
        peer=1,
        group=dist.group.WORLD,
        deliver=lambda peer, message: None,
        failed=lambda peer, error: lost.set_result((peer, type(error).__name__)),
    )
    peer, _ = lost.result(timeout=LIMIT_S)
    inbox.join(timeout_s=LIMIT_S)
    return f"lost {peer}"


def test_a_dead_sender_becomes_a_call():
    assert run_ranks(receives_from_the_dead, 2)[0] == "lost 1"


def receives_nonsense(rank: int) -> None:
    if rank == 1:
        dist.send(torch.zeros(16, dtype=torch.int64), 0)
        return
    lost: Future[Exception] = Future()
    Inbox(peer=1, group=dist.group.WORLD, deliver=print, failed=lambda peer, error: lost.set_result(error))
    with pytest.raises(MalformedMessage, match="header begins with 0x0"):
        raise lost.result(timeout=LIMIT_S)


def test_a_malformed_header_becomes_a_call():
    run_ranks(receives_nonsense, 2)


def works_while_peers_talk(rank: int) -> int:
    """Rank 0 hears three peers at once while its main thread does something else."""
    group = dist.group.WORLD
    if rank != 0:
        outbox = Outbox(peer=0, group=group, failed=raises)
        for number in range(50):
            outbox.put(message(number, np.full(1000, rank)))
        outbox.put(Bye())
        outbox.close(timeout_s=LIMIT_S)
        dist.barrier(group)
        return 0
    lock, total = threading.Lock(), [0]

    def add(peer: int, message: Message) -> None:
        with lock:
            total[0] += int(message.packed.sum()) if isinstance(message, ProbeScored) else 0

    for inbox in [Inbox(peer=peer, group=group, deliver=add, failed=raises) for peer in (1, 2, 3)]:
        inbox.join(timeout_s=LIMIT_S)
    dist.barrier(group)  # a rank that ends resets connections that its peers still look at
    return total[0]


def test_one_rank_hears_many():
    assert run_ranks(works_while_peers_talk, 4)[0] == 50 * 1000 * (1 + 2 + 3)
