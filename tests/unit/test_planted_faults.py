"""Faults of an engine or a trainer that no checksum shows, planted one at a time: the probe finds each and says where.

The table of what is measured is printed, and stands in docs/weights.md.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from spmd_rl.engine.native import NativeEngine
from spmd_rl.metrics.probe import MOST_DIFFERENCE, assert_agreed
from spmd_rl.model.causal_lm import build
from spmd_rl.types import Disagreement, Sampling
from tests import probing
from tests.unit.families import load, save
from tests.unit.test_trainer import trainer

MEASURES = ("probe/sampled_max", "probe/sampled_kl", "probe/max_difference", "probe/packed_max")
WEIGHTS, KEEPS, LEAKS = "it does not compute with the weights", "what it keeps of running sequences", "see each other"
LENGTH = 128
FAMILIES = ("llama", "mistral", "lfm2", "qwen3_5", "qwen3_moe")


def engine(folder: Path, kind: str = "native", **settings: object) -> NativeEngine:
    model = build(folder, device="cpu", dtype=torch.float32, weights=False)
    settings = {"max_slots": 8, "max_seq_len": LENGTH, "prefill_budget": 32, "functional": kind == "native"} | settings
    return NativeEngine(model=model, device=torch.device("cpu"), **settings)


def other_router(of: NativeEngine) -> None:
    """A token's choices are those of another router: the experts' own weights are right."""
    load = of.load_weights

    def rolled(tensors: probing.Weights, version: int) -> None:
        gates = {name: tensor.roll(1, 0) for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")}
        load({**tensors, **gates}, version)

    of.load_weights = rolled


def other_config(folder: Path, to: Path, **changed: object) -> Path:
    config = AutoConfig.from_pretrained(folder)
    for name, value in changed.items():
        setattr(config, name, value)
    config.save_pretrained(to)
    return to


def stale_keys(of: NativeEngine) -> None:
    of._recompute_all = lambda started: None


def leaked_state(of: NativeEngine) -> None:
    """All sequences begin with the state of the first."""
    start, left = of._cache.start, []

    def leaking(sequence, prefix):
        start(sequence, prefix)
        left.append(sequence.states.copy())
        sequence.states = left[0].copy()

    of._cache.start = leaking


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Two versions of each."""
    root = tmp_path_factory.mktemp("families")
    return {name: [save(name, root / f"{name}{seed}", seed=seed) for seed in range(2)] for name in FAMILIES}


def measure(folders: list[Path], engine: NativeEngine, policy, **settings: object) -> list[dict[str, float]]:
    versions = [{name: p.detach() for name, p in load(folder).named_parameters()} for folder in folders]
    return probing.probes(engine, policy, versions, max_seq_len=LENGTH, **settings)


@pytest.mark.parametrize(
    ("family", "kind", "trains"),
    [
        ("llama", "native", {"share_prefix": True}),
        ("llama", "native", {"num_minibatches": 2}),
        ("mistral", "modules", {"micro_batch_tokens": 40}),
        ("lfm2", "modules", {"pack": False}),
        ("qwen3_5", "modules", {"pack": False}),
        ("qwen3_moe", "modules", {}),
    ],
)
@pytest.mark.parametrize("recomputes", [True, False])
def test_a_sound_engine_samples_what_the_trainer_trains(folders, family, kind, trains, recomputes):
    policy = trainer(folders[family][0], temperature=0.8, **trains)
    sound = engine(folders[family][0], kind, kv_on_update="recompute" if recomputes else "keep")
    full, small = measure(folders[family], sound, policy, recomputes=recomputes)
    assert full["probe/tokens"] > 100 and small["probe/tokens"] >= 16
    for values in (full, small):
        assert values["probe/sampled_max"] < MOST_DIFFERENCE / 10 and values["probe/packed_max"] < 1e-5
    assert ("probe/kept_kl" in small) == (not recomputes) and small.get("probe/kept_kl", 1.0) > 0.01
    assert "probe/kept_kl" not in full
    assert full.get("probe/flips") == small.get("probe/flips") == (0 if family == "qwen3_moe" else None)


def test_planted_faults_are_found_and_the_likely_side_is_named(folders, tmp_path, capsys):
    llama, mistral, lfm2 = folders["llama"], folders["mistral"], folders["lfm2"]
    rope = {**AutoConfig.from_pretrained(llama[0]).rope_parameters, "factor": 2.0}
    unwindowed = other_config(mistral[0], tmp_path / "unwindowed", sliding_window=None)
    rescaled = other_config(llama[0], tmp_path / "rescaled", rope_parameters=rope)
    faults = {
        "weights one version behind": (llama, probing.one_version_behind, {}, WEIGHTS),
        "two layers swapped": (llama, probing.layers_swapped, {}, WEIGHTS),
        "stale keys and values after a swap": (llama, stale_keys, {}, KEEPS),
        "temperature not applied": (llama, None, {"sampling": Sampling(max_tokens=8, temperature=1.0)}, KEEPS),
        "another rope scaling": (llama, None, {"config": rescaled}, WEIGHTS),
        "a dropped sliding window": (mistral, None, {"config": unwindowed}, WEIGHTS),
        "a state that another sequence left": (lfm2, leaked_state, {"pack": False}, KEEPS),
        "a stale state after a swap": (lfm2, stale_keys, {"pack": False}, KEEPS),
        "another router": (folders["qwen3_moe"], other_router, {}, WEIGHTS),
        "a packed sequence sees the one before": (llama, None, {"leaks": True}, LEAKS),
    }
    rows = {}
    for name, (family, plant, given, cause) in faults.items():
        given = dict(given)
        policy = trainer(family[0], temperature=0.8, pack=given.pop("pack", True))
        if given.pop("leaks", False):
            probing.packed_without_borders(policy)
        faulty = engine(given.pop("config", family[0]))
        if plant is not None:
            plant(faulty)
        full, small = measure(family, faulty, policy, **given)
        assert small["probe/sampled_max"] > MOST_DIFFERENCE, name
        assert (full["probe/sampled_max"] > MOST_DIFFERENCE) == (plant is not probing.one_version_behind), name
        rows[name] = small
        assert (small.get("probe/flips", 0) > 0) == (plant is other_router), name
        with pytest.raises(Disagreement, match=cause):
            assert_agreed(rows[name], rank=0, version=1, limits=probing.EXACT)
    with capsys.disabled():
        print("\n" + probing.table(rows, MEASURES))
