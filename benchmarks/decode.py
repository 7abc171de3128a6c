"""Decode speed: the native engine, `transformers.generate` and the machine's limit, in tokens per second, as JSON.

    OMP_NUM_THREADS=1 python benchmarks/decode.py [--shapes tiny 10m smollm2] [--batches 1 8 32] [--repeats 3]

Random weights, fp32, prompts of 16 tokens, sampling at temperature 1; only decode steps are counted, prompts are not.
The ways take turns, repeat by repeat, and each reports its median.  The limit of a step is the longer of reading all
weights once (at the rate of this machine's matrix-vector product) and multiplying them (at the rate of its
matrix-matrix product); weights that fit the processor's caches may beat it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from spmd_rl.engine.native import NativeEngine
from spmd_rl.model import build
from spmd_rl.types import Sampling

SHAPES = {  # vocabulary, width, feed-forward width, layers, heads, key heads; decode steps per measurement
    "tiny": ((67, 128, 320, 2, 4, 2), 100),
    "10m": ((4096, 320, 864, 8, 5, 5), 20),
    "smollm2": ((49152, 576, 1536, 30, 9, 3), 4),
}
PROMPT = 16


def best_rate(work: Callable[[], object], amount: float, seconds: float = 1.0) -> float:
    """Amount per second, best call within some seconds."""
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return amount / best


def machine() -> tuple[float, float]:
    """Bytes per second of a matrix-vector product, operations per second of a matrix-matrix product."""
    large, vector, square = torch.randn(8192, 4096), torch.randn(4096), torch.randn(768, 768)
    return best_rate(lambda: large @ vector, large.nbytes), best_rate(lambda: square @ square, 2 * 768**3)


def native_step_s(engine: NativeEngine, prompts: np.ndarray, num_steps: int) -> float:
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=num_steps + 1, seed=i))
    while engine.num_waiting or engine.num_generated_tokens % len(prompts) or not engine.num_generated_tokens:
        engine.step()  # until every sequence has its first token
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    elapsed = time.perf_counter() - start
    assert engine.num_running == 0, f"{engine.num_running} sequences left"
    engine.num_generated_tokens = 0
    return elapsed / num_steps


def generate_step_s(model: torch.nn.Module, prompts: np.ndarray, num_steps: int) -> float:
    ids = torch.from_numpy(prompts).long()

    def run(num_tokens: int) -> float:
        start = time.perf_counter()
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=True, top_k=0, pad_token_id=0)
        return time.perf_counter() - start

    first = run(1)
    return (run(num_steps + 1) - first) / num_steps


def config_of(shape: str) -> LlamaConfig:
    (vocab, width, inner, layers, heads, key_heads), _ = SHAPES[shape]
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def measure(shape: str, batches: list[int], repeats: int, read_rate: float, multiply_rate: float) -> list[dict]:
    config, num_steps = config_of(shape), SHAPES[shape][1]
    plain = AutoModelForCausalLM.from_config(config).eval()
    num_parameters = sum(p.numel() for p in plain.parameters())
    engines = {}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        for name, functional in (("native", True), ("native_modules", False)):
            model = build(folder, device="cpu", dtype=torch.float32, weights=False)
            engine = NativeEngine(
                model=model, device=torch.device("cpu"), max_slots=max(batches), max_seq_len=512, functional=functional
            )
            engine.load_weights(dict(plain.named_parameters()), 0)
            engines[name] = engine
    rows = []
    for batch in batches:
        prompts = np.random.default_rng(0).integers(0, config.vocab_size, (batch, PROMPT)).astype(np.int32)
        ways = {name: partial(native_step_s, engine, prompts, num_steps) for name, engine in engines.items()}
        ways["generate"] = partial(generate_step_s, plain, prompts, num_steps)
        steps: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                steps[name].append(way())
        limit_s = max(4 * num_parameters / read_rate, 2 * num_parameters * batch / multiply_rate)
        speeds = {name: round(batch / statistics.median(times), 1) for name, times in steps.items()}
        rows.append(
            {"shape": shape, "parameters": num_parameters, "batch": batch, "limit": round(batch / limit_s, 1), **speeds}
            | {"native_of_limit": round(speeds["native"] * limit_s / batch, 2)}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    read_rate, multiply_rate = machine()
    rows = [r for s in args.shapes for r in measure(s, args.batches, args.repeats, read_rate, multiply_rate)]
    about = {
        "unit": "tokens/s",
        "threads": torch.get_num_threads(),
        "read_gb_s": round(read_rate / 1e9, 1),
        "multiply_gflop_s": round(multiply_rate / 1e9, 1),
    }
    print(json.dumps(about | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
