"""Weights from FSDP2 shards to engines, over gloo."""

import itertools
import queue
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from spmd_rl.distributed.world import World
from spmd_rl.weights.delta import Delta
from spmd_rl.weights.layout import TensorSpec, manifest, weights_of
from spmd_rl.weights.receiver import WeightReceiver
from spmd_rl.weights.sender import WeightSender
from spmd_rl.weights.wire import Deliver, Fetch, Received, SendReport
from tests.gather import gather_and_broadcast
from tests.ranks import RankFailed, run_worlds

LIMIT_S = 20.0


def raises(error: Exception) -> None:
    raise error


def into(arrived: queue.Queue[Received]) -> Deliver:
    return lambda version, fetch: arrived.put(fetch())


class SmallModel(nn.Module):
    """Tied embedding, odd row counts, fewer rows than senders, buffers that are saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 12)
        self.block = nn.Sequential(nn.Linear(12, 5), nn.LayerNorm(5), nn.Linear(5, 1), nn.Linear(1, 3, bias=False))
        self.head = nn.Linear(12, 7, bias=False)
        self.head.weight = self.embed.weight
        self.block[0].register_buffer("correction", torch.arange(5.0))
        self.block[1].register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("computed", torch.ones(3), persistent=False)


def small_model(version: int) -> SmallModel:
    """The weights of a version are a function of it."""
    torch.manual_seed(0)
    model = SmallModel()
    for _ in range(version):
        train(model)
    return model


@torch.no_grad()
def train(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.25).add_(0.01)


def sharded(world: World) -> nn.Module:
    model = small_model(0).to(world.device)
    mesh = world.mesh if world.mesh.size(0) > 1 else world.mesh["dp_shard"]
    fully_shard(model.block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_sender(
    world: World,
    model: nn.Module,
    specs: list[TensorSpec],
    *,
    kind: type[WeightSender] = WeightSender,
    failed: Callable[[Exception], None] = raises,
    **settings: object,
) -> WeightSender:
    return kind(
        parameters=weights_of(model),
        specs=specs,
        index=world.sender_ranks.index(world.rank),
        num_senders=len(world.sender_ranks),
        meta_group=world.wts_meta[world.rank],
        payload_group=world.wts[world.rank],
        failed=failed,
        **{"bucket_bytes": 256, **settings},
    )


def make_receiver(
    world: World,
    specs: list[TensorSpec],
    deliver: Deliver,
    failed: Callable[[Exception], None] = raises,
    **settings: object,
) -> WeightReceiver:
    receiver = WeightReceiver(
        specs=specs,
        meta_groups=world.wts_meta,
        payload_groups=world.wts,
        device=world.device,
        deliver=deliver,
        failed=failed,
        **{"bucket_bytes": 256, **settings},
    )
    receiver.start()
    return receiver


def same_bytes(tensors: dict[str, Tensor], model: nn.Module, dtype: torch.dtype) -> None:
    expected = weights_of(model)
    assert list(tensors) == list(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == dtype and torch.equal(tensor.cpu(), expected[name].detach().to(dtype)), name


def trains_and_decodes(
    world: World,
    dtype: torch.dtype,
    num_versions: int,
    in_place: bool = False,
    backend: str = "gloo",
    bucket_bytes: int = 256,  # of a tensor each, or less
) -> list[int]:
    """Trainers publish versions 0 … n-1; engines read their live weights all the time until the next is there."""
    assert world.backends["weights"] == backend
    specs = manifest(small_model(0), dtype=dtype)
    if world.role == "trainer":
        model = sharded(world)
        assert manifest(model, dtype=dtype) == specs
        sender = None
        if world.rank in world.sender_ranks:
            sender = make_sender(world, model, specs, bucket_bytes=bucket_bytes)
        for version in range(num_versions):
            if sender is not None:
                assert sender.publish(version) > 0
            train(model)  # at once: what is sent is in staging
        if sender is not None:
            report = sender.wait()
            assert report.version == num_versions - 1 and report.update_norm > 0
            assert report.sent_bytes == report.num_bytes
            sender.close()
        return []
    arrived: queue.Queue[Fetch] = queue.Queue()
    receiver = make_receiver(
        world, specs, lambda version, fetch: arrived.put(fetch), in_place=in_place, bucket_bytes=bucket_bytes
    )
    live, sums, seen, places = {}, {}, [], set()
    for version in range(num_versions):
        while arrived.empty():
            for name, tensor in live.items():  # decoding: the live weights stay what they are
                assert float(tensor.float().sum()) == sums[name]
        received = arrived.get_nowait()()
        assert received.version == version
        live, checksums = received.tensors, received.checksums
        same_bytes(live, small_model(version), dtype)
        assert len(checksums) == (received.num_bytes // 256 if bucket_bytes == 256 else len(world.sender_ranks))
        sums = {name: float(tensor.float().sum()) for name, tensor in live.items()}
        receiver.release(version)
        seen.append(sum(checksums) % 2**61)
        places.add(next(iter(live.values())).data_ptr())
    receiver.join(timeout_s=LIMIT_S)
    assert len(places) == (1 if in_place else 2)
    same_bytes(live, small_model(num_versions - 1), dtype)
    return seen


@pytest.mark.parametrize(("num_inference", "num_trainers"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
def test_engines_get_every_version_to_the_bit(num_inference, num_trainers):
    seen = run_worlds(trains_and_decodes, num_inference, num_trainers, torch.float32, 5)[:num_inference]
    assert all(sums == seen[0] for sums in seen) and len(set(seen[0])) == 5


def test_all_in_one_bucket_is_what_a_bucket_a_tensor_is():
    run_worlds(trains_and_decodes, 1, 2, torch.float32, 3, False, "gloo", 1 << 20)


@pytest.mark.parametrize(("num_inference", "num_trainers"), [(1, 1), (2, 2)])
def test_engines_that_receive_in_place_keep_their_weights_until_they_stand_still(num_inference, num_trainers):
    run_worlds(trains_and_decodes, num_inference, num_trainers, torch.float32, 5, True)


def test_replicas_do_not_send():
    run_worlds(trains_and_decodes, 1, 2, torch.float32, 3, dp_replicate=2)


def test_engines_of_another_type_get_the_rounded_weights():
    run_worlds(trains_and_decodes, 1, 2, torch.bfloat16, 3)


@torch.no_grad()
def nudge(model: nn.Module, version: int) -> None:
    """A few elements of every tensor, of each in another place."""
    for number, parameter in enumerate(model.parameters()):
        parameter.view(-1)[(version + number) % parameter.numel() :: 97] += 1.0


def nudged(version: int) -> SmallModel:
    model = small_model(0)
    for v in range(version):
        train(model) if v == 4 else nudge(model, v)
    return model


def sends_deltas(world: World, dtype: torch.dtype, in_place: bool, backend: str = "gloo") -> list[int]:
    """Version 5 changed everywhere; every fourth version is an anchor.  The share or number of bytes that travelled."""
    assert world.backends["weights"] == backend
    specs = manifest(small_model(0), dtype=dtype)
    if world.role == "trainer":
        model, sent = sharded(world), []
        sender = make_sender(world, model, specs, delta=True, anchor_every=4)
        for version in range(8):
            sender.publish(version)
            sent.append(sender.wait().sent_bytes / sender.report.num_bytes)
            with torch.no_grad():
                for parameter, new in zip(model.parameters(), nudged(version + 1).parameters(), strict=True):
                    full = distribute_tensor(new.detach().to(world.device), parameter.device_mesh, parameter.placements)
                    parameter.copy_(full)
        sender.close()
        return sent
    arrived: queue.Queue[Fetch] = queue.Queue()
    receiver = make_receiver(world, specs, lambda version, fetch: arrived.put(fetch), in_place=in_place)
    received = []
    for version in range(8):
        got = arrived.get(timeout=LIMIT_S)()
        assert got.version == version
        same_bytes(got.tensors, nudged(version), dtype)
        received.append(got.received_bytes)
        receiver.release(version)
    receiver.join(timeout_s=LIMIT_S)
    return received


@pytest.mark.parametrize(
    ("num_inference", "num_trainers", "dtype", "in_place"),
    [(2, 1, torch.bfloat16, False), (1, 3, torch.float32, False), (1, 2, torch.bfloat16, True)],
)
def test_deltas_leave_every_version_to_the_bit(num_inference, num_trainers, dtype, in_place):
    *_, sent = answers = run_worlds(sends_deltas, num_inference, num_trainers, dtype, in_place)
    small = [share < 0.5 for share in answers[num_inference]]
    assert small == [False, True, True, True, False, False, True, True]
    if num_inference > 1:
        assert answers[0] == answers[1]
    assert len(sent) == 8


def sends_both_ways(world: World) -> None:
    specs = manifest(small_model(0))
    source = world.sender_ranks[0]
    if world.role == "trainer":
        model = sharded(world)
        sender = make_sender(world, model, specs)
        sender.publish(0)
        sender.close()
        gather_and_broadcast(weights_of(model), specs=specs, source=source, group=world.wts.get(source))
        return
    arrived: queue.Queue[Received] = queue.Queue()
    make_receiver(world, specs, into(arrived)).join(timeout_s=LIMIT_S)
    tensors = arrived.get_nowait().tensors
    gathered = gather_and_broadcast(None, specs=specs, source=source, group=world.wts[source])
    for name, tensor in gathered.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("num_trainers", [1, 2, 3])
def test_shards_leave_the_bytes_that_gathering_leaves(num_trainers):
    run_worlds(sends_both_ways, 1, num_trainers)


class DamagingSender(WeightSender):
    """Flips one bit of bucket 3 on its way, after its weights were right."""

    def _broadcast_bucket(self, bucket: int, data: Tensor) -> dist.Work:
        if bucket == 3:
            data = data.clone()
            data[17] ^= 1
        return super()._broadcast_bucket(bucket, data)


def is_damaged(world: World) -> str:
    specs = manifest(small_model(0))
    if world.role == "trainer":
        sender = make_sender(world, sharded(world), specs, kind=DamagingSender)
        sender.publish(0)
        sender.wait()
        world.store.wait(["seen"])
        return ""
    failures: queue.Queue[Exception] = queue.Queue()
    make_receiver(world, specs, lambda *weights: failures.put(AssertionError("delivered")), failures.put)
    error = str(failures.get(timeout=LIMIT_S))
    world.store.set("seen", "1")
    return error


def test_a_damaged_bit_names_tensor_ranks_and_both_sums():
    error = run_worlds(is_damaged, 1, 1)[0]
    names = [spec.name for spec in manifest(small_model(0))]
    assert "version 0 from rank 1 were damaged on the way to rank 0: bucket 3" in error
    assert error.count("0x") == 2 and names[1] in error and names[0] not in error


@torch.no_grad()
def sparse() -> SmallModel:
    """Few elements are not zero."""
    model = small_model(0)
    for parameter in model.parameters():
        parameter.zero_().view(-1)[:2] = 1.0
    return model


def changed(delta: Delta, byte: int) -> Delta:
    """One bit of its payload."""
    payload = delta.payload.clone()
    payload[byte] ^= 1
    return Delta(delta.table, payload)


class DamagingDeltas(WeightSender):
    """Flips a bit of the first new word of bucket 1, which is after the version and the gaps."""

    def _delta(self, version: int) -> Delta | None:
        delta = super()._delta(version)
        return delta and changed(delta, 8 + -(-int(delta.table[1, 1]) // 8) * 8)


class OfAnotherVersion(WeightSender):
    """The payload of version 1, whole or a delta, says that it is of version 0."""

    def _broadcast_bucket(self, bucket: int, data: Tensor) -> dist.Work:
        if bucket == 0:
            data = data.clone()
            data[:8].view(torch.int64)[0] = 0
        return super()._broadcast_bucket(bucket, data)

    def _delta(self, version: int) -> Delta | None:
        delta = super()._delta(version)
        return delta and changed(delta, 0)


class HasSentBefore(WeightSender):
    """To others: its first version here is a delta, on top of zeros."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.report = SendReport(version=0, num_bytes=0, send_s=0, sent_bytes=0, update_norm=0, checksums=())


