"""The watch over real ranks: first failure, stopped ranks, signals that reach a blocked main thread."""

import json
import os
import queue
import signal
import socket
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spmd_rl.distributed.liveness import Failure, Liveness, SignalWatch
from spmd_rl.distributed.world import World
from tests.ranks import run_processes, run_worlds

LIMIT_S = 45.0


def watch(world: World, **settings: object) -> tuple[Liveness, "Future[Failure]"]:
    failure: Future[Failure] = Future()
    roles = [world.topology.role(rank) for rank in range(world.world_size)]
    liveness = Liveness(
        **{
            "store": world.store,
            "rank": world.rank,
            "roles": roles,
            "on_failure": failure.set_result,
            "stall_timeout_s": 60.0,
            "interval_s": 0.05,
            "end": print,
            **settings,
        }
    )
    liveness.start()
    return liveness, failure


def reports(world: World, reporters: tuple[int, ...], folder: str) -> str:
    liveness, failure = watch(world, stacks_folder=Path(folder))
    if world.rank in reporters:
        liveness.report(f"bad thing on {world.rank}")
    return str(failure.result(timeout=LIMIT_S))


def test_every_rank_hears_of_a_failure_and_leaves_its_stacks(tmp_path):
    answers = run_worlds(reports, 2, 1, (1,), str(tmp_path))
    assert answers == ["rank 1 (inference) failed: bad thing on 1"] * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"stacks-rank{rank}.txt" for rank in range(3)]
    assert "in reports" in (tmp_path / "stacks-rank0.txt").read_text()


def test_of_several_failures_all_ranks_hear_the_same(tmp_path):
    answers = run_worlds(reports, 2, 2, (0, 1, 2, 3), str(tmp_path))
    assert len(set(answers)) == 1


def blocks_for_ever(world: World) -> str:
    liveness, failure = watch(world)
    if world.rank == 0:
        threading.Thread(target=dist.recv, args=(torch.empty(1), 1), kwargs={"group": world.ctl}, daemon=True).start()
        liveness.progress("waiting for a message")
    else:
        liveness.report("could not go on")
    return failure.result(timeout=LIMIT_S).text


def test_a_rank_blocked_in_a_collective_hears_it():
    assert run_worlds(blocks_for_ever, 1, 1) == ["could not go on"] * 2


def stops(world: World, stopped: int) -> str:
    liveness, failure = watch(world, heartbeat_timeout_s=20.0, interval_s=0.5)
    liveness.progress("decoding")
    if world.rank == stopped:
        world.store.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return "went on"
    seen = failure.result(timeout=LIMIT_S)
    waker = 1 if stopped == 0 else 0
    if world.rank == waker:
        os.kill(int(world.store.get("pid")), signal.SIGCONT)
    return f"{seen.rank} {seen.text.split(' for')[0]}"


@pytest.mark.full
def test_a_stopped_rank_is_named():
    assert run_worlds(stops, 2, 1, 1) == ["1 no sign of life", "went on", "1 no sign of life"]


@pytest.mark.full
def test_a_stopped_orchestrator_is_named_by_the_last_rank():
    assert run_worlds(stops, 1, 2, 0) == ["went on", "0 no sign of life", "0 no sign of life"]


def stalls(world: World) -> tuple[int, str]:
    liveness, failure = watch(world, stall_timeout_s=20.0)
    if world.rank == 1:
        liveness.progress("a step that never ends")
        seen = failure.result(timeout=LIMIT_S)
    else:
        liveness.progress("waiting for the trainer")
        seen = failure.result(timeout=LIMIT_S)
    return seen.rank, seen.text.split(" for ")[0]


@pytest.mark.full
def test_a_rank_stuck_in_its_work_is_named_with_the_work():
    assert run_worlds(stalls, 1, 1) == [(1, "stuck at 'a step that never ends'")] * 2


