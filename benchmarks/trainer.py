"""One training step on long-tailed lengths: tokens per second, share of the machine, peak memory, as JSON.

    OMP_NUM_THREADS=1 python benchmarks/trainer.py [--layers 4] [--tokens 1500] [--repeats 3]

The SmolLM2-135M shape with fewer layers and random weights, float32 on one CPU process, in ways that see the same
number of real tokens:

    packed      our step
    equal       our step on sequences of equal length
    padded      our step on sequences filled up to the longest
    full        transformers, padded to the longest, full logits
    one_by_one  transformers, each sequence alone, full logits

and the loss part alone (log-probs and entropy of N rows, forward and backward), ours and with full logits.  Its memory
beside the gradients is, in floats, ours: 2 · chunk · V + 5 N with chunk = 256; full: about 4 N · V.
Every way runs in a process of its own, so that the peak is its own; the best of the repeats counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from spmd_rl.model import build, token_logprobs
from spmd_rl.objective import AGGREGATIONS, Objective
from spmd_rl.objective.losses import LOSSES
from spmd_rl.packing import Packed, pack
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.trainer import Trainer
from spmd_rl.types import Rollout

CPU = torch.device("cpu")
PROMPT = 8
VOCAB, WIDTH = 49152, 576


def make_model(folder: Path, layers: int) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
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


def batch(lengths: list[int], filled_to: int = 0) -> Packed:
    """Random tokens; what fills a sequence up comes first, so that it is computed."""
    random = np.random.default_rng(1)
    rollouts = []
    for i, length in enumerate(lengths):
        one = Rollout(env="e", task_id=str(i), ticket=i)
        one.append(random.integers(0, VOCAB, max(0, filled_to - length) + PROMPT))
        num = length - PROMPT
        one.append(random.integers(0, VOCAB, num), np.full(num, -10.8), np.zeros(num))
        rollouts.append(one)
    return pack(rollouts, np.ones(len(lengths), np.float32))


def ours(folder: Path, lengths: list[int], filled_to: int = 0) -> tuple[Callable[[], object], float]:
    """The step, and its floating-point operations."""
    model = build(folder, device=CPU, dtype=torch.float32, weights=True)
    trainer = Trainer(
        models=Models(policy=model, mesh=None, device=CPU),
        group=None,
        objective=Objective(loss=LOSSES["decoupled"]),
        aggregation=partial(AGGREGATIONS["token_mean"], longest=1),
        learning_rate=0.0,
    )
    share = batch(lengths, filled_to)
    flops = sum(trainer.flops.of(m.micro_batches) for m in trainer.cut(share))
    return lambda: trainer.step(share, 0), flops


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
    longest, flops = max(lengths), 0.0
    match way:
        case "packed" | "equal":
            step, flops = ours(folder, lengths)
        case "padded":
            step, flops = ours(folder, lengths, longest)
        case _:
            step = theirs(folder, lengths, len(lengths) if way == "full" else 1)
    before = reset_peak_mb()
    wall, cpu = times(step, repeats)
    found = {
        "tokens_per_s": sum(lengths) / wall,
        "tokens_per_cpu_s": sum(lengths) / cpu,
        "peak_extra_mb": peak_mb() - before,
    }
    if flops:
        found |= {"gflops_per_cpu_s": flops / cpu / 1e9, "share_of_matmul_peak": flops / cpu / cpu_peak()}
    return found


def measure_loss(way: str, num_rows: int) -> dict[str, float]:
    """Log-probs and entropies of `num_rows` rows, with gradients of hidden states and head."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(num_rows, WIDTH, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH).mul_(0.02).requires_grad_()
    targets = torch.randint(0, VOCAB, (num_rows,))

    def full() -> tuple[torch.Tensor, torch.Tensor]:
        logp = (hidden @ weight.t()).log_softmax(-1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def step() -> None:
        logprobs, entropy = full() if way == "full" else token_logprobs(hidden, weight, targets)
        (logprobs.sum() + 0.01 * entropy.sum()).backward()

    before = reset_peak_mb()
    _, cpu = times(step, 1)
    gradients = 4 * (num_rows + VOCAB) * WIDTH
    return {"cpu_s": cpu, "extra_mb": peak_mb() - before - gradients / 2**20}


def times(step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Best wall and CPU seconds."""
    wall, cpu = [], []
    for _ in range(repeats):
        started, started_cpu = time.perf_counter(), time.process_time()
        step()
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - started_cpu)
    return min(wall), min(cpu)


def reset_peak_mb() -> float:
    """Resident memory now, from which the peak is counted anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mb()


def peak_mb() -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def cpu_peak() -> float:
    """Floating-point operations per CPU second of large matrix multiplications."""
    a, b = torch.ones(768, 768), torch.ones(768, 768)
    _, cpu = times(lambda: a @ b, 20)
    return 2 * 768**3 / cpu


def alone(function: Callable[..., dict[str, float]], *args: object) -> dict[str, float]:
    """Called in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--loss-rows", type=int, default=2048)
    options = parser.parse_args()
    lengths = long_tailed(options.tokens)
    equal = [sum(lengths) // len(lengths)] * len(lengths)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.layers)
        for way in ("packed", "equal", "padded", "full", "one_by_one"):
            share = equal if way == "equal" else lengths
            results[way] = alone(measure, way, Path(folder), share, options.repeats)
    packed = results["packed"]
    ratios = {
        f"packed_over_{way}": packed["tokens_per_cpu_s"] / result["tokens_per_cpu_s"]
        for way, result in results.items()
        if way != "packed"
    }
    loss = {way: alone(measure_loss, way, options.loss_rows) for way in ("ours", "full")}
    ratios["loss_memory_over_full"] = loss["ours"]["extra_mb"] / loss["full"]["extra_mb"]
    ratios["step_memory_over_full"] = packed["peak_extra_mb"] / results["full"]["peak_extra_mb"]
    sizes = {"sequences": len(lengths), "mean": sum(lengths) / len(lengths), "max": max(lengths)}
    out = {"lengths": sizes, **results, "loss_part": {"rows": options.loss_rows, **loss}, "ratios": ratios}
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
