"""One weight update from trainers to engines: seconds and GB/s beside a raw broadcast of the same bytes, as JSON.

    OMP_NUM_THREADS=1 python -m benchmarks.weight_sync [--models smollm2 synthetic] [--ranks 1+1 1+2 2+2] [--repeats 5]

For each model (`smollm2`: the shapes of SmolLM2-135M in float32; `synthetic`: 1 GB in tensors of 4 MB) and split
(inference + trainer ranks), in one launch, ways taking turns, medians, from barrier to barrier:

    sync      from publish until every tensor is delivered, proved by checksums on both sides
    unproved  the same with checksums that are always 0: what the proof costs
    raw       a broadcast of one contiguous tensor of the same bytes from one trainer to the same engines

`hold_s` is what a trainer waits; `cpu_s` is of all ranks together, the norm of the change included, and says more than
seconds where other work shares the cores.  `machine`: this machine's copy and checksum in one thread.  `pause`: a
native engine of SmolLM2's shape, 8 running sequences: a decode step, the preparation of new weights (beside steps, in a
run), the swap, and the step after it, in which keys and values begin to be recomputed.  `delta`: bfloat16 weights
N(0, 0.02) after steps of N(0, 1) times the learning rate, sent whole and as deltas.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks.decode import SHAPES, config_of
from spmd_rl.distributed.world import World
from spmd_rl.engine.native import NativeEngine
from spmd_rl.types import Sampling
from spmd_rl.weights import wire
from spmd_rl.weights.checksum import checksum
from spmd_rl.weights.layout import BUCKET_BYTES, TensorSpec, manifest, shard_layout, views
from spmd_rl.weights.receiver import WeightReceiver
from spmd_rl.weights.sender import WeightSender
from spmd_rl.weights.wire import Received
from tests.ranks import run_worlds

LIMIT_S = 600.0
RATES = (1e-6, 1e-3)


def shapes_of(model: str, megabytes: int) -> list[tuple[int, ...]]:
    if model == "synthetic":
        return [(1024, 1024)] * max(1, megabytes // 4)
    with torch.device("meta"):
        return [tuple(p.shape) for p in AutoModelForCausalLM.from_config(config_of(model)).parameters()]


class Link:
    """One stream of versions, from whichever side this rank is on."""

    def __init__(self, world: World, parameters: dict[str, Tensor] | None, specs: list[TensorSpec], **how: Any) -> None:
        self._version, self._ctl = 0, world.ctl
        self._sender = self._receiver = None
        self._arrived: queue.Queue[Received] = queue.Queue()
        bucket_bytes = how.pop("bucket_bytes")
        common = {"specs": specs, "failed": fail, "bucket_bytes": bucket_bytes}
        if parameters is not None:
            self._sender = WeightSender(
                parameters=parameters,
                index=world.sender_ranks.index(world.rank),
                num_senders=len(world.sender_ranks),
                meta_group=world.wts_meta[world.rank],
                payload_group=world.wts[world.rank],
                **common,
                **how,
            )
        else:
            self._receiver = WeightReceiver(
                meta_groups=world.wts_meta,
                payload_groups=world.wts,
                device=world.device,
                deliver=lambda version, fetch: self._arrived.put(fetch()),
                **common,
            )
            self._receiver.start()

    def update(self) -> float:
        """One version until it is everywhere; the seconds that the trainer was held."""
        hold_s = 0.0
        if self._sender is not None:
            hold_s = self._sender.publish(self._version)
        else:
            self._arrived.get(timeout=LIMIT_S)
            self._receiver.release(self._version)
        self._version += 1
        return hold_s

    def rest(self) -> int:
        """Until nothing is under way, the sender's norm of the change included; the bytes that were sent."""
        return self._sender.wait().sent_bytes if self._sender is not None else 0

    def close(self) -> None:
        self._sender.close() if self._sender is not None else self._receiver.join(timeout_s=LIMIT_S)


def timed(world: World, work: Callable[[], Any], rest: Callable[[], Any] = lambda: None) -> tuple[float, float]:
    """Seconds from barrier to barrier, and this process's CPU seconds until it rests."""
    dist.barrier(group=world.ctl)
    start, cpu = time.perf_counter(), time.process_time()
    work()
    dist.barrier(group=world.ctl)
    seconds = time.perf_counter() - start
    rest()
    return seconds, time.process_time() - cpu


