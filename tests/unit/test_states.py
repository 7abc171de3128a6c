"""Models whose layers carry state from token to token, in the native engine, against plain transformers."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from spmd_rl import config
from spmd_rl.engine.native import NativeEngine
from spmd_rl.engine.states import state_bytes
from spmd_rl.model.causal_lm import build
from spmd_rl.ranks.build_engine import memory_warnings
from spmd_rl.types import Completion, Sampling
from tests.unit.families import HYBRIDS, expected_logprobs, load, prompt_of, save

LENGTHS = (1, 11, 11, 40, 2, 70)


def _engine(folder: Path, version: int = 0, **settings: object) -> NativeEngine:
    model = build(folder, device="cpu", dtype=torch.float32, weights=False)
    engine = NativeEngine(model=model, device=torch.device("cpu"), **({"max_seq_len": 128, "max_slots": 4} | settings))
    engine.load_weights(_weights(folder), version)
    return engine


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load(folder, "eager").named_parameters())


def _run(engine: NativeEngine, between: Callable[[int], None] = lambda step: None) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    step = 0
    while engine.num_running or engine.num_waiting:
        done.update(engine.step())
        step += 1
        between(step)
    return done


@pytest.mark.parametrize("family", HYBRIDS)
def test_log_probs_equal_a_plain_forward(family: str, tmp_path: Path) -> None:
    """Prompts shorter than a convolution, two of one prompt, more than there are slots, joining and leaving."""
    plain = load(save(family, tmp_path), "eager")
    engine = _engine(tmp_path, prefill_budget=16)
    prompts = [prompt_of(length) for length in LENGTHS]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=5 + 4 * i, seed=i))
    done = _run(engine)
    for i, prompt in enumerate(prompts):
        expected = expected_logprobs(plain, prompt, done[i].token_ids)
        np.testing.assert_allclose(done[i].logprobs, expected, atol=1e-4)
    assert engine.num_prefill_tokens == sum(set(LENGTHS))  # the shared prompt once
    scored = engine.score(prompts[3])[1:]
    np.testing.assert_allclose(scored, expected_logprobs(plain, prompts[3][:1], prompts[3][1:]), atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "falcon_h1"])
def test_a_swap_in_mid_sequence_recomputes_states(family: str, deterministic: bool, tmp_path: Path) -> None:
    old = load(save(family, tmp_path / "old", seed=0), "eager")
    new = load(save(family, tmp_path / "new", seed=1), "eager")
    engine = _engine(tmp_path / "old", version=4, deterministic=deterministic)
    prompts = [prompt_of(9), prompt_of(9), prompt_of(30)]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=16, seed=i))

    def swap(step: int) -> None:
        if step == 6:
            engine.load_weights(_weights(tmp_path / "new"), 5)

    done = _run(engine, swap)
    for i, prompt in enumerate(prompts):
        num = int((done[i].versions == 4).sum())
        assert 0 < num < 16
        for model, part in ((old, slice(0, num)), (new, slice(num, None))):
            expected = expected_logprobs(model, prompt, done[i].token_ids)[part]
            np.testing.assert_allclose(done[i].logprobs[part], expected, atol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "bamba", "lfm2"])
def test_bfloat16_runs_and_scores_its_own_samples(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    model = build(tmp_path, device="cpu", dtype=torch.bfloat16, weights=False)
    engine = NativeEngine(model=model, device=torch.device("cpu"), max_seq_len=128)
    engine.load_weights({name: p.detach().bfloat16() for name, p in _weights(tmp_path).items()}, 0)
    prompts = [prompt_of(5), prompt_of(40)]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=20, seed=i))
    done = _run(engine)
    for i, prompt in enumerate(prompts):
        scores = engine.score(np.concatenate([prompt, done[i].token_ids]))[len(prompt) :]
        assert np.abs(scores - done[i].logprobs).mean() < 0.05


def test_kept_states_are_of_the_weights_that_made_them(tmp_path: Path) -> None:
    save("lfm2", tmp_path / "old", seed=0)
    new = load(save("lfm2", tmp_path / "new", seed=1), "eager")
    engine = _engine(tmp_path / "old", kv_on_update="keep")
    prompt = prompt_of(12)
    engine.submit(0, prompt, Sampling(max_tokens=12))

    def swap(step: int) -> None:
        if step == 5:
            engine.load_weights(_weights(tmp_path / "new"), 1)
            engine.submit(1, prompt, Sampling(max_tokens=12))

    done = _run(engine, swap)
    assert done[0].versions.tolist() == [0] * 5 + [1] * 7 and engine.num_prefill_tokens == 24
    assert np.abs(done[0].logprobs[5:] - expected_logprobs(new, prompt, done[0].token_ids)[5:]).max() > 1e-3
    np.testing.assert_allclose(done[1].logprobs, expected_logprobs(new, prompt, done[1].token_ids), atol=1e-5)


def test_deterministic_log_probs_are_bit_equal_whatever_else_runs(tmp_path: Path) -> None:
    save("qwen3_5", tmp_path)
    prompt, sampling = prompt_of(21), Sampling(max_tokens=25, seed=3)

    def run(neighbours: int) -> Completion:
        engine = _engine(tmp_path, deterministic=True)
        for i in range(1, neighbours + 1):
            engine.submit(i, prompt if i == 1 else prompt_of(5 * i), Sampling(max_tokens=6 * i, seed=i))
        engine.submit(0, prompt, sampling)
        return _run(engine)[0]

    first, again = run(0), run(3)
    assert again.token_ids.tolist() == first.token_ids.tolist()
    assert again.logprobs.tobytes() == first.logprobs.tobytes()


@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        ("lfm2", 2 * 32 * 3),  # two convolutions of 32 channels that see 3 tokens
        ("qwen3_5", 2 * ((2 * 16 + 32) * 4 + 4 * 8 * 8)),  # two layers: keys, queries, values over 4 tokens; 4 heads
        ("bamba", 2 * ((64 + 2 * 8) * 4 + 8 * 8 * 8)),  # two layers: inputs, B and C over 4 tokens; 8 heads
    ],
)
def test_states_count_as_memory(family: str, numbers: int, tmp_path: Path) -> None:
    save(family, tmp_path)
    model = build(tmp_path, device="cpu", dtype=torch.float32, weights=False)
    assert state_bytes(model, torch.device("cpu")) == 4 * numbers
    token_bytes = 2 * 2 * model.config.head_dim * 4 if family == "qwen3_5" else 2 * 2 * 8 * 4  # one layer attends
    state = -(-4 * numbers // token_bytes)
    least = 3 * 60 + 4 + 3 * state  # a row of 64 beside a prompt that is kept and one that is computed, with states
    with pytest.raises(ValueError, match=rf"max_seq_len = 60 needs room for {least}"):
        _engine(tmp_path, max_seq_len=60, kv_cache_bytes=(least - 1) * token_bytes)
    engine = _engine(tmp_path, max_seq_len=60, kv_cache_bytes=(least + 64 + state) * token_bytes)
    for i in range(5):
        engine.submit(i, prompt_of(5 + i), Sampling(max_tokens=6, seed=i))
    engine.step()
    assert (engine.num_running, engine.num_lacking_kv) == (2, 2)
    held = [s for _, s in engine._cache.slabs()[0].held(engine._running[0], 1).items()]
    assert len(held) == 1  # layers without attention hold no keys
    assert sorted(_run(engine)) == [0, 1, 2, 3, 4]


def test_states_that_outgrow_a_device_are_warned_of(tmp_path: Path) -> None:
    save("lfm2", tmp_path)
    settings = [f"model.path={tmp_path}", "inference.max_slots=64", "inference.max_seq_len=2048"]
    loaded = config.load(Path(__file__).parents[2] / "configs" / "tiny_cpu.toml", settings)
    keys, states = 2048 * 2 * 2 * 8 * 2, 2 * 32 * 3 * 2  # bytes of a row in bfloat16: one layer attends, two convolve
    device = torch.device("cuda", 0)
    assert memory_warnings(loaded, device, 64 * (keys + states)) == []
    (line,) = memory_warnings(loaded, device, 64 * (keys + states) - 1)
    assert "keys and values and states may take" in line


def test_a_cancelled_sequence_leaves_the_others_their_states(tmp_path: Path) -> None:
    plain = load(save("granitemoehybrid", tmp_path), "eager")
    engine = _engine(tmp_path)
    prompts = [prompt_of(length) for length in (4, 9, 13)]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=15, seed=i))
    done = _run(engine, lambda step: engine.cancel(1) if step == 6 else None)
    assert done[1].finish_reason == "cancelled"
    for i in (0, 2):
        expected = expected_logprobs(plain, prompts[i], done[i].token_ids)
        np.testing.assert_allclose(done[i].logprobs, expected, atol=1e-4)


def test_time_steps_are_clamped_as_in_a_plain_forward(tmp_path: Path) -> None:
    """The form of Mamba 2 for one token in transformers 5.24 leaves the limit out."""
    torch.manual_seed(0)
    clamped = type(HYBRIDS["bamba"])(**HYBRIDS["bamba"].to_dict() | {"time_step_limit": (0.5, 1.0)})
    AutoModelForCausalLM.from_config(clamped).save_pretrained(tmp_path)
    plain, prompt = load(tmp_path, "eager"), prompt_of(10)
    engine = _engine(tmp_path)
    engine.submit(0, prompt, Sampling(max_tokens=20, seed=1))
    done = _run(engine)[0]
    np.testing.assert_allclose(done.logprobs, expected_logprobs(plain, prompt, done.token_ids), atol=1e-5)
