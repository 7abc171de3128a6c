"""One training step on long-tailed lengths: tokens per second and peak memory, as JSON.

    OMP_NUM_THREADS=1 python benchmarks/trainer.py [--layers 4] [--tokens 1500] [--repeats 3]

The SmolLM2-135M shape with fewer layers and random weights, float32 on one CPU process, in four ways that see the same
number of real tokens: `packed` (our step), `equal` (our step on equal lengths), `padded` (transformers, all padded
to the longest, full logits) and `one_by_one` (transformers, each sequence alone, full logits).
Every way runs in a process of its own, so that the peak is its own; the best of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from spmd_rl.model import build
from spmd_rl.objective import AGGREGATIONS, Objective
from spmd_rl.objective.losses import LOSSES
from spmd_rl.packing import Packed, pack
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.trainer import Trainer
from spmd_rl.types import Rollout

CPU = torch.device("cpu")
PROMPT = 8


def make_model(folder: Path, layers: int) -> None:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        dtype="float32",
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def long_tailed(tokens: int) -> list[int]:
    """Lognormal lengths that add up to `tokens`."""
    lengths: list[int] = []
    random = np.random.default_rng(0)
    while sum(lengths) < tokens:
        lengths.append(PROMPT + 8 + int(random.lognormal(3.5, 1.0)))
    lengths[-1] -= sum(lengths) - tokens
    return [n for n in lengths if n > PROMPT]


def batch(lengths: list[int]) -> Packed:
    random = np.random.default_rng(1)
    rollouts = []
    for i, length in enumerate(lengths):
        one = Rollout(env="e", task_id=str(i), ticket=i)
        one.append(random.integers(0, 49152, PROMPT))
        num = length - PROMPT
        one.append(random.integers(0, 49152, num), np.full(num, -10.8), np.zeros(num))
        rollouts.append(one)
    return pack(rollouts, np.ones(len(lengths), np.float32))


def ours(folder: Path, lengths: list[int]) -> Callable[[], object]:
    model = build(folder, device=CPU, dtype=torch.float32, weights=True)
    trainer = Trainer(
        models=Models(policy=model, mesh=None, device=CPU),
        group=None,
        objective=Objective(loss=LOSSES["decoupled"]),
        aggregation=partial(AGGREGATIONS["token_mean"], longest=1),
        learning_rate=0.0,
    )
    share = batch(lengths)
    return lambda: trainer.step(share, 0)


def theirs(folder: Path, lengths: list[int], rows_at_once: int) -> Callable[[], object]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    packed = batch(lengths)
    pieces = [torch.from_numpy(packed.token_ids[a:b]).long() for a, b in pairwise(packed.cu_seqlens)]

    def step() -> None:
        for first in range(0, len(pieces), rows_at_once):
            some = pieces[first : first + rows_at_once]
            ids = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(p)) for p in some], batch_first=True)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            (-(logprobs * mask[:, 1:])[:, PROMPT - 1 :].sum() / sum(lengths)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(way: str, folder: Path, lengths: list[int], repeats: int) -> dict[str, float]:
    torch.set_num_threads(1)
    if way in ("packed", "equal"):
        step = ours(folder, lengths)
    else:
        step = theirs(folder, lengths, len(lengths) if way == "padded" else 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = [], []
    for _ in range(repeats):
        started, started_cpu = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - started_cpu)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "tokens_per_s": sum(lengths) / min(wall),
        "tokens_per_cpu_s": sum(lengths) / min(cpu),
        "peak_extra_mb": (peak - before) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    lengths = long_tailed(options.tokens)
    equal = [sum(lengths) // len(lengths)] * len(lengths)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.layers)
        for way in ("packed", "equal", "one_by_one", "padded"):
            pool = multiprocessing.get_context("spawn").Pool(1)
            share = equal if way == "equal" else lengths
            results[way] = pool.apply(measure, (way, Path(folder), share, options.repeats))
            pool.close()
            pool.join()
    packed = results["packed"]["tokens_per_cpu_s"]
    ratios = {f"packed_over_{way}": packed / results[way]["tokens_per_cpu_s"] for way in results if way != "packed"}
    sizes = {"sequences": len(lengths), "mean": sum(lengths) / len(lengths), "max": max(lengths)}
    print(json.dumps({"lengths": sizes, **results, **ratios}, indent=1))


if __name__ == "__main__":
    main()