def measure(world: World, model: str, megabytes: int, repeats: int, bucket_bytes: int) -> dict[str, Any]:
    """On every rank."""
    torch.manual_seed(world.rank)
    module = nn.ParameterList([nn.Parameter(torch.full(shape, 0.5)) for shape in shapes_of(model, megabytes)])
    specs = manifest(module)
    num_bytes, source, parameters = sum(spec.num_bytes for spec in specs), world.sender_ranks[0], None
    if world.role == "trainer":
        if len(world.trainer_ranks) > 1:
            fully_shard(module, mesh=world.mesh["dp_shard"])
        parameters = dict(module.named_parameters())
    del module
    link = Link(world, parameters, specs, bucket_bytes=bucket_bytes)
    raw = torch.ones(num_bytes, dtype=torch.uint8) if source in world.wts else None
    holds: list[float] = []

    def broadcast() -> None:
        if raw is not None:
            dist.broadcast(raw, source, group=world.wts[source])

    ways: dict[str, Callable[[], Any]] = {
        "sync": lambda: holds.append(link.update()),
        "unproved": link.update,
        "raw": broadcast,
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            wire.checksum = (lambda data: torch.zeros((), dtype=torch.int64)) if name == "unproved" else checksum
            taken[name].append(timed(world, way, link.rest))
    link.close()
    result: dict[str, Any] = {"bytes": num_bytes, "hold_s": statistics.median(holds[1:])}
    for name, figures in taken.items():  # the first of each warms up
        result[name] = {"seconds": statistics.median(f[0] for f in figures[1:])}
        result[name]["cpu_s"] = statistics.median(f[1] for f in figures[1:])
    if model == "smollm2":
        specs = [TensorSpec(spec.name, spec.shape, torch.bfloat16) for spec in specs]
        result["delta"] = {
            f"{way} at {rate:g}": trained(world, parameters, specs, rate, bucket_bytes, way == "delta")
            for rate in RATES
            for way in ("full", "delta")
        }
    return result


def trained(
    world: World, parameters: dict[str, Tensor] | None, specs: list[TensorSpec], rate: float, bucket: int, delta: bool
) -> dict[str, float]:
    """An update after a step: median of three."""
    local = [
        p.data.to_local() if isinstance(p.data, DTensor) else p.data for p in (parameters or {}).values()
    ]  # what this rank holds
    step = [torch.randn_like(tensor) for tensor in local]
    for tensor in local:
        tensor.normal_(0, 0.02)
    link = Link(world, parameters, specs, bucket_bytes=bucket, **({"delta": delta} if parameters is not None else {}))
    taken, num_bytes = [], 0
    for _ in range(4):
        for tensor, change in zip(local, step, strict=True):
            tensor.add_(change, alpha=rate)
        taken.append(timed(world, link.update)[0])
        num_bytes = link.rest()
    link.close()
    return {"seconds": statistics.median(taken[1:]), "bytes": num_bytes}


def summary(answers: list[dict[str, Any]], num_inference: int) -> dict[str, Any]:
    """Of all ranks' answers."""
    first, trainers = answers[0], answers[num_inference:]
    row: dict[str, Any] = {"bytes": first["bytes"], "hold_s": round(max(t["hold_s"] for t in trainers), 4)}
    for name in ("sync", "unproved", "raw"):
        seconds = first[name]["seconds"]
        row[f"{name}_s"] = round(seconds, 4)
        row[f"{name}_cpu_s"] = round(sum(answer[name]["cpu_s"] for answer in answers), 3)
    row["gb_per_s"] = round(first["bytes"] / first["sync"]["seconds"] / 1e9, 3)
    row["share_of_raw"] = round(first["raw"]["seconds"] / first["sync"]["seconds"], 3)
    row["share_of_raw_unproved"] = round(first["raw"]["seconds"] / first["unproved"]["seconds"], 3)
    if "delta" in first:
        row["delta"] = {
            way: {"seconds": round(figures["seconds"], 4), "bytes": sum(t["delta"][way]["bytes"] for t in trainers)}
            for way, figures in first["delta"].items()
        }
    return row


def pause(repeats: int = 5) -> dict[str, float]:
    """Milliseconds."""
    config = config_of("smollm2")
    model = AutoModelForCausalLM.from_config(config).eval()
    layout = shard_layout(manifest(model))
    weights = [views(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout) for _ in range(2)]
    for name, parameter in model.named_parameters():
        for version in weights:
            version[name].copy_(parameter.detach())
    engine = NativeEngine(model=model, device=torch.device("cpu"), max_slots=8, max_seq_len=256)
    engine.load_weights(weights[0], 0)
    for number in range(8):
        prompt = np.random.default_rng(number).integers(0, SHAPES["smollm2"][0][0], 32).astype(np.int32)
        engine.submit(number, prompt, Sampling(max_tokens=200, seed=number))
    taken: dict[str, list[float]] = {"step": [], "prepare": [], "swap": [], "step_after": []}
    for version in range(1, repeats + 2):
        for _ in range(3):  # all sequences are decoded again
            engine.step()
        works = {
            "step": engine.step,
            "prepare": lambda v=version: engine.prepare(weights[v % 2], v),
            "swap": lambda v=version: engine.load_weights(weights[v % 2], v),
            "step_after": engine.step,
        }
        for name, work in works.items():
            start = time.perf_counter()
            work()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {f"{name}_ms": round(statistics.median(times[1:]), 2) for name, times in taken.items()}


def machine() -> dict[str, float]:
    """GB/s of a copy and of the checksum, one thread, on memory that is in no cache."""
    data = torch.randint(0, 255, (256 << 20,), dtype=torch.uint8)
    target = torch.empty_like(data)
    rates = {}
    for name, work in (("copy", lambda: target.copy_(data)), ("checksum", lambda: checksum(data))):
        taken = []
        for _ in range(8):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
        rates[f"{name}_gb_per_s"] = round(len(data) / min(taken) / 1e9, 2)
    return rates


def fail(error: Exception) -> None:
    raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=["smollm2", "synthetic"], default=["smollm2", "synthetic"])
    parser.add_argument("--ranks", nargs="+", default=["1+1", "1+2", "2+2"], help="inference + trainer ranks")
    parser.add_argument("--megabytes", type=int, default=1000, help="of the synthetic model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-megabytes", type=int, default=BUCKET_BYTES >> 20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine(), "pause": pause()}
    for model in options.models:
        for split in options.ranks:
            num_inference, num_trainers = map(int, split.split("+"))
            size = (model, options.megabytes, options.repeats, options.bucket_megabytes << 20)
            answers = run_worlds(measure, num_inference, num_trainers, *size, timeout_s=LIMIT_S)
            row = summary(answers, num_inference)
            row["share_of_copy"] = round(row["gb_per_s"] / results["machine"]["copy_gb_per_s"], 3)
            results[f"{model} {split}"] = row
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