def leaves(world: World) -> str:
    liveness, failure = watch(world, heartbeat_timeout_s=20.0)
    if world.rank == 1:
        liveness.close()
        world.store.set("closed", "1")
        return "left"
    world.store.wait(["closed"])
    liveness.close()
    left = json.loads(world.store.get("liveness/1"))["left"]  # what the judge goes by
    return "left" if left and not failure.done() else "failed"


def test_leaving_in_good_order_is_said_and_no_failure():
    assert run_worlds(leaves, 1, 1) == ["left", "left"]


def loses_the_store() -> str:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    failure: Future[Failure] = Future()
    Liveness(
        store=client, rank=0, roles=["inference"], on_failure=failure.set_result, stall_timeout_s=60.0, interval_s=0.05,
        end=print,
    ).start()  # fmt: skip
    del store
    return failure.result(timeout=LIMIT_S).text


def test_losing_the_store_is_a_failure():
    assert run_processes(loses_the_store, 1)[0].startswith("lost the job's store: Dist")


def is_cut_off() -> tuple[str, bool]:
    """The store's port leads to somebody who passes everything on, and from some point on nothing, without closing."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cut, failure = threading.Event(), Future()

    def passes_on(source: socket.socket, target: socket.socket) -> None:
        while block := source.recv(1 << 16):
            if not cut.is_set():
                target.sendall(block)

    def serve(server: socket.socket) -> None:
        while True:
            client = server.accept()[0]
            behind = socket.create_connection(("127.0.0.1", store.port))
            for ends in ((client, behind), (behind, client)):
                threading.Thread(target=passes_on, args=ends, daemon=True).start()

    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(server,), daemon=True).start()
    Liveness(
        store=dist.TCPStore("127.0.0.1", server.getsockname()[1], is_master=False),
        rank=0, roles=["inference"], on_failure=failure.set_result, stall_timeout_s=60.0, interval_s=0.05,
        heartbeat_timeout_s=2.0, end=print,
    ).start()  # fmt: skip
    store.wait(["liveness/0"])
    cut.set()
    seen = failure.result(timeout=LIMIT_S)
    return seen.text, seen.cut_off


def test_a_store_that_stops_answering_is_a_failure():
    text = "lost the job's store: no answer for 2 s, its host cannot be reached"
    assert run_processes(is_cut_off, 1) == [(text, True)]


def raises_and_loses(world: World) -> str:
    liveness, failure = watch(world)
    if world.rank == 1:
        try:
            raise ValueError("bad number")
        except ValueError as error:
            liveness.failed(error)
    first = failure.result(timeout=LIMIT_S)
    liveness.lost(1, ConnectionError("closed by peer"))  # what follows from a failure does not replace it
    return str(first)


def test_the_traceback_of_the_first_error_wins_over_what_follows():
    for text in run_worlds(raises_and_loses, 1, 1):
        assert text.startswith("rank 1 (trainer) failed: Traceback") and text.endswith("ValueError: bad number")


def loses_a_peer(world: World) -> str:
    liveness, failure = watch(world)
    if world.rank == 0:
        words = "[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:3200: Connection reset by peer"
        liveness.lost(1, RuntimeError(f"{words}. This is typically caused by a remote worker hanging. GLHF! 🏖️"))
    return str(failure.result(timeout=LIMIT_S))


def test_a_broken_connection_names_the_peer():
    text = "it no longer answers rank 0 (RuntimeError: Read error [127.0.0.1]:3200: Connection reset by peer)"
    assert run_worlds(loses_a_peer, 1, 1) == [f"rank 1 (trainer) failed: {text}"] * 2


def cannot_send(world: World) -> str:
    liveness, failure = watch(world)
    if world.rank == 0:
        liveness.lost(1, TypeError("Object of type int64 is not JSON serializable"))
    return str(failure.result(timeout=LIMIT_S))


def test_a_message_that_cannot_be_sent_is_the_fault_of_its_sender():
    for text in run_worlds(cannot_send, 1, 1):
        assert text.startswith("rank 0 (inference) failed: TypeError: Object of type int64 is not JSON serializable")
        assert text.endswith("in a message from or for rank 1")


def hangs_in_its_last_words(world: World) -> int:
    ended: queue.Queue[int] = queue.Queue()
    liveness, _ = watch(world, on_failure=lambda failure: threading.Event().wait(), grace_s=0.2, end=ended.put)
    if world.rank == 0:
        liveness.report("the end")
    return ended.get(timeout=LIMIT_S)


def test_last_words_that_hang_are_cut_off():
    assert run_worlds(hangs_in_its_last_words, 1, 1) == [1, 1]


def gets_a_signal(world: World) -> str:
    """The main thread sits in a receive that nobody answers; the watch still hears SIGTERM."""
    if world.rank == 0:
        received: Future[int] = Future()

        def answer(number: int) -> None:
            received.set_result(number)
            world.store.set("heard", signal.Signals(number).name)

        SignalWatch(received=answer, signals=(signal.SIGTERM, signal.SIGINT))
        world.store.set("pid", str(os.getpid()))
        dist.recv(torch.empty(1), 1, group=world.ctl)  # comes only after the signal was heard
        return signal.Signals(received.result(timeout=LIMIT_S)).name
    os.kill(int(world.store.get("pid")), signal.SIGTERM)
    heard = world.store.get("heard").decode()
    dist.send(torch.zeros(1), 0, group=world.ctl)
    return heard


def test_a_signal_reaches_a_rank_whose_main_thread_is_blocked():
    assert run_worlds(gets_a_signal, 1, 1) == ["SIGTERM", "SIGTERM"]


def puts_the_handlers_back() -> bool:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    heard: queue.Queue[int] = queue.Queue()
    signals = SignalWatch(received=heard.put, signals=(signal.SIGTERM, signal.SIGINT))
    os.kill(os.getpid(), signal.SIGINT)
    assert heard.get(timeout=LIMIT_S) == signal.SIGINT
    signals.close()
    return before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


def test_closing_a_signal_watch_puts_the_handlers_back():
    assert run_processes(puts_the_handlers_back, 1) == [True]


def sees_a_consequence(world: World) -> str:
    liveness, failure = watch(world)
    match world.rank:
        case 1:
            world.store.set("rank 1 fails", "1")
            liveness.failed(RuntimeError("[pair.cc:553] Connection closed by peer"))
        case 0:
            world.store.wait(["rank 1 fails"])  # the one who knows which peer comes later
            liveness.lost(2, RuntimeError("Connection closed by peer"))
    return str(failure.result(timeout=LIMIT_S))


def test_an_error_that_only_says_some_peer_is_gone_waits_for_who_knows_which():
    answers = run_worlds(sees_a_consequence, 1, 2)
    assert len(set(answers)) == 1
    assert answers[0].startswith("rank 2 (trainer) failed: it no longer answers rank 0 (")


def has_no_room_for_stacks(world: World, folder: str) -> str:
    liveness, failure = watch(world, stacks_folder=Path(folder) / "missing")
    liveness.report("bad thing")
    return str(failure.result(timeout=LIMIT_S))


def test_a_failure_is_told_where_stacks_cannot_be_written(tmp_path):
    assert run_worlds(has_no_room_for_stacks, 1, 1, str(tmp_path))[0].endswith("failed: bad thing")


def hangs_on_its_stacks(world: World, folder: str) -> str:
    os.mkfifo(Path(folder) / f"stacks-rank{world.rank}.txt")  # opening it to write waits for a reader
    liveness, failure = watch(world, stacks_folder=Path(folder))
    liveness.report("bad thing")
    return str(failure.result(timeout=LIMIT_S))


def test_a_failure_is_told_where_the_folder_for_stacks_hangs(tmp_path):
    assert run_worlds(hangs_on_its_stacks, 1, 1, str(tmp_path))[0].endswith("failed: bad thing")
