"""One training step on long-tailed lengths: tokens per second, share of the machine, peak memory, as JSON.

    OMP_NUM_THREADS=1 python benchmarks/trainer.py [--layers 4] [--tokens 1500] [--rounds 5]

The SmolLM2-135M shape with fewer layers and random weights, float32 on one CPU process.  Ways that see the same number
of real tokens:

    packed      our step
    equal       our step on as many tokens in sequences of equal length
    padded      our step on sequences filled up to the longest
    full        transformers, padded to the longest, full logits
    one_by_one  transformers, each sequence alone, full logits

and two that see another batch, a group of 8 replies of 64 tokens to a prompt of 512:

    repeated    our step
    shared      our step with share_prefix

Every way has a process of its own, so that its peak of memory is its own.  All take one step in turn, round after
round, so that what else the machine does meets all of them: the ratios are medians over the rounds of the ratio within
a round, of CPU seconds.

The loss part alone (log-probs and entropy of N rows, forward and backward), ours and with full logits: its memory
beside the gradients is, in floats, ours: 2 · chunk · V + 5 N with chunk = 256; full: 4 to 5 N · V.  At 2,048 rows that
is 112 MB against 1,820, 6%, in the same time.
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
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from spmd_rl.model.causal_lm import build
from spmd_rl.model.logprobs import token_logprobs
from spmd_rl.objective.losses import LOSSES
from spmd_rl.objective.objective import AGGREGATIONS, Objective
from spmd_rl.packing.packing import Packed, pack
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.trainer import Trainer
from spmd_rl.types import Rollout

CPU = torch.device("cpu")
PROMPT = 8
VOCAB, WIDTH = 49152, 576
GROUP = 512, 8, 64  # tokens of the prompt, members, tokens of each reply


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
    return rollouts([(max(0, filled_to - length) + PROMPT, 1, length - PROMPT) for length in lengths])


def rollouts(groups: list[tuple[int, int, int]]) -> Packed:
    """Groups as (tokens of the prompt, members, tokens of each reply)."""
    random, made = np.random.default_rng(1), []
    for group, (prompt, size, num) in enumerate(groups):
        begin = random.integers(0, VOCAB, prompt)
        for _ in range(size):
            one = Rollout(env="e", task_id="t", ticket=len(made), group_id=group)
            one.append(begin)
            one.append(random.integers(0, VOCAB, num), np.full(num, -10.8), np.zeros(num))
            made.append(one)
    return pack(made, np.ones(len(made), np.float32))


def ours(folder: Path, share: Packed, share_prefix: bool = False) -> tuple[Callable[[], object], float]:
    """The step, and its floating-point operations."""
    model = build(folder, device=CPU, dtype=torch.float32, weights=True)
    trainer = Trainer(
        models=Models(policy=model, mesh=None, device=CPU),
        group=None,
        objective=Objective(loss=LOSSES["decoupled"]),
        aggregation=partial(AGGREGATIONS["token_mean"], longest=1),
        learning_rate=0.0,
        share_prefix=share_prefix,
    )
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


def work(way: str, folder: Path, lengths: list[int], pipe: Connection) -> None:
    """In a process of its own: one step for each message, answered by what it took; None ends it."""
    torch.set_num_threads(1)
    flops = 0.0
    match way:
        case "packed" | "equal":
            share = batch(equal(lengths) if way == "equal" else lengths)
            step, flops = ours(folder, share)
        case "padded":
            step, flops = ours(folder, batch(lengths, max(lengths)))
        case "repeated" | "shared":
            step, flops = ours(folder, rollouts([GROUP]), way == "shared")
        case _:
            step = theirs(folder, lengths, len(lengths) if way == "full" else 1)
    before = reset_peak_mb()
    pipe.send(flops)
    while pipe.recv():
        wall, cpu = times(step, 1)
        pipe.send({"wall_s": wall, "cpu_s": cpu, "peak_extra_mb": peak_mb() - before, "matmul_peak": cpu_peak()})


def equal(lengths: list[int]) -> list[int]:
    """As many tokens in as many sequences, one token longer or shorter."""
    return [len(part) for part in np.array_split(np.arange(sum(lengths)), len(lengths))]


def in_turn(ways: list[str], folder: Path, lengths: list[int], rounds: int) -> dict[str, list[dict[str, float]]]:
    """What each way took in each round; a first round warms up and is not counted."""
    context, pipes, found = multiprocessing.get_context("spawn"), {}, {}
    for way in ways:
        pipes[way], far = context.Pipe()
        process = context.Process(target=work, args=(way, folder, lengths, far), daemon=True)
        process.start()
        far.close()  # so that a way that fails ends the wait for it
        found[way] = [{"flops": pipes[way].recv()}]
    for _ in range(rounds + 1):
        for way, pipe in pipes.items():
            pipe.send(True)
            found[way].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(None)
    return {way: [steps[0] | step for step in steps[2:]] for way, steps in found.items()}


def summary(steps: list[dict[str, float]], num_tokens: int) -> dict[str, float]:
    """Medians over the rounds."""
    middle = {name: median(step[name] for step in steps) for name in steps[0]}
    out = {
        "tokens_per_s": num_tokens / middle["wall_s"],
        "tokens_per_cpu_s": num_tokens / middle["cpu_s"],
        "peak_extra_mb": max(step["peak_extra_mb"] for step in steps),
    }
    if middle["flops"]:
        rates = [step["flops"] / step["cpu_s"] for step in steps]
        shares = [rate / step["matmul_peak"] for rate, step in zip(rates, steps, strict=True)]
        out |= {"gflops_per_cpu_s": median(rates) / 1e9, "share_of_matmul_peak": median(shares)}
    return out


def ratio(found: dict[str, list[dict[str, float]]], above: str, below: str, what: str) -> float:
    return median(a[what] / b[what] for a, b in zip(found[above], found[below], strict=True))


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
    _, cpu = times(lambda: a @ b, 6)
    return 2 * 768**3 / cpu


def alone(function: Callable[..., dict[str, float]], *args: object) -> dict[str, float]:
    """Called in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loss-rows", type=int, default=2048)
    options = parser.parse_args()
    lengths = long_tailed(options.tokens)
    ways, grouped = ["packed", "equal", "padded", "full", "one_by_one"], ["repeated", "shared"]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.layers)
        found = in_turn(ways, Path(folder), lengths, options.rounds)
        found |= in_turn(grouped, Path(folder), lengths, options.rounds)
    prompt, size, reply = GROUP
    num_tokens = {way: sum(lengths) if way in ways else size * (prompt + reply) for way in found}
    results = {way: summary(steps, num_tokens[way]) for way, steps in found.items()}
    loss = {way: alone(measure_loss, way, options.loss_rows) for way in ("ours", "full")}
    ratios = {f"time_packed_over_{way}": ratio(found, "packed", way, "cpu_s") for way in ways[1:]}
    ratios["time_shared_over_repeated"] = ratio(found, "shared", "repeated", "cpu_s")
    ratios["operations_shared_over_repeated"] = ratio(found, "shared", "repeated", "flops")
    for above, below in (("packed", "full"), ("shared", "repeated")):
        ratios[f"memory_{above}_over_{below}"] = results[above]["peak_extra_mb"] / results[below]["peak_extra_mb"]
    ratios["loss_memory_over_full"] = loss["ours"]["extra_mb"] / loss["full"]["extra_mb"]
    sizes = {"sequences": len(lengths), "mean": sum(lengths) / len(lengths), "max": max(lengths)}
    out = {"lengths": sizes, **results, "loss_part": {"rows": options.loss_rows, **loss}, "ratios": ratios}
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
