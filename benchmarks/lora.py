"""What LoRA saves on the SmolLM2-135M shape, rank 16 on all linear layers, float32 on CPUs, as JSON.

    OMP_NUM_THREADS=1 python -m benchmarks.lora [--repeats 3]

`sync`: one update from one trainer to one engine over gloo, merged and as what LoRA adds alone; in one launch, best of
the repeats, from barrier to barrier: merging at the trainer until merged weights are verified and delivered; `hold` is
what of it the trainer waits.  `trainer`: one process after one step of a few tokens, all trained and with LoRA: its
resident memory and the peak, sizes of the optimizer's state and of a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import queue
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.trainer import CPU, alone, batch, make_model, peak_mb
from spmd_rl.distributed.world import World
from spmd_rl.model.causal_lm import build
from spmd_rl.objective.losses import LOSSES
from spmd_rl.objective.objective import AGGREGATIONS, Objective
from spmd_rl.storage import checkpoint
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.trainer import Trainer
from spmd_rl.weights.adapter import AdapterReceiver, AdapterSender
from spmd_rl.weights.layout import TensorSpec
from spmd_rl.weights.low_rank import Lora, merged
from spmd_rl.weights.receiver import WeightReceiver
from spmd_rl.weights.sender import WeightSender
from tests.ranks import run_worlds

LORA = Lora(rank=16, alpha=32.0, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
LAYER = {"q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576), "o_proj": (576, 576)}
LAYER |= {"gate_proj": (1536, 576), "up_proj": (1536, 576), "down_proj": (576, 1536)}
LIMIT_S = 300.0


def specs() -> list[TensorSpec]:
    shapes = {"embed.weight": (49152, 576)}
    for layer in range(30):
        shapes |= {f"{layer}.{name}.weight": shape for name, shape in LAYER.items()}
        shapes |= {f"{layer}.norm_1.weight": (576,), f"{layer}.norm_2.weight": (576,)}
    return [TensorSpec(name, shape, torch.float32) for name, shape in shapes.items()]


def fail(error: Exception) -> None:
    raise error


def sync(world: World, way: str, repeats: int) -> dict[str, float]:
    arrived: queue.Queue[object] = queue.Queue()
    sender = receiver = None
    common = {"specs": specs(), "failed": fail}
    if world.role == "trainer":
        frozen = {spec.name: torch.randn(spec.shape).mul_(0.02) for spec in specs()}
        added = {spec.name: torch.randn(spec.shape).mul_(0.02) for spec in LORA.additions(specs())}
        made = frozen | {spec.name: torch.empty(spec.shape) for spec in LORA.chosen(specs())}
        common |= {"index": 0, "num_senders": 1}
        common |= {"meta_group": world.wts_meta[world.rank], "payload_group": world.wts[world.rank]}
        if way == "merged":
            sender = WeightSender(parameters=made, **common)
        else:
            tensors = {"frozen": frozen, "additions": added, "merged": made}
            sender = AdapterSender(**tensors, lora=LORA, exact=torch.float32, **common)
    else:
        common |= {"meta_groups": world.wts_meta, "payload_groups": world.wts, "device": CPU}
        common |= {"deliver": lambda version, fetch: arrived.put(fetch())}
        if way == "merged":
            receiver = WeightReceiver(**common)
        else:
            receiver = AdapterReceiver(lora=LORA, exact=torch.float32, **common)
    taken, holds = [], []
    for version in range(repeats + 1):
        dist.barrier(group=world.ctl)
        start = time.perf_counter()
        if sender is not None:
            for spec in LORA.chosen(specs()):
                layer = spec.name.removesuffix(".weight")
                a, b = added[f"{layer}.lora_a"], added[f"{layer}.lora_b"]
                made[spec.name].copy_(merged(frozen[spec.name], a, b, LORA.scale))
            sender.publish(version)
            holds.append(time.perf_counter() - start)
        else:
            arrived.get(timeout=LIMIT_S)
            receiver.release(version)
        dist.barrier(group=world.ctl)
        taken.append(time.perf_counter() - start)
        for tensor in added.values() if sender is not None else ():
            tensor.add_(torch.randn_like(tensor), alpha=1e-3)
    if sender is None:
        receiver.join(timeout_s=LIMIT_S)
        return {}
    sender.close()
    return {"s": min(taken[1:]), "hold_s": min(holds[1:]), "bytes": sender.report.sent_bytes, "first_s": taken[0]}


def both_ways(world: World, repeats: int) -> dict[str, dict[str, float]]:
    return {way: sync(world, way, repeats) for way in ("merged", "adapter")}


def train(folder: Path, lora: Lora | None) -> dict[str, float]:
    torch.set_num_threads(1)
    model = build(folder, device=CPU, dtype=torch.float32, weights=True)
    trainer = Trainer(
        models=Models(policy=model, lora=lora, mesh=None, device=CPU),
        group=None,
        objective=Objective(loss=LOSSES["decoupled"]),
        aggregation=partial(AGGREGATIONS["token_mean"], longest=1),
    )
    trainer.step(batch([32, 32]), 0)
    trainer.models.refresh()
    moments = [t for state in trainer.optimizer.state.values() for t in state.values()]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {"resident_mb": int(status["VmRSS"].split()[0]) / 1024, "peak_mb": peak_mb()}
    found |= {"trained": sum(p.numel() for _, p in trainer.models.named_trained())}
    found |= {"optimizer_mb": sum(t.nbytes for t in moments) / 2**20}
    with tempfile.TemporaryDirectory() as saved, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save_trainer(trainer.state_dict(), Path(saved), None).result()
        size = sum(file.stat().st_size for file in Path(saved).iterdir())
    return {**found, "checkpoint_mb": size / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    _, sent = run_worlds(both_ways, 1, 1, options.repeats, timeout_s=LIMIT_S)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), 30)
        trained = {name: alone(train, Path(folder), lora) for name, lora in (("all", None), ("lora", LORA))}
    print(json.dumps({"sync": sent, "trainer": trained}, indent=1))


if __name__ == "__main__":
    main()
