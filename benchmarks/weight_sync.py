"""One weight update from trainers to engines: seconds and GB/s beside raw broadcast and gathering, as JSON.

    OMP_NUM_THREADS=1 python -m benchmarks.weight_sync [--ranks 1+1 1+2 2+2] [--model smollm2] [--megabytes 64]

For each split (inference + trainer ranks), in one launch and interleaved, best of the repeats, from barrier to barrier:
`sync`, from publish until every tensor is verified and delivered; `raw`, a broadcast of one contiguous tensor of the
same bytes from one trainer to the same engines, memory touched before; `gather`, full_tensor per parameter and a
broadcast of each.  `hold` is what the trainer waits.  `copy` and `checksum` are this machine's rates in one thread.
`deltas`: bfloat16 weights N(0, 0.02) after steps of N(0, learning rate) in float32, sent whole and as deltas.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from spmd_rl.weight_checksum import checksum
from spmd_rl.weight_layout import BUCKET_BYTES, manifest
from spmd_rl.weight_receiver import WeightReceiver
from spmd_rl.weight_sender import WeightSender
from spmd_rl.world import World
from tests.gather import gather_and_broadcast
from tests.ranks import run_worlds

LIMIT_S = 600.0


class Shapes(nn.Module):
    """Parameters of given shapes, one module per name."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(torch.full(shape, 0.5)) for shape in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def shapes_of(model: str, megabytes: int) -> list[tuple[int, ...]]:
    """`smollm2`: the 272 tensors of SmolLM2-135M (538 MB in float32); `synthetic`: rows of 1024, 4 MB a tensor."""
    if model == "synthetic":
        return [(1024, 1024)] * max(1, megabytes // 4)
    layer = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536), (576,), (576,)]
    return [(49152, 576), *layer * 30, (576,)]


def measure(world: World, model_name: str, megabytes: int, repeats: int, bucket_bytes: int) -> dict[str, Any]:
    """On every rank; rank 0's answer counts."""
    shapes = shapes_of(model_name, megabytes)
    with torch.device("meta"):
        specs = manifest(Shapes(shapes))
    num_bytes = sum(spec.num_bytes for spec in specs)
    source = world.sender_ranks[0]
    times: dict[str, list[float]] = {"sync": [], "raw": [], "gather": []}
    holds: list[float] = []
    arrived: queue.Queue[tuple] = queue.Queue()
    sender = receiver = parameters = None
    if world.role == "trainer":
        model = Shapes(shapes)
        if len(world.trainer_ranks) > 1:
            fully_shard(model, mesh=world.mesh["dp_shard"])
        parameters = dict(model.named_parameters())
        sender = WeightSender(
            parameters=parameters,
            specs=specs,
            index=world.sender_ranks.index(world.rank),
            num_senders=len(world.sender_ranks),
            meta_group=world.wts_meta[world.rank],
            payload_group=world.wts[world.rank],
            failed=fail,
            bucket_bytes=bucket_bytes,
        )
    else:
        receiver = WeightReceiver(
            specs=specs,
            meta_groups=world.wts_meta,
            payload_groups=world.wts,
            device=world.device,
            deliver=lambda version, fetch: arrived.put(fetch()),
            failed=fail,
            bucket_bytes=bucket_bytes,
        )
        receiver.start()
    raw = torch.ones(num_bytes, dtype=torch.uint8) if source in world.wts else None
    for version in range(repeats + 1):
        dist.barrier(group=world.ctl)
        start = time.perf_counter()
        if sender is not None:
            holds.append(sender.publish(version))
        else:
            arrived.get(timeout=LIMIT_S)
            receiver.release(version)
        dist.barrier(group=world.ctl)
        times["sync"].append(time.perf_counter() - start)
        start = time.perf_counter()
        if raw is not None:
            dist.broadcast(raw, source, group=world.wts[source])
        dist.barrier(group=world.ctl)
        times["raw"].append(time.perf_counter() - start)
        dist.barrier(group=world.ctl)
        start = time.perf_counter()
        gather_and_broadcast(parameters, specs=specs, source=source, group=world.wts.get(source))
        dist.barrier(group=world.ctl)
        times["gather"].append(time.perf_counter() - start)
    sender.close() if sender is not None else receiver.join(timeout_s=LIMIT_S)
    sent = {
        f"{way} at {rate:g}": send_steps(world, parameters, shapes, repeats, bucket_bytes, rate, way == "delta")
        for rate in (1e-6, 1e-3)
        for way in ("full", "delta")
    }
    if sender is not None:
        return {"hold_s": min(holds[1:]), "deltas": sent}
    best = {name: min(taken[1:]) for name, taken in times.items()}  # the first of each warms up
    return {
        "bytes": num_bytes,
        **{f"{name}_s": round(seconds, 4) for name, seconds in best.items()},
        **{f"{name}_gb_per_s": round(num_bytes / seconds / 1e9, 3) for name, seconds in best.items()},
        "share_of_raw": round(best["raw"] / best["sync"], 3),
        "times_faster_than_gather": round(best["gather"] / best["sync"], 2),
    }