def is_refused(world: World, kind: type[WeightSender], delta: bool, first: int) -> str:
    """Of versions up to 1, the last; what the receiver says to it."""
    specs = manifest(small_model(0))
    if world.role == "trainer":
        model = sparse()
        sender = make_sender(world, model, specs, kind=kind, delta=delta)
        for version in range(first, 2):
            sender.publish(version)
            nudge(model, 0)
        world.store.wait(["seen"])
        return ""
    arrived: queue.Queue[Received] = queue.Queue()
    failures: queue.Queue[Exception] = queue.Queue()
    receiver = make_receiver(world, specs, into(arrived), failures.put)
    for version in range(first, 1):
        assert arrived.get(timeout=LIMIT_S).version == version
        receiver.release(version)
    error = str(failures.get(timeout=LIMIT_S))
    assert arrived.empty()
    world.store.set("seen", "1")
    return error


@pytest.mark.parametrize(
    ("kind", "delta", "first", "error"),
    [
        (
            DamagingDeltas,
            True,
            0,
            "version 1 from rank 1 were damaged on the way to rank 0: bucket 1 with embed.weight",
        ),
        (OfAnotherVersion, True, 0, "weights from rank 1 begin with version 0, the header said 1"),
        (OfAnotherVersion, False, 0, "weights from rank 1 begin with version 0, the header said 1"),
        (HasSentBefore, True, 1, "rank 1 sends a delta of weights 1 to an engine that has none before"),
    ],
)
def test_what_is_no_next_version_is_refused_by_name(kind, delta, first, error):
    assert error in run_worlds(is_refused, 1, 1, kind, delta, first)[0]


