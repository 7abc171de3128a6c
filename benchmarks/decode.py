"""Decode speed: native engine, `transformers.generate`, vLLM and the machine's limit, in tokens per second, as JSON.

    OMP_NUM_THREADS=1 python benchmarks/decode.py [--quick] [--vllm-python PATH] [--shapes 10m smollm2] [--repeats 3]
                      [--device cuda --dtype bfloat16]

Random weights, prompts of 16 tokens, sampling at temperature 1.  `rows`: decode steps at fixed batches, native
with 1 or 32 slots; prompts are not counted.  `mix`: requests of lognormal lengths, all there at the start, on 32 slots;
`generate` computes them 32 at a time, padded to the longest, and only tokens that were asked for count.  The ways take
turns, repeat by repeat, and each reports its median.  The limit of a step is the longer of reading all weights once (at
the rate of this machine's matrix-vector product) and multiplying them (at the rate of its matrix-matrix product),
measured in the same turns, the best counts; weights that fit the processor's caches may beat it.  vLLM runs in a
process of the Python given, on a CPU in float32.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from spmd_rl.engine.native import NativeEngine
from spmd_rl.model.causal_lm import build
from spmd_rl.types import Sampling

SHAPES = {  # vocabulary, width, feed-forward width, layers, heads, key heads; decode steps per measurement
    "10m": ((4096, 320, 864, 8, 5, 5), 30),
    "smollm2": ((49152, 576, 1536, 30, 9, 3), 5),
}
PROMPT, SLOTS = 16, 32
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 16, 1.0, 256  # of the mix: 26 tokens a request, 120 the longest of 32


def best_rate(work: Callable[[], object], amount: float, device: torch.device, seconds: float = 0.5) -> float:
    """Amount per second, best call within some seconds."""
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = now(device)
        work()
        best = min(best, now(device) - start)
    return amount / best


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def machine(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of a matrix-vector product, operations per second of a matrix-matrix product."""
    width, size = (8192, 8192) if device.type == "cuda" else (4096, 768)
    shapes = ((8192, width), (width,), (size, size))
    large, vector, square = (torch.randn(*shape, device=device, dtype=dtype) for shape in shapes)
    vectors, squares = (lambda: large @ vector), (lambda: square @ square)
    return best_rate(vectors, large.nbytes, device), best_rate(squares, 2 * size**3, device)


def config_of(shape: str) -> LlamaConfig:
    (vocab, width, inner, layers, heads, key_heads), _ = SHAPES[shape]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
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
        dtype="float32",
    )


