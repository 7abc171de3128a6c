"""LoRA's additions from FSDP2 shards to engines, over gloo: the bits that merged weights have."""

import itertools
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from spmd_rl.distributed.world import World
from spmd_rl.trainer.optimizer import local, whole
from spmd_rl.weights.adapter import AdapterReceiver, AdapterSender
from spmd_rl.weights.layout import TensorSpec
from spmd_rl.weights.low_rank import Lora, merged
from spmd_rl.weights.wire import Received
from tests.ranks import run_worlds

CPU, LIMIT_S = torch.device("cpu"), 20.0
LORA = Lora(rank=3, alpha=6.0, targets=("q", "down"))
FIRST, LAST = 4, 7  # a resumed run begins anywhere
SHAPES = {"embed.weight": (11, 24), "0.q.weight": (20, 24), "0.k.weight": (5, 24), "0.norm.weight": (24,)}
SHAPES |= {"0.down.weight": (24, 7), "0.q.bias": (20,)}
CHOSEN = ("0.q", "0.down")


def raises(error: Exception) -> None:
    raise error


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().copy()


def specs(dtype: torch.dtype) -> list[TensorSpec]:
    return [TensorSpec(name, shape, dtype) for name, shape in SHAPES.items()]


class Policy:
    """Frozen parameters, additions and merged weights, sharded where the world has more than one trainer."""

    def __init__(self, world: World, exact: torch.dtype) -> None:
        torch.manual_seed(0)
        tensors = {name: torch.randn(shape).to(exact).float() for name, shape in SHAPES.items()}
        tensors |= {spec.name: torch.randn(spec.shape) for spec in LORA.additions(specs(torch.float32))}
        self._names = list(tensors)
        module = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors.values()])
        if len(world.trainer_ranks) > 1:
            fully_shard(module, mesh=world.mesh["dp_shard"])
        self._all = {name: parameter.detach() for name, parameter in zip(self._names, module, strict=True)}
        self.frozen = {name: self._all[name] for name in SHAPES}
        self.additions = {name: t for name, t in self._all.items() if ".lora_" in name}
        self.merged = self.frozen | {f"{layer}.weight": self.frozen[f"{layer}.weight"].clone() for layer in CHOSEN}

    def train(self, version: int) -> None:
        for number, tensor in enumerate(self.additions.values()):
            torch.manual_seed(version * 100 + number)
            local(tensor).add_(torch.randn_like(local(tensor)))

    def merge(self) -> None:
        for layer in CHOSEN:
            weight, a, b = (self._all[f"{layer}.{part}"] for part in ("weight", "lora_a", "lora_b"))
            local(self.merged[f"{layer}.weight"]).copy_(merged(local(weight), whole(a), local(b), LORA.scale))

    def sender(self, world: World, dtype: torch.dtype, exact: torch.dtype) -> AdapterSender:
        return AdapterSender(
            frozen=self.frozen,
            additions=self.additions,
            merged=self.merged,
            specs=specs(dtype),
            lora=LORA,
            exact=exact,
            index=world.sender_ranks.index(world.rank),
            num_senders=len(world.sender_ranks),
            meta_group=world.wts_meta[world.rank],
            payload_group=world.wts[world.rank],
            failed=raises,
            bucket_bytes=512,
        )


def make_receiver(
    world: World,
    dtype: torch.dtype,
    exact: torch.dtype,
    deliver: Callable[..., None],
    failed: Callable[[Exception], None] = raises,
    lora: Lora = LORA,
    copied: bool = False,
) -> AdapterReceiver:
    return AdapterReceiver(
        specs=specs(dtype),
        lora=lora,
        exact=exact,
        meta_groups=world.wts_meta,
        payload_groups=world.wts,
        device=CPU,
        deliver=deliver,
        failed=failed,
        copied=copied,
        bucket_bytes=512,
    )


def trains(world: World, dtype: torch.dtype, exact: torch.dtype) -> list[tuple[Any, dict]]:
    """(report, this sender's rows of the merged weights in bits) of each version."""
    policy, done = Policy(world, exact), []
    sender = policy.sender(world, dtype, exact)
    for version in range(FIRST, LAST + 1):
        policy.train(version)
        policy.merge()
        rows = {name: bits(local(tensor).to(dtype)) for name, tensor in policy.merged.items()}
        assert sender.publish(version) > 0
        policy.train(-version)  # at once: what is sent is in staging
        done.append((sender.wait(), rows))
    sender.close()
    return done