def is_held_up(world: World) -> None:
    """Nobody receives before version 0 is published, and that takes 5 s of a clock that stands still otherwise."""
    specs = manifest(small_model(0))
    if world.role != "trainer":
        world.store.wait(["published"])
        receiver = make_receiver(world, specs, lambda version, fetch: receiver.release(version))
        receiver.join(timeout_s=LIMIT_S)
        return
    looks, now, next_begins = itertools.count(), 0.0, threading.Event()

    def clock() -> float:
        if next(looks) == 2:  # after the begin and the end of the first
            next_begins.set()
        return now

    def sent(report: SendReport) -> None:
        nonlocal now
        if report.version == 0:
            assert next_begins.wait(LIMIT_S)
            now = 5.0

    sender = make_sender(world, small_model(0), specs, sent=sent, clock=clock)
    assert sender.publish(0) == 0.0
    assert sender.report is None
    world.store.set("published", "1")
    assert sender.publish(1) == 5.0
    sender.close()


def test_publishing_does_not_wait_for_the_send_but_for_the_one_before_and_says_how_long():
    run_worlds(is_held_up, 1, 1)


def skips_a_version(world: World) -> None:
    specs = manifest(small_model(0))
    if world.role == "trainer":
        sender = make_sender(world, sharded(world), specs)
        sender.publish(4)  # a resumed run begins anywhere
        with pytest.raises(RuntimeError, match="version 6 after 4: a version is never skipped or repeated"):
            sender.publish(6)
        with pytest.raises(RuntimeError, match="version 4 after 4"):
            sender.publish(4)
        sender._version = 6
        sender.publish(7)  # the other side looks as well
        world.store.wait(["seen"])
        return
    failures: queue.Queue[Exception] = queue.Queue()
    make_receiver(world, specs, lambda *weights: None, failures.put)
    assert "rank 1 sends weights of version 7, expected 5" in str(failures.get(timeout=LIMIT_S))
    world.store.set("seen", "1")