class Contest:
    """The ways to decode one random model."""

    def __init__(
        self, shape: str, folder: str, vllm_python: str | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        config, self.num_steps = config_of(shape), SHAPES[shape][1]
        self.device, self.dtype = device, dtype
        self.vocab = config.vocab_size
        config.save_pretrained(folder)
        self._plain = AutoModelForCausalLM.from_config(config).to(device, dtype).eval()
        self.num_parameters = sum(p.numel() for p in self._plain.parameters())
        model = build(folder, device=device, dtype=dtype, weights=False)
        self._engines = {
            slots: NativeEngine(model=model, device=device, max_slots=slots, max_seq_len=512) for slots in (1, SLOTS)
        }
        for engine in self._engines.values():
            engine.load_weights(dict(self._plain.named_parameters()), 0)
        self.steps: dict[str, Callable[[int], float]] = {}  # seconds of a decode step at a batch
        self.steps |= {"native": self._native_step_s, "generate": self._generate_step_s}
        if vllm_python:
            script = Path(__file__).with_name("vllm_decode.py")
            self._vllm = subprocess.Popen(
                [vllm_python, str(script), folder, str(SLOTS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self.steps["vllm"] = self._vllm_step_s

    def close(self) -> None:
        if "vllm" in self.steps:
            self._vllm.stdin.close()
            self._vllm.wait()

    def mix(self, lengths: np.ndarray) -> dict[str, Callable[[], float]]:
        """Seconds for requests of these numbers of new tokens."""
        return {"native": partial(self._native_mix_s, lengths), "generate": partial(self._generate_mix_s, lengths)}

    def _prompts(self, num: int) -> np.ndarray:
        return np.random.default_rng(0).integers(0, self.vocab, (num, PROMPT)).astype(np.int32)

    def _native_step_s(self, batch: int) -> float:
        engine = self._engines[1 if batch == 1 else SLOTS]
        for i, prompt in enumerate(self._prompts(batch)):
            engine.submit(i, prompt, Sampling(max_tokens=self.num_steps + 1, seed=i))
        before = engine.num_generated_tokens
        while engine.num_generated_tokens < before + batch:
            engine.step()  # until every sequence has its first token
        assert engine.num_generated_tokens == before + batch, "some are ahead"
        start = now(self.device)
        for _ in range(self.num_steps):
            engine.step()
        elapsed = now(self.device) - start
        assert engine.num_running == 0, f"{engine.num_running} sequences left"
        return elapsed / self.num_steps

    def _native_mix_s(self, lengths: np.ndarray) -> float:
        engine, start = self._engines[SLOTS], now(self.device)
        for i, (prompt, length) in enumerate(zip(self._prompts(len(lengths)), lengths, strict=True)):
            engine.submit(i, prompt, Sampling(max_tokens=int(length), seed=i))
        while engine.num_running or engine.num_waiting:
            engine.step()
        return now(self.device) - start

    def _generate(self, prompts: np.ndarray, num_tokens: int) -> None:
        ids = torch.from_numpy(prompts).long().to(self.device)
        mask = torch.ones_like(ids)
        self._plain.generate(
            ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=True, top_k=0, pad_token_id=0
        )

    def _generate_step_s(self, batch: int) -> float:
        prompts, times = self._prompts(batch), []
        for num_tokens in (1, self.num_steps + 1):
            start = now(self.device)
            self._generate(prompts, num_tokens)
            times.append(now(self.device) - start)
        return (times[1] - times[0]) / self.num_steps

    def _generate_mix_s(self, lengths: np.ndarray) -> float:
        prompts, start = self._prompts(len(lengths)), now(self.device)
        for first in range(0, len(lengths), SLOTS):
            self._generate(prompts[first : first + SLOTS], int(lengths[first : first + SLOTS].max()))
        return now(self.device) - start

    def _vllm_step_s(self, batch: int) -> float:
        print(batch, self.num_steps, file=self._vllm.stdin, flush=True)
        return float(self._vllm.stdout.readline())


def measure(contest: Contest, batches: list[int], repeats: int) -> list[dict[str, float]]:
    times = {(batch, name): [] for batch in batches for name in contest.steps}
    rates = []
    for batch, name in times:
        contest.steps[name](batch)  # code and memory that only the first call needs
    for _ in range(repeats):
        rates.append(machine(contest.device, contest.dtype))
        for batch in batches:
            for name, way in contest.steps.items():
                times[batch, name].append(way(batch))
    read_rate, multiply_rate = (max(rate) for rate in zip(*rates, strict=True))
    rows = []
    for batch in batches:
        num_bytes, operations = contest.dtype.itemsize * contest.num_parameters, 2 * contest.num_parameters * batch
        limit_s = max(num_bytes / read_rate, operations / multiply_rate)
        native = batch / statistics.median(times[batch, "native"])
        others = {name: batch / statistics.median(times[batch, name]) for name in contest.steps if name != "native"}
        others["limit"] = batch / limit_s
        rows.append(
            {"batch": batch, "native": round(native, 1)}
            | {name: round(speed, 1) for name, speed in others.items()}
            | {f"native_of_{name}": round(native / speed, 2) for name, speed in others.items()}
            | {"read_gb_s": round(read_rate / 1e9, 1), "multiply_gflop_s": round(multiply_rate / 1e9, 1)}
        )
    return rows


def measure_mix(contest: Contest, num_requests: int, repeats: int) -> dict[str, float]:
    draws = np.random.default_rng(0).lognormal(np.log(MEDIAN_TOKENS), SIGMA, num_requests)
    lengths = np.clip(draws.round(), 1, MOST_TOKENS).astype(int)
    times = {name: [] for name in contest.mix(lengths)}
    for _ in range(repeats):
        for name, way in contest.mix(lengths).items():
            times[name].append(way())
    speeds = {name: lengths.sum() / statistics.median(seconds) for name, seconds in times.items()}
    return (
        {"requests": num_requests, "slots": SLOTS, "tokens": int(lengths.sum()), "longest": int(lengths.max())}
        | {name: round(speed, 1) for name, speed in speeds.items()}
        | {"native_of_generate": round(speeds["native"] / speeds["generate"], 2)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repeat, 64 requests in the mix")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, choices=range(1, SLOTS + 1), default=[1, 8, 32], metavar="N")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm-python", help="of an environment with vLLM's CPU build")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    if args.vllm_python and (args.device, args.dtype) != ("cpu", "float32"):
        parser.error("--vllm-python measures on a CPU in float32 only")
    repeats, num_requests = (1, 64) if args.quick else (args.repeats, 256)
    out: dict[str, object] = {
        "unit": "tokens/s",
        "device": args.device,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "rows": [],
        "mix": [],
    }
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            contest = Contest(shape, folder, args.vllm_python, torch.device(args.device), getattr(torch, args.dtype))
            out["rows"] += [
                {"shape": shape, "parameters": contest.num_parameters} | row
                for row in measure(contest, args.batches, repeats)
            ]
            contest.close()
            if shape == "10m":
                out["mix"].append({"shape": shape} | measure_mix(contest, num_requests, min(repeats, 2)))
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
