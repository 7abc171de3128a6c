"""Whether the model of a run is computed exactly, decided by trying it small: see check.py."""

from __future__ import annotations

from spmd_rl.behavior.cache import remembered
from spmd_rl.behavior.check import Verdict, Ways, examine
from spmd_rl.config import Config
from spmd_rl.model.causal_lm import load_config, within_rope_limit

__all__ = ["Verdict", "Ways", "examine", "model_verdict", "ways_of"]


def ways_of(config: Config) -> Ways:
    """What a run by this config does with its model; vLLM is proved by the run's own probe."""
    return Ways(
        engine=config.inference.engine == "native",
        share_prefix=config.trainer.share_prefix,
        tensor_parallel=config.topology.tensor_parallel > 1,
        context_parallel=config.topology.context_parallel > 1,
        lora=config.lora.targets if config.lora.rank else (),
    )


def model_verdict(config: Config) -> Verdict:
    """Of the model in model.path, found now or before; no sequence of a run is longer than the limit of its rope."""
    model, ways = within_rope_limit(load_config(config.model.path)), ways_of(config)
    return remembered(model, ways, lambda: examine(model, ways))
