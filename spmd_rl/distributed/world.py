"""The world of one torchrun: a rank becomes a role, a device and its process groups, here and nowhere else.

`meet` finds the other ranks; `join` is called once by every rank and builds every group of the job in one order, before
any engine exists: an engine may swap the default group, after which new groups would no longer meet.  After it, every
call names its group.

    group          members                         backend         carries
    ctl            all ranks                       gloo            control messages, rollouts, batches
    bar            all ranks                       gloo            the last barrier of `leave`, nothing else
    ckpt           trainers                        gloo            checkpoints
    mesh, train    trainers                        NCCL or gloo    FSDP2; sums over all trainers
    wts_meta[t]    sender t + ranks with an engine gloo            header of each weight sync
    wts[t]         sender t + ranks with an engine NCCL or gloo    weights
    engine_group   the ranks of one engine         NCCL + gloo     what the engine does inside

NCCL is used where it exists and the members of a group sit on distinct devices; it refuses two ranks on one device,
so there the payload goes over gloo, on GPUs through pinned host memory.  Groups that may idle have timeouts of days:
who watches for dead or hung ranks is liveness.py.  Knows nothing of what the roles do.
"""

from __future__ import annotations

import faulthandler
import ipaddress
import json
import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from spmd_rl.config.topology import Topology, check_world_size

