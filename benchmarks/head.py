"""What rounding logits to bfloat16 does to log-probs, in nats: `model.head_dtype` = "model" against "float32".

    python -m benchmarks.head FOLDER [--tokens 1024]

Hidden states of the model in FOLDER in bfloat16, over this repository's README; for each position a token sampled from
the exact distribution.  Its log-prob by each head is compared with that of products in float64.  Prints JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from spmd_rl.model.causal_lm import build, head, head_dtype, hidden_states
from spmd_rl.model.logprobs import token_logprobs
from spmd_rl.model.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    model = build(options.folder, device="cpu", dtype=torch.bfloat16, weights=True)
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    ids = torch.tensor(Tokenizer(options.folder).encode(text)[: options.tokens])
    found = {}
    with torch.no_grad():
        hidden = hidden_states(model, ids, [0, len(ids)])
        exact = head(model, torch.float64).logits(hidden).log_softmax(-1)
        sampled = torch.multinomial(exact.exp(), 1, generator=torch.Generator().manual_seed(0))
        for name in ("model", "float32"):
            logprobs, _ = token_logprobs(hidden, head(model, head_dtype(name)), sampled[:, 0])
            away = (logprobs.double() - exact.gather(1, sampled)[:, 0]).abs()
            found[name] = {"mean": float(away.mean()), "largest": float(away.max())}
    print(json.dumps({"tokens": len(ids), "nats": found}, indent=1))


if __name__ == "__main__":
    main()