def send_steps(
    world: World,
    parameters: dict[str, nn.Parameter] | None,
    shapes: list[tuple[int, ...]],
    repeats: int,
    bucket_bytes: int,
    rate: float,
    delta: bool,
) -> dict[str, float]:
    """Seconds and bytes of one update, on trainers; from barrier to barrier, all engines having it."""
    with torch.device("meta"):
        specs = manifest(Shapes(shapes), dtype=torch.bfloat16)
    common = {"specs": specs, "failed": fail, "bucket_bytes": bucket_bytes}
    arrived: queue.Queue[tuple] = queue.Queue()
    sender = receiver = None
    if parameters is not None:
        for parameter in parameters.values():
            local(parameter).normal_(0, 0.02)
        sender = WeightSender(
            parameters=parameters,
            index=world.sender_ranks.index(world.rank),
            num_senders=len(world.sender_ranks),
            meta_group=world.wts_meta[world.rank],
            payload_group=world.wts[world.rank],
            delta=delta,
            anchor_every=1 << 30,
            **common,
        )
    else:
        receiver = WeightReceiver(
            meta_groups=world.wts_meta,
            payload_groups=world.wts,
            device=world.device,
            deliver=lambda version, fetch: arrived.put(fetch()),
            **common,
        )
        receiver.start()
    taken = []
    for version in range(repeats + 1):
        if parameters is not None:
            for parameter in parameters.values():
                local(parameter).add_(torch.randn_like(local(parameter)), alpha=rate)
        dist.barrier(group=world.ctl)
        start = time.perf_counter()
        if sender is not None:
            sender.publish(version)
        else:
            arrived.get(timeout=LIMIT_S)
            receiver.release(version)
        dist.barrier(group=world.ctl)
        taken.append(time.perf_counter() - start)
    sender.close() if sender is not None else receiver.join(timeout_s=LIMIT_S)
    return {"seconds": round(min(taken[1:]), 4), "bytes": sender.report.sent_bytes if sender is not None else 0}


def local(parameter: nn.Parameter) -> torch.Tensor:
    """What this rank holds of it."""
    return parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data


def fail(error: Exception) -> None:
    raise error


def local_rates() -> dict[str, float]:
    """GB/s of a copy and of the checksum, one thread, 32 MiB."""
    data = torch.randint(0, 255, (BUCKET_BYTES,), dtype=torch.uint8)
    target = torch.empty_like(data)
    rates = {}
    for name, work in (("copy", lambda: target.copy_(data)), ("checksum", lambda: checksum(data))):
        best = float("inf")
        for _ in range(8):
            start = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - start)
        rates[f"{name}_gb_per_s"] = round(len(data) / best / 1e9, 2)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", default=["1+1", "1+2"], help="inference + trainer ranks")
    parser.add_argument("--model", choices=["synthetic", "smollm2"], default="synthetic")
    parser.add_argument("--megabytes", type=int, default=64, help="of the synthetic model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bucket-megabytes", type=int, default=BUCKET_BYTES >> 20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"model": options.model, **local_rates()}
    for split in options.ranks:
        num_inference, num_trainers = map(int, split.split("+"))
        size = (options.model, options.megabytes, options.repeats, options.bucket_megabytes << 20)
        answers = run_worlds(measure, num_inference, num_trainers, *size, timeout_s=LIMIT_S)
        hold_s = max(answer["hold_s"] for answer in answers[num_inference:])
        deltas = {
            way: {
                "seconds": figures["seconds"],
                "bytes": sum(answer["deltas"][way]["bytes"] for answer in answers[num_inference:]),
            }
            for way, figures in answers[num_inference]["deltas"].items()
        }
        results[split] = {**answers[0], "hold_s": round(hold_s, 4), "deltas": deltas}
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
