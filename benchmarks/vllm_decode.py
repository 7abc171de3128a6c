"""vLLM's side of decode.py, in the Python that has vLLM: measures when told to.

    python benchmarks/vllm_decode.py MODEL_FOLDER MAX_SLOTS < "batch steps" lines > seconds per decode step, one a line

Random weights, float32, sampling at temperature 1 with the token's log-prob; prompts are not counted.
"""

import os
import sys
import time

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1"}

import numpy as np
from vllm import LLM, SamplingParams

PROMPT = 16


def main() -> None:
    folder, max_slots = sys.argv[1], int(sys.argv[2])
    replies, sys.stdout = sys.stdout, sys.stderr  # vLLM prints too
    engine = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=max_slots,
        kv_cache_memory_bytes=1 << 30,
    )
    vocab = engine.llm_engine.model_config.get_vocab_size()

    def run(prompts: list[dict[str, list[int]]], num_tokens: int) -> float:
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False, logprobs=0)
        start = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    for line in sys.stdin:
        batch, num_steps = map(int, line.split())
        ids = np.random.default_rng(0).integers(0, vocab, (batch, PROMPT))
        prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
        print((run(prompts, num_steps + 1) - run(prompts, 1)) / num_steps, file=replies, flush=True)


if __name__ == "__main__":
    main()