def test_a_version_is_never_skipped_or_repeated_on_either_side():
    run_worlds(skips_a_version, 1, 1)


def expects_another_model(world: World) -> None:
    specs = manifest(small_model(0))
    if world.role == "trainer":
        make_sender(world, sharded(world), specs).publish(0)
        world.store.wait(["seen"])
        return
    failures: queue.Queue[Exception] = queue.Queue()
    make_receiver(world, specs[:-1], lambda *weights: None, failures.put)
    assert "names, shapes or types of the weights differ" in str(failures.get(timeout=LIMIT_S))
    world.store.set("seen", "1")


def test_a_model_that_differs_is_refused():
    run_worlds(expects_another_model, 1, 1)


def measures(world: World) -> None:
    specs = manifest(small_model(0))
    if world.role == "trainer":
        model = small_model(0)  # not sharded: one trainer may hold plain tensors
        sender = make_sender(world, model, specs)
        sender.publish(0)
        sender.publish(1)
        report = sender.wait()
        assert report.update_norm == 0.0
        train(model)
        sender.publish(2)
        report = sender.wait()
        after, before = weights_of(model), weights_of(small_model(0))
        norm = sum(float((after[name] - before[name]).double().square().sum()) for name in before) ** 0.5
        assert report.update_norm == pytest.approx(norm, rel=1e-5)
        sender.close()
        return
    receiver = make_receiver(world, specs, lambda version, fetch: receiver.release(version))
    receiver.join(timeout_s=LIMIT_S)