TELL_STACK = signal.SIGUSR2
TELL_S = 0.5  # for a stack to be written
_IDLE = timedelta(days=30)
_COLLECTIVE = timedelta(minutes=60)  # trainers wait for each other at most this long


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a rank sits."""

    host: str
    device: str  # unique on the host; "cpu" where the rank has no accelerator
    name: str  # as torch calls it there: "cpu", "cuda:1"
    restarts: int = 0  # of its torchrun after starts that began, by its script; a node that came back counts anew


@dataclass(frozen=True, kw_only=True, eq=False)
class Meeting:
    """All ranks of one start before any group exists: what they say to each other goes through the store."""

    rank: int
    world_size: int
    host: str
    generation: int  # 1 at the first start, one more after every restart of the world
    restarted: bool  # an earlier start of this job began: it got past all that may be refused
    job: Store  # of all starts by this torchrun
    store: Store  # of this generation; a thread uses its own store.clone()
    timeout_s: float  # how long ranks wait for each other until the last group is made


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """What one rank knows of the job; groups it is no member of are None or not in the dict."""

    rank: int
    local_rank: int
    world_size: int
    role: str  # "inference" | "member" | "trainer"
    inference_ranks: tuple[int, ...]
    trainer_ranks: tuple[int, ...]
    engine_ranks: tuple[int, ...]  # inference ranks that hold (a part of) an engine
    sender_ranks: tuple[int, ...]  # trainer ranks that together hold one copy of the weights, in order of shards
    topology: Topology
    device: torch.device
    places: tuple[Place, ...]  # [W]
    generation: int  # 1 at the first start, one more after every restart of the world
    restarted: bool  # an earlier start of this job began: it got past all that may be refused
    job: Store  # of all starts by this torchrun
    store: Store  # of this generation; a thread uses its own store.clone()
    ctl: ProcessGroup
    bar: ProcessGroup
    ckpt: ProcessGroup | None
    train: ProcessGroup | None
    mesh: DeviceMesh | None  # axes ("dp_replicate", "dp_shard"), and "tp" where layers are split
    context: ProcessGroup | None  # trainers that share the tokens of their rollouts; None: nobody else
    wts_meta: dict[int, ProcessGroup]  # by sender rank
    wts: dict[int, ProcessGroup]
    engine_group: ProcessGroup | None
    backends: dict[str, str]  # "train" | "weights" | "engine" → "gloo" | "nccl" | …

    @property
    def leads(self) -> bool:
        """The one rank that orchestrates."""
        return self.rank == 0

    @property
    def engine_device(self) -> torch.device:
        """Of the first engine, as its own rank calls it; rank 0 need not have one."""
        return torch.device(self.places[self.engine_ranks[0]].name)

    @property
    def peers(self) -> tuple[int, ...]:
        """Every other rank."""
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    def describe(self) -> str:
        """The start line: who is where and what moves how."""
        hosts = sorted({place.host for place in self.places})
        split = self.topology
        tp, cp = split.tensor_parallel, split.context_parallel
        also = "".join(f" x {name} {n}" for name, n in (("tp", tp), ("cp (of dp_shard)", cp)) if n > 1)
        sharing = _shared_devices(self.places, self.engine_ranks + self.trainer_ranks)
        weights = self.backends["weights"]
        if weights == "gloo" and any(place.name != "cpu" for place in self.places):
            weights = "gloo through pinned host memory"
        parts = [
            f"{self.world_size} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}",
            f"inference {_span(self.inference_ranks)} (engine on {_span(self.engine_ranks)})",
            f"trainers {_span(self.trainer_ranks)} (dp_replicate {split.dp_replicate} x dp_shard "
            f"{len(self.sender_ranks)}{also})",
            "devices " + " ".join(place.name for place in self.places),
            f"trainer mesh {self.backends['train']}, weights {weights}, control gloo",
        ]
        if sharing:
            parts.append(f"ranks on one device: {'; '.join(_span(ranks) for ranks in sharing)}")
        if self.generation > 1:
            parts.append(f"start number {self.generation}")
        return ", ".join(parts)


def port_warnings() -> list[str]:
    """A line where the job's store, which asks nobody for a password, listens on an address of the public internet."""
    name = os.environ.get("MASTER_ADDR", "localhost")
    try:
        found = {ipaddress.ip_address(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except (OSError, ValueError):  # no name that is known here: then the start failed before
        return []
    public = sorted(str(address) for address in found if address.is_global)
    if not public:
        return []
    return [
        f"the job's store is at {name} ({public[0]}), a public address: whoever reaches it can run code in this job. "
        "Give torchrun --master-addr, or --rdzv-endpoint, of a private network, with a firewall in front of it"
    ]


def meet(timeout_s: float = 300.0) -> Meeting:
    """Find the other ranks of this start; ends the process where an earlier one of this job was refused or stopped."""
    timeout = timedelta(seconds=timeout_s)
    raw_store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    generation = _meet(raw_store, rank, world_size)
    job = PrefixStore("spmd_rl/job", raw_store.clone())  # not held up by a wait in `store`
    if job.check(["ended"]):
        print(f"rank {rank}: this job was refused or stopped, and is not started again", file=sys.stderr)
        end_process(int(job.get("ended")))
    return Meeting(
        rank=rank,
        world_size=world_size,
        host=socket.gethostname(),
        generation=generation,
        restarted=job.check(["started"]),
        job=job,
        store=PrefixStore(f"spmd_rl/{generation}", raw_store),
        timeout_s=timeout_s,
    )


def join(meeting: Meeting, topology: Topology) -> World:
    """Choose the device and build all groups. Every rank calls it once, with the same topology."""
    check_world_size(os.environ, topology)
    local_rank, rank, world_size = int(os.environ["LOCAL_RANK"]), meeting.rank, meeting.world_size
    store, generation = meeting.store, meeting.generation
    timeout = timedelta(seconds=meeting.timeout_s)
    dist.init_process_group(
        "gloo", store=PrefixStore("groups", store), rank=rank, world_size=world_size, timeout=timeout
    )
    device, place = _choose_device(topology, rank, local_rank)
    places = _exchange(store, rank, world_size, place)
    restarts = max(place.restarts for place in places)
    generation += restarts

    groups = _make_groups(topology, rank, device, places)
    return World(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        role=topology.role(rank),
        inference_ranks=topology.inference_ranks,
        trainer_ranks=topology.trainer_ranks,
        engine_ranks=topology.engine_ranks,
        sender_ranks=topology.sender_ranks,
        topology=topology,
        device=device,
        places=places,
        generation=generation,
        restarted=meeting.restarted or restarts > 0,
        job=meeting.job,
        store=store,
        ctl=groups.ctl,
        bar=groups.bar,
        ckpt=groups.ckpt,
        train=groups.train,
        mesh=groups.mesh,
        context=groups.context,
        wts_meta=groups.wts_meta,
        wts=groups.wts,
        engine_group=groups.engine_group,
        backends=groups.backends,
    )


@dataclass(frozen=True, kw_only=True)
class _Groups:
    """The process groups of a rank, as in World."""

    ctl: ProcessGroup
    bar: ProcessGroup
    ckpt: ProcessGroup | None
    train: ProcessGroup | None
    mesh: DeviceMesh | None
    context: ProcessGroup | None
    wts_meta: dict[int, ProcessGroup]
    wts: dict[int, ProcessGroup]
    engine_group: ProcessGroup | None
    backends: dict[str, str]


def _make_groups(topology: Topology, rank: int, device: torch.device, places: tuple[Place, ...]) -> _Groups:
    """All groups, in the same order on every rank."""

    def group(ranks: tuple[int, ...], backend: str, timeout: timedelta) -> ProcessGroup | None:
        made = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        return made if rank in ranks else None

    everyone = tuple(range(topology.world_size))
    trainers, senders, engines = topology.trainer_ranks, topology.sender_ranks, topology.engine_ranks
    backends = {
        "train": _backend(places, [trainers]),
        # ranks of one engine have collectives of their own all the time: two NCCL communicators must not interleave
        "weights": _backend(places, [(s, *engines) for s in senders]) if topology.engine_ranks_each == 1 else "gloo",
        "engine": "cpu:gloo,cuda:nccl" if _backend(places, topology.engines) == "nccl" else "gloo",
    }
    ctl = group(everyone, "gloo", _IDLE)
    bar = group(everyone, "gloo", timedelta(minutes=5))
    ckpt = group(trainers, "gloo", _COLLECTIVE)
    wts_meta = {sender: group((sender, *engines), "gloo", _IDLE) for sender in senders}
    wts = {sender: group((sender, *engines), backends["weights"], _IDLE) for sender in senders}
    ranks = torch.tensor(topology.mesh, dtype=torch.int)  # [dp_replicate, dp_shard, tp]
    axes = ("dp_replicate", "dp_shard", "tp") if topology.tensor_parallel > 1 else ("dp_replicate", "dp_shard")

    def along(axis: int) -> ProcessGroup | None:
        """This rank's group of those that differ in one index only."""
        lines = ranks.movedim(axis, -1).flatten(0, -2).tolist()
        made = [group(tuple(line), backends["train"], _COLLECTIVE) for line in lines]
        return next((line for line in made if line is not None), None)

    mesh_groups = [along(axis) for axis in range(len(axes))]
    only_shards = topology.dp_replicate == topology.tensor_parallel == 1
    train = mesh_groups[1] if only_shards else group(trainers, backends["train"], _COLLECTIVE)
    contexts = [
        group(members, backends["train"], _COLLECTIVE) for members in topology.context_groups if len(members) > 1
    ]
    engine_groups = [group(members, backends["engine"], _IDLE) for members in topology.engines]
    mesh = None
    if rank in trainers:
        mesh = DeviceMesh.from_group(
            [mesh_group for mesh_group in mesh_groups if mesh_group is not None],
            device.type,
            mesh=ranks if len(axes) == 3 else ranks[..., 0],
            mesh_dim_names=axes,
        )
    assert ctl is not None and bar is not None
    return _Groups(
        ctl=ctl,
        bar=bar,
        ckpt=ckpt,
        train=train,
        mesh=mesh,
        context=next((made for made in contexts if made is not None), None),
        wts_meta={sender: made for sender, made in wts_meta.items() if made is not None},
        wts={sender: made for sender, made in wts.items() if made is not None},
        engine_group=next((made for made in engine_groups if made is not None), None),
        backends=backends,
    )


@contextmanager
def alone() -> Iterator[ProcessGroup]:
    """Within the block a process outside of any torchrun has a group, of itself alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield dist.distributed_c10d._get_default_group()
    finally:
        dist.destroy_process_group()


def note(job: Store, word: str, value: int = 1) -> None:
    """What later starts of this job are to know: that it "started", or "ended" with a code and starts no more.

    torchrun keeps it in its store; launch/multi_node.sh, each of whose torchruns has a new one, in a file.
    """
    if path := os.environ.get("SPMD_RL_NOTES"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{word} {value}\n")
    job.set(word, str(value))


def check_shared_folder(world: World, folder: Path) -> None:
    """Refuse, on all ranks alike, a run directory that is not one file system on all of them; all ranks call it."""
    token_file, token, wrong = folder / ".shared", uuid.uuid4().hex, ""
    here = f"run directory {folder} on {world.places[world.rank].host} (rank {world.rank})"
    try:
        if world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            token_file.write_text(token)
        else:
            token = world.store.get("shared folder").decode()
            if not token_file.exists() or token_file.read_text() != token:
                wrong = (
                    f"{here} is not the one that rank 0 on {world.places[0].host} sees: set run.dir to a file system "
                    "that all nodes share"
                )
    except OSError as error:
        wrong = f"{here}: {error}"
    if world.rank == 0:
        world.store.set("shared folder", token)
    world.store.set(f"shared folder/{world.rank}", wrong)
    answers = world.store.multi_get([f"shared folder/{rank}" for rank in range(world.world_size)])
    if errors := [answer.decode() for answer in answers if answer]:
        raise ValueError(errors[0])


def leave_refused(meeting: Meeting, error: Exception, code: int) -> NoReturn:
    """End a start on all ranks with one code; rank 0 says why before torchrun hears of any.

    torchrun signals the others when it finds the first ended: by then all of them are here, deaf to it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(RuntimeError):  # the store is gone, and with it those who would be waited for
        if meeting.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        if code == 2:
            note(meeting.job, "ended", code)
        meeting.store.set(f"refused/{meeting.rank}", "1")
        everybody = [f"refused/{rank}" for rank in range(meeting.world_size)]
        meeting.store.wait(everybody, timedelta(seconds=30))
    end_process(code)


def agreed_code(store: Store) -> int:
    """The exit code that rank 0 gives, however long its last evaluation takes: the store's own timeout is shorter."""
    store.wait(["exit code"], _IDLE)
    return int(store.get("exit code"))


def leave(world: World, *, timeout_s: float = 20.0) -> None:
    """Wait until every rank is here; raises naming the ranks that did not come. Then `end_process`."""
    dist.monitored_barrier(world.bar, timeout=timedelta(seconds=timeout_s), wait_all_ranks=True)


def end_process(code: int) -> NoReturn:
    """Flush and end at once: the interpreter's own end aborts while threads are blocked in gloo."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_sibling(rank: int) -> None:
    """Kill a rank of this torchrun that gives no sign of life: stopped, it would hold torchrun's SIGTERM for 30 s.

    Asked before, one whose main thread holds the interpreter says where it stands.
    """
    ours = {f"RANK={rank}", *(f"{name}={os.environ.get(name)}" for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"))}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getppid() and ours <= {*(process / "environ").read_text(errors="replace").split("\0")}:
                os.kill(int(process.name), TELL_STACK)
                threading.Event().wait(TELL_S)
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # it has ended
            continue


def tell_stack_when_asked() -> None:
    """From here on `TELL_STACK` has the main thread's stack written to stderr, also while it holds the interpreter."""
    assert sys.__stderr__ is not None
    faulthandler.register(TELL_STACK, file=sys.__stderr__, all_threads=False)


def end_torchrun() -> None:
    """Kill the torchrun that started this rank, and nobody else who did."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)


def _meet(store: Store, rank: int, world_size: int) -> int:
    """Agree on the number of this start of the world; waits for all ranks.

    torchrun keeps one store over restarts, so what dead ranks wrote is still there, and its restart count is each
    node's own.  Rank 0 opens a new number and closes the one before; the others offer a nonce under the newest number
    that they see and go on to the next until rank 0 has confirmed theirs.
    """
    prefix = "spmd_rl/start"
    if rank == 0:
        number = store.add(prefix, 1)
        store.compare_set(f"{prefix}/{number - 1}/closed", "", "[]")
        nonces = [nonce.decode() for nonce in store.multi_get([f"{prefix}/{number}/{r}" for r in range(1, world_size)])]
        store.set(f"{prefix}/{number}/closed", json.dumps(["", *nonces]))
        return number
    nonce = uuid.uuid4().hex
    number = max(1, store.add(prefix, 0))
    while True:
        store.set(f"{prefix}/{number}/{rank}", nonce)
        met = json.loads(store.get(f"{prefix}/{number}/closed"))
        if rank < len(met) and met[rank] == nonce:
            return number
        number += 1


def _choose_device(topology: Topology, rank: int, local_rank: int) -> tuple[torch.device, Place]:
    host, restarts = socket.gethostname(), int(os.environ.get("SPMD_RL_RESTARTS", "0"))
    if not (torch.cuda.is_available() and topology.takes_device(rank)):
        return torch.device("cpu"), Place(host=host, device="cpu", name="cpu", restarts=restarts)
    index = topology.device_slot(rank, local_rank) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    properties = torch.cuda.get_device_properties(index)
    device = torch.device("cuda", index)
    unique = str(getattr(properties, "uuid", index))
    return device, Place(host=host, device=unique, name=str(device), restarts=restarts)


def _exchange(store: Store, rank: int, world_size: int, place: Place) -> tuple[Place, ...]:
    store.set(f"place/{rank}", json.dumps(asdict(place)))
    return tuple(Place(**json.loads(text)) for text in store.multi_get([f"place/{r}" for r in range(world_size)]))


def _backend(places: tuple[Place, ...], groups: Sequence[tuple[int, ...]]) -> str:
    """One answer for groups of one kind: NCCL where every group's members have devices of their own."""
    distinct = all(len({(places[r].host, places[r].device) for r in ranks}) == len(ranks) for ranks in groups)
    on_cuda = all(places[r].name.startswith("cuda") for ranks in groups for r in ranks)
    return "nccl" if on_cuda and distinct and dist.is_nccl_available() else "gloo"


def _shared_devices(places: tuple[Place, ...], ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    by_device: dict[tuple[str, str], list[int]] = {}
    for rank in ranks:
        if places[rank].name != "cpu":
            by_device.setdefault((places[rank].host, places[rank].device), []).append(rank)
    return [tuple(sharing) for sharing in by_device.values() if len(sharing) > 1]


def _span(ranks: tuple[int, ...]) -> str:
    """Example: (0, 1, 2) gives 0-2, (1,) gives 1, (0, 2) gives 0 2."""
    if len(ranks) > 1 and all(after == before + 1 for before, after in pairwise(ranks)):
        return f"{ranks[0]}-{ranks[-1]}"
    return " ".join(map(str, ranks))