def decodes(world: World, dtype: torch.dtype, exact: torch.dtype, copied: bool = False) -> list[tuple[list[int], dict]]:
    """(checksums, whole weights in bits) of each version; live ones stay as they are until the next are."""
    arrived: queue.Queue[Received] = queue.Queue()
    receiver = make_receiver(world, dtype, exact, lambda version, fetch: arrived.put(fetch()), copied=copied)
    receiver.start()
    seen, live, before, places = [], {}, {}, set()
    for version in range(FIRST, LAST + 1):
        received = arrived.get(timeout=LIMIT_S)
        tensors = received.tensors
        assert (received.version, list(tensors)) == (version, list(SHAPES))
        assert all((bits(tensor) == before[name]).all() for name, tensor in live.items())
        before = {name: bits(tensor) for name, tensor in tensors.items()}
        if copied:
            with pytest.raises(queue.Empty):  # nothing is merged over what was not copied yet
                arrived.get(timeout=0.3)
            assert all((bits(tensor) == before[name]).all() for name, tensor in tensors.items())
        live = {} if copied else tensors
        places.add(tensors[CHOSEN[0] + ".weight"].data_ptr())
        seen.append((received.checksums, before))
        receiver.release(version)
    receiver.join(timeout_s=LIMIT_S)
    assert len(places) == (1 if copied else 2)
    return seen


def lives(world: World, dtype: torch.dtype, exact: torch.dtype, copied: bool = False) -> list[tuple]:
    return trains(world, dtype, exact) if world.role == "trainer" else decodes(world, dtype, exact, copied)


@pytest.mark.parametrize(
    ("num_inference", "num_trainers", "dtype", "exact", "copied"),
    [
        (2, 1, torch.float32, torch.float32, False),
        (1, 2, torch.bfloat16, torch.bfloat16, True),
        (1, 3, torch.bfloat16, torch.float32, False),
    ],
)
def test_engines_hold_the_bits_of_the_merged_weights(num_inference, num_trainers, dtype, exact, copied):
    answers = run_worlds(lives, num_inference, num_trainers, dtype, exact, copied)
    trainers = answers[num_inference:]
    for engine in answers[:num_inference]:
        for step, (checksums, weights) in enumerate(engine):
            sent = [trainer[step][0] for trainer in trainers]
            for name, array in weights.items():
                rows = np.concatenate([trainer[step][1][name] for trainer in trainers])
                np.testing.assert_array_equal(array, rows, err_msg=name)
            assert checksums == [number for report in sent for number in report.checksums]
    first, *others = [report.sent_bytes - report.num_bytes for report, _ in trainers[0]]
    assert first > 0  # the frozen model
    assert others == [0] * (LAST - FIRST)


def test_the_norm_of_an_update_is_that_of_the_merged_weights():
    _, steps = run_worlds(lives, 1, 1, torch.float32, torch.float32)
    for (_, before), (report, after) in itertools.pairwise(steps):
        change = [(after[name].view(np.float32) - before[name].view(np.float32)).astype(float) for name in after]
        assert report.update_norm == pytest.approx(sum((c**2).sum() for c in change) ** 0.5)


def merges_otherwise(world: World) -> str:
    if world.role == "trainer":
        policy = Policy(world, torch.float32)
        policy.merge()
        policy.sender(world, torch.float32, torch.float32).publish(0)
        world.store.wait(["seen"])
        return ""
    failures: queue.Queue[Exception] = queue.Queue()
    make_receiver(
        world,
        torch.float32,
        torch.float32,
        lambda *weights: failures.put(AssertionError("delivered")),
        failures.put,
        Lora(rank=3, alpha=6.0001, targets=LORA.targets),
    ).start()
    error = str(failures.get(timeout=LIMIT_S))
    world.store.set("seen", "1")
    return error


def test_weights_that_an_engine_merges_otherwise_are_never_delivered():
    error, _ = run_worlds(merges_otherwise, 1, 1)
    assert error.startswith("weights of version 0: 0.q.weight and 1 more differ, as merged here, from what rank 1")
