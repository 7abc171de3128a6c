"""Faults of vLLM's weights, cache and sampling, planted one at a time, and of a trainer that trains what it samples.

As tests/unit/test_planted_faults.py, whose table this one stands beside in docs/weights.md.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from spmd_rl.engine.vllm import VllmEngine
from spmd_rl.metrics.probe import MOST_DIFFERENCE, assert_agreed
from spmd_rl.model.causal_lm import build
from spmd_rl.types import Disagreement, Sampling
from spmd_rl.weights.layout import manifest
from tests import probing
from tests.unit.families import ROPE, SHAPE
from tests.unit.test_planted_faults import KEEPS, LEAKS, MEASURES, WEIGHTS
from tests.unit.test_trainer import trainer

LENGTH = 128
SIZE = SHAPE | {"hidden_size": 128, "intermediate_size": 160}  # heads of 32, the least that vLLM takes on CPUs
CONFIGS = {
    "llama": LlamaConfig(**SIZE, rope_parameters=ROPE),
    "mistral": MistralConfig(**SIZE, sliding_window=7),
    "rescaled": LlamaConfig(**SIZE, rope_parameters=ROPE | {"factor": 2.0}),
    "unwindowed": MistralConfig(**SIZE, sliding_window=None),
}
Weights = list[dict[str, torch.Tensor]]


def stale_keys(engine: VllmEngine) -> None:
    engine._engine.reset_prefix_cache = lambda reset_running_requests: True


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for each config, with weights."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    yield root
    dist.destroy_process_group()


def engine_of(folder: Path, kv_on_update: str = "recompute") -> VllmEngine:
    """Closed by the thread that a probe runs it in: there is one at a time."""
    model = build(folder, device="cpu", dtype=torch.float32, weights=False)
    return VllmEngine(
        folder=folder,
        config=model.config,
        specs=manifest(model, dtype=torch.float32),
        group=dist.group.WORLD,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_slots=8,
        max_seq_len=LENGTH,
        kv_on_update=kv_on_update,
    )


def versions_of(name: str) -> Weights:
    versions = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
        versions.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    return versions


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_a_sound_engine_samples_what_the_trainer_trains(root, kv_on_update, capsys):
    engine = engine_of(root / "llama", kv_on_update)
    policy = trainer(root / "llama", share_prefix=True, temperature=0.8)
    recomputes = kv_on_update == "recompute"
    full, small = probing.probes(engine, policy, versions_of("llama"), max_seq_len=LENGTH, recomputes=recomputes)
    assert full["probe/tokens"] > 100 and small["probe/tokens"] >= 16
    assert max(full["probe/sampled_max"], small["probe/sampled_max"]) < MOST_DIFFERENCE / 10
    assert ("probe/kept_kl" in small) == (not recomputes)
    with capsys.disabled():
        print("\n" + probing.table({"none, at the start": full, "none, later": small}, MEASURES))


FAULTS = {  # by model of the trainer, model of the engine: what is planted in the engine, and what is told
    ("llama", "llama"): {
        "weights one version behind": (probing.one_version_behind, {}, WEIGHTS),
        "two layers swapped": (probing.layers_swapped, {}, WEIGHTS),
        "stale keys and values after a swap": (stale_keys, {}, KEEPS),
        "temperature not applied": (None, {"sampling": Sampling(max_tokens=8, temperature=1.0)}, KEEPS),
        "a packed sequence sees the one before": (None, {}, LEAKS),
    },
    ("llama", "rescaled"): {"another rope scaling": (None, {}, WEIGHTS)},
    ("mistral", "unwindowed"): {"a dropped sliding window": (None, {}, WEIGHTS)},
}


def test_planted_faults_are_found_and_the_likely_side_is_named(root, capsys):
    rows = {}
    for (trained, sampling), faults in FAULTS.items():
        for name, (plant, given, cause) in faults.items():
            engine, policy = engine_of(root / sampling), trainer(root / trained, temperature=0.8)
            if cause == LEAKS:
                probing.packed_without_borders(policy)
            if plant is not None:
                plant(engine)
            full, small = probing.probes(engine, policy, versions_of(trained), max_seq_len=LENGTH, **given)
            assert small["probe/sampled_max"] > MOST_DIFFERENCE, name
            assert (full["probe/sampled_max"] > MOST_DIFFERENCE) == (plant is not probing.one_version_behind), name
            rows[name] = small
            with pytest.raises(Disagreement, match=cause):
                assert_agreed(small, rank=0, version=1, limits=probing.EXACT)
    with capsys.disabled():
        print("\n" + probing.table(rows, MEASURES))