def test_weights_that_did_not_move_are_told_and_moves_are_measured():
    run_worlds(measures, 1, 1)


def runs_ahead(world: World) -> None:
    """Nobody swaps: two versions fill both buffers, the third waits for a release."""
    specs = manifest(small_model(0))
    if world.role == "trainer":
        model = small_model(0)
        sender = make_sender(world, model, specs)
        for version in range(4):
            sender.publish(version)
            train(model)
        sender.close()
        return
    arrived: queue.Queue[Received] = queue.Queue()
    receiver = make_receiver(world, specs, into(arrived))
    first, second = arrived.get(timeout=LIMIT_S), arrived.get(timeout=LIMIT_S)
    with pytest.raises(queue.Empty):
        arrived.get(timeout=0.3)
    same_bytes(first.tensors, small_model(0), torch.float32)
    same_bytes(second.tensors, small_model(1), torch.float32)
    receiver.release(0)
    with pytest.raises(queue.Empty):  # the engine uses version 0, version 1 waits for its swap
        arrived.get(timeout=0.3)
    receiver.release(1)
    assert arrived.get(timeout=LIMIT_S).version == 2
    receiver.release(2)
    assert arrived.get(timeout=LIMIT_S).version == 3
    receiver.release(3)
    receiver.join(timeout_s=LIMIT_S)


def test_one_version_is_received_ahead_and_no_more():
    run_worlds(runs_ahead, 1, 1)


def waits_for_a_copy(world: World, delta: bool) -> None:
    """An engine that copies: the one buffer is free for the next version after its release, the first one's too."""
    specs = manifest(small_model(0))
    if world.role == "trainer":
        model = small_model(0)
        sender = make_sender(world, model, specs, delta=delta)
        for version in range(3):
            sender.publish(version)
            nudge(model, version)
        assert (sender.wait().sent_bytes < sender.report.num_bytes / 2) == delta
        sender.close()
        return
    arrived: queue.Queue[Received] = queue.Queue()
    receiver = make_receiver(world, specs, into(arrived), copied=True)
    places = set()
    for version in range(3):
        received = arrived.get(timeout=LIMIT_S)
        with pytest.raises(queue.Empty):
            arrived.get(timeout=0.3)
        assert received.version == version
        same_bytes(received.tensors, nudged(version), torch.float32)
        places.add(received.tensors["embed.weight"].data_ptr())
        receiver.release(version)
    receiver.join(timeout_s=LIMIT_S)
    assert len(places) == 1


@pytest.mark.parametrize("delta", [False, True])
def test_an_engine_that_copies_its_weights_needs_one_buffer(delta):
    run_worlds(waits_for_a_copy, 1, 1, delta)


def loses_an_engine(world: World) -> str:
    specs = manifest(small_model(0))
    if world.role == "inference":
        return "gone"
    failed = threading.Event()
    sender = make_sender(world, sharded(world), specs, failed=lambda error: failed.set())
    with pytest.raises(RuntimeError, match=r"sending weights of version \d failed"):
        for version in range(3):
            sender.publish(version)
    assert failed.is_set()
    return "saw it"


def test_an_engine_that_dies_is_seen_by_the_sender():
    assert run_worlds(loses_an_engine, 1, 1)[1] == "saw it"


def loses_a_trainer(world: World) -> str:
    if world.role == "trainer":
        return "gone"
    failures: queue.Queue[Exception] = queue.Queue()
    make_receiver(world, manifest(small_model(0)), lambda *weights: None, failures.put)
    return type(failures.get(timeout=LIMIT_S)).__name__


def test_a_trainer_that_dies_is_seen_by_the_receiver():
    assert run_worlds(loses_a_trainer, 1, 1)[0] in ("RuntimeError", "DistBackendError", "DistNetworkError")


def has_the_wrong_parameters(world: World) -> None:
    if world.role == "trainer":
        make_sender(world, sharded(world), list(reversed(manifest(small_model(0)))))


def test_parameters_in_another_order_are_refused():
    with pytest.raises(RankFailed, match="not those of the manifest, or not in its order"):
        run_worlds(has_the_wrong_parameters, 1, 1)
