"""The native engine against plain transformers: every token's log-prob, greedy texts, swaps, neighbours."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd_rl.engine.native import NativeEngine
from spmd_rl.engine.sampling import Uniforms, sample
from spmd_rl.model.causal_lm import build
from spmd_rl.types import Completion, Sampling
from tests.unit.families import CONFIGS, OTHERS, VOCAB, WIDE, expected_logprobs, load, prompt_of, save

Weights = Mapping[str, torch.Tensor]


def _engine(folder: Path, weights: Weights | None = None, version: int = 0, **settings: object) -> NativeEngine:
    model = build(folder, device="cpu", dtype=torch.float32, weights=False)
    engine = NativeEngine(model=model, device=torch.device("cpu"), **({"max_seq_len": 256} | settings))
    engine.load_weights(_weights(folder) if weights is None else weights, version)
    return engine


def _weights(folder: Path) -> Weights:
    return dict(load(folder).named_parameters())


def _run(engine: NativeEngine, between: Callable[[int], None] = lambda step: None) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    step = 0
    while engine.num_running or engine.num_waiting:
        done.update(engine.step())
        step += 1
        between(step)
    return done


@pytest.mark.parametrize("functional", [True, False])
@pytest.mark.parametrize("family", CONFIGS | WIDE)
def test_log_probs_equal_a_plain_forward(family: str, functional: bool, tmp_path: Path) -> None:
    plain = load(save(family, tmp_path))
    engine = _engine(tmp_path, functional=functional, max_slots=4, prefill_budget=16)
    shared = prompt_of(11)
    prompts = [prompt_of(1), shared, shared, prompt_of(40), shared, prompt_of(70), prompt_of(2)]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=5 + 13 * i, seed=i, temperature=0.8 if i % 2 else 1.0))
    done = _run(engine)
    for i, prompt in enumerate(prompts):
        expected = expected_logprobs(plain, prompt, done[i].token_ids, 0.8 if i % 2 else 1.0)
        assert len(expected) == 5 + 13 * i and done[i].finish_reason == "length"
        np.testing.assert_allclose(done[i].logprobs, expected, atol=1e-5)
    assert len({done[i].token_ids[:5].tobytes() for i in (1, 2, 4)}) == 3  # one prompt, three seeds
    assert engine.num_generated_tokens == sum(5 + 13 * i for i in range(7))
    assert engine.num_prefill_tokens == 1 + 11 + 40 + 70 + 2  # the shared prompt once


@pytest.mark.parametrize("family", OTHERS)
def test_log_probs_of_an_architecture_that_is_not_known_equal_a_plain_forward(family: str, tmp_path: Path) -> None:
    plain = load(save(family, tmp_path), attention="eager")
    engine = _engine(tmp_path, dict(plain.named_parameters()), max_slots=4, prefill_budget=16)
    prompts = [prompt_of(1), prompt_of(11), prompt_of(11), prompt_of(40)]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=10 + 10 * i, seed=i))
    done = _run(engine)
    for i, prompt in enumerate(prompts):
        np.testing.assert_allclose(done[i].logprobs, expected_logprobs(plain, prompt, done[i].token_ids), atol=1e-5)


@pytest.mark.parametrize("family", CONFIGS | WIDE)
def test_greedy_equals_generate(family: str, tmp_path: Path) -> None:
    plain = load(save(family, tmp_path))
    engine = _engine(tmp_path)
    prompts = [prompt_of(n) for n in (1, 9, 30)]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=25, temperature=0))
    done = _run(engine)
    for i, prompt in enumerate(prompts):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        theirs = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=25, do_sample=False, pad_token_id=0
        )
        assert done[i].token_ids.tolist() == theirs[0, len(prompt) :].tolist()
        np.testing.assert_allclose(done[i].logprobs, expected_logprobs(plain, prompt, done[i].token_ids), atol=1e-5)


@pytest.mark.parametrize("functional", [True, False])
def test_bfloat16_runs_and_scores_its_own_samples(functional: bool, tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    weights = {name: p.detach().bfloat16() for name, p in _weights(tmp_path).items()}
    model = build(tmp_path, device="cpu", dtype=torch.bfloat16, weights=False)
    engine = NativeEngine(model=model, device=torch.device("cpu"), max_seq_len=256, functional=functional)
    engine.load_weights(weights, 0)
    prompts = [prompt_of(5), prompt_of(70)]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=20, seed=i))
    done = _run(engine)
    for i, prompt in enumerate(prompts):
        scores = engine.score(np.concatenate([prompt, done[i].token_ids]))[len(prompt) :]
        assert np.abs(scores - done[i].logprobs).mean() < 0.05


def test_weights_that_are_no_numbers_are_named_and_nothing_is_sampled(tmp_path: Path) -> None:
    weights = _weights(save("smollm2", tmp_path))
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    engine = _engine(tmp_path, weights)
    engine.submit(0, prompt_of(5), Sampling(max_tokens=3))
    with pytest.raises(RuntimeError, match="logits are not finite"):
        engine.step()


def test_score_equals_a_plain_forward(tmp_path: Path) -> None:
    plain = load(save("gemma3", tmp_path))
    tokens = prompt_of(50)
    scores = _engine(tmp_path).score(tokens)
    assert scores[0] == 0 and scores.dtype == np.float32
    np.testing.assert_allclose(scores[1:], expected_logprobs(plain, tokens[:1], tokens[1:]), atol=1e-5)
    assert _engine(tmp_path).score(tokens[:1]).tolist() == [0.0]
    with pytest.raises(ValueError, match="50 tokens, max_seq_len is 49"):
        _engine(tmp_path, max_seq_len=49).score(tokens)


def test_neighbours_do_not_change_tokens(tmp_path: Path) -> None:
    save("qwen3", tmp_path)
    prompt, sampling = prompt_of(20), Sampling(max_tokens=40, seed=7, temperature=0.9, top_p=0.9, top_k=20)
    alone = _engine(tmp_path)
    alone.submit(0, prompt, sampling)
    expected = _run(alone)[0]
    crowded = _engine(tmp_path, prefill_budget=24)
    for i in range(1, 5):
        crowded.submit(i, prompt_of(10 * i), Sampling(max_tokens=7 * i, seed=i))

    def join_late(step: int) -> None:
        if step == 3:
            crowded.submit(0, prompt, sampling)
        if step == 9:
            crowded.submit(9, prompt_of(90), Sampling(max_tokens=5))

    got = _run(crowded, join_late)
    assert sorted(got) == [0, 1, 2, 3, 4, 9]
    assert got[0].token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(got[0].logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "wide"])
def test_deterministic_log_probs_are_bit_equal_whatever_else_runs(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    prompt, sampling = prompt_of(50), Sampling(max_tokens=90, seed=3)

    def run(neighbours: int, wait: int) -> Completion:
        engine = _engine(tmp_path, deterministic=True, prefill_budget=32, max_slots=6)
        for i in range(1, neighbours + 1):
            engine.submit(i, prompt if i == 1 else prompt_of(5 * i), Sampling(max_tokens=9 * i, seed=i))
        for _ in range(wait):
            engine.step()
        engine.submit(0, prompt, sampling)
        return _run(engine)[0]

    first = run(0, 0)
    for neighbours, wait in ((1, 0), (5, 4), (7, 2)):
        again = run(neighbours, wait)
        assert again.token_ids.tolist() == first.token_ids.tolist()
        assert again.logprobs.tobytes() == first.logprobs.tobytes()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_swap_in_mid_sequence_recomputes_what_was_held(deterministic: bool, tmp_path: Path) -> None:
    old = load(save("qwen3", tmp_path / "old", seed=0))
    new = load(save("qwen3", tmp_path / "new", seed=1))
    engine = _engine(tmp_path / "old", version=4, max_slots=4, prefill_budget=16, deterministic=deterministic)
    shared = prompt_of(12)
    prompts = [prompt_of(30), shared, shared, prompt_of(60), prompt_of(3)]  # the fourth is computed across the swap
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=30, seed=i))
    num_old: dict[int, int] = {}

    def swap(step: int) -> None:
        if step == 6:
            num_old.update({i: len(s.logprobs) for i, s in engine._running.items()})
            engine.load_weights(dict(new.named_parameters()), 5)

    done = _run(engine, swap)
    assert num_old[3] < 3 < min(num_old[i] for i in (1, 2))
    for i, prompt in enumerate(prompts):
        n, got = num_old.get(i, 0), done[i]
        assert got.versions.tolist() == [4] * n + [5] * (30 - n)
        before, after = (expected_logprobs(model, prompt, got.token_ids) for model in (old, new))
        np.testing.assert_allclose(got.logprobs[:n], before[:n], atol=1e-5)
        np.testing.assert_allclose(got.logprobs[n:], after[n:], atol=1e-5)
        assert np.abs(got.logprobs[n:] - before[n:]).max() > 0.5


@pytest.mark.parametrize("family", ["smollm2", "wide", "gemma3"])
def test_weights_prepared_beside_steps_change_nothing_until_they_are_loaded(family: str, tmp_path: Path) -> None:
    models = [load(save(family, tmp_path / str(seed), seed=seed)) for seed in range(3)]
    versions = [dict(model.named_parameters()) for model in models]
    engine, prompt = _engine(tmp_path / "0", versions[0]), prompt_of(20)
    engine.submit(0, prompt, Sampling(max_tokens=30))

    def between(step: int) -> None:
        if step == 5:
            engine.prepare(versions[1], 1)
        if step == 10:
            engine.load_weights(versions[1], 1)
            engine.prepare(versions[0], 2)
        if step == 20:
            engine.load_weights(versions[2], 2)  # others than those prepared

    done = _run(engine, between)[0]
    assert (np.diff(done.versions) >= 0).all() and set(done.versions.tolist()) == {0, 1, 2}
    expected = np.stack([expected_logprobs(model, prompt, done.token_ids) for model in models])
    np.testing.assert_allclose(done.logprobs, expected[done.versions, np.arange(30)], atol=1e-5)
    with pytest.raises(ValueError, match=r"model.norm.weight: \(31,\)"):
        engine.prepare({**versions[0], "model.norm.weight": torch.ones(31)}, 3)


def test_swaps_at_every_step_still_stamp_and_compute_each_token_by_its_version(tmp_path: Path) -> None:
    models = [load(save("llama", tmp_path / str(seed), seed=seed)) for seed in range(3)]
    engine = _engine(tmp_path / "0", prefill_budget=16)
    prompts = [prompt_of(25), prompt_of(5)]
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, Sampling(max_tokens=12, seed=i))

    def swap(step: int) -> None:
        if step % 4 == 0:  # recomputing 25 to 37 tokens takes 3 steps
            engine.load_weights(dict(models[step // 4 % 3].named_parameters()), step // 4)

    done = _run(engine, swap)
    for i, prompt in enumerate(prompts):
        by_version = [expected_logprobs(model, prompt, done[i].token_ids) for model in models]
        expected = [by_version[v % 3][t] for t, v in enumerate(done[i].versions)]
        np.testing.assert_allclose(done[i].logprobs, expected, atol=1e-5)
        assert len(set(done[i].versions.tolist())) > 2


@pytest.mark.parametrize("kv_on_update", ["recompute", "keep"])
def test_an_engine_recomputes_until_all_that_had_begun_go_on(kv_on_update: str, tmp_path: Path) -> None:
    save("qwen3", tmp_path, seed=0)
    engine = _engine(tmp_path, kv_on_update=kv_on_update, prefill_budget=16)
    engine.submit(0, prompt_of(25), Sampling(max_tokens=12))
    seen = []
    for step in range(6):
        if step == 3:  # two tokens
            engine.load_weights(_weights(tmp_path), 1)
            engine.submit(1, prompt_of(5), Sampling(max_tokens=12))
        seen.append(engine.recomputes)
        engine.step()
    assert seen == [False, False, False, kv_on_update == "recompute", kv_on_update == "recompute", False]


def test_kept_keys_belong_to_old_weights_but_a_new_sequence_never_sees_them(tmp_path: Path) -> None:
    save("qwen3", tmp_path / "old", seed=0)
    new = load(save("qwen3", tmp_path / "new", seed=1))
    engine = _engine(tmp_path / "old", kv_on_update="keep")
    prompt = prompt_of(12)
    engine.submit(0, prompt, Sampling(max_tokens=20))

    def swap(step: int) -> None:
        if step == 5:
            engine.load_weights(dict(new.named_parameters()), 1)
            engine.submit(1, prompt, Sampling(max_tokens=20))

    done = _run(engine, swap)
    assert done[0].versions.tolist() == [0] * 5 + [1] * 15
    assert engine.num_prefill_tokens == 24
    assert np.abs(done[0].logprobs[5:] - expected_logprobs(new, prompt, done[0].token_ids)[5:]).max() > 1e-3
    np.testing.assert_allclose(done[1].logprobs, expected_logprobs(new, prompt, done[1].token_ids), atol=1e-5)


@pytest.mark.parametrize("functional", [True, False])
def test_an_update_reaches_a_tied_head_and_a_refused_one_changes_nothing(functional: bool, tmp_path: Path) -> None:
    save("smollm2", tmp_path / "old", seed=0)
    new = load(save("smollm2", tmp_path / "new", seed=1))
    engine = _engine(tmp_path / "old", functional=functional)
    weights, tokens = dict(new.named_parameters()), prompt_of(9)
    assert "lm_head.weight" not in weights
    before = engine.score(tokens)
    with pytest.raises(ValueError, match=r"unknown \['model.extra'\]"):
        engine.load_weights({**weights, "model.extra": torch.ones(1)}, 1)
    with pytest.raises(ValueError, match=r"model.norm.weight: \(31,\)"):
        engine.load_weights({**weights, "model.norm.weight": torch.ones(31)}, 1)
    assert engine.version == 0 and engine.score(tokens).tobytes() == before.tobytes()
    engine.load_weights(weights, 1)
    np.testing.assert_allclose(engine.score(tokens)[1:], expected_logprobs(new, tokens[:1], tokens[1:]), atol=1e-5)


@pytest.mark.parametrize("aligned", [False, True])
def test_weights_that_lie_side_by_side_in_one_buffer_give_the_same_scores(aligned: bool, tmp_path: Path) -> None:
    weights = _weights(save("qwen3", tmp_path))
    flat = torch.empty(sum(p.numel() for p in weights.values()) + 1)
    views, at = {}, 0 if aligned else 1
    for name, p in weights.items():
        views[name] = flat[at : at + p.numel()].view(p.shape).copy_(p)
        at += p.numel()
    tokens = prompt_of(30)
    np.testing.assert_allclose(_engine(tmp_path, views).score(tokens), _engine(tmp_path).score(tokens), atol=1e-5)


def test_cancel_returns_what_there_is_and_frees_the_slot(tmp_path: Path) -> None:
    save("llama", tmp_path)
    engine = _engine(tmp_path, max_slots=2, prefill_budget=8)
    for i, length in enumerate((4, 30, 5)):  # decoding, in prefill, waiting
        engine.submit(i, prompt_of(length), Sampling(max_tokens=10))
    engine.step()
    engine.step()
    assert (engine.num_running, engine.num_waiting, engine.num_lacking_kv) == (2, 1, 0)
    engine.cancel(0)
    engine.cancel(1)
    engine.cancel(77)  # unknown, or ended already
    ended = dict(engine.step())
    assert {i: (c.finish_reason, len(c.token_ids)) for i, c in ended.items()} == {
        0: ("cancelled", 2),
        1: ("cancelled", 0),
    }
    engine.submit(3, prompt_of(3), Sampling(max_tokens=10))
    engine.cancel(3)
    done = _run(engine)
    assert done[2].finish_reason == "length" and done[3].finish_reason == "cancelled"
    assert not engine._jobs and not engine._cache.slabs()


def test_any_of_several_stop_ids_ends_a_sequence_and_is_kept(tmp_path: Path) -> None:
    save("llama", tmp_path)
    prompt = prompt_of(6)
    free = _engine(tmp_path)
    free.submit(0, prompt, Sampling(max_tokens=30, seed=5))
    tokens = _run(free)[0].token_ids.tolist()
    stop = tokens[7]
    engine = _engine(tmp_path)
    never = next(i for i in range(VOCAB) if i not in tokens)
    engine.submit(0, prompt, Sampling(max_tokens=30, seed=5, stop_ids=(never, stop)))
    done = _run(engine)[0]
    assert done.finish_reason == "stop" and done.token_ids.tolist() == tokens[: tokens.index(stop) + 1]


def test_what_cannot_be_served_is_refused_with_its_numbers(tmp_path: Path) -> None:
    save("llama", tmp_path)
    engine = _engine(tmp_path, max_seq_len=20)
    for prompt, sampling, message in (
        (prompt_of(15), Sampling(max_tokens=6), r"15 prompt \+ 6 new tokens > max_seq_len 20"),
        (np.array([3, VOCAB]), Sampling(max_tokens=1), r"ids 3 to 97 outside \[0, 97\)"),
        (np.array([-1]), Sampling(max_tokens=1), "ids -1"),
        (np.empty(0, np.int32), Sampling(max_tokens=1), "shape"),
        (prompt_of(3), Sampling(max_tokens=0), "max_tokens = 0"),
        (prompt_of(3), Sampling(max_tokens=1, top_p=0.0), "top_p = 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(0, prompt, sampling)
    engine.submit(0, prompt_of(15), Sampling(max_tokens=5))
    with pytest.raises(ValueError, match="already in the engine"):
        engine.submit(0, prompt_of(15), Sampling(max_tokens=5))
    assert len(_run(engine)[0].token_ids) == 5


def test_no_step_before_the_first_weights(tmp_path: Path) -> None:
    save("llama", tmp_path)
    model = build(tmp_path, device="cpu", dtype=torch.float32, weights=False)
    engine = NativeEngine(model=model, device=torch.device("cpu"))
    assert engine.step() == [] and engine.version == -1
    engine.submit(0, prompt_of(3), Sampling(max_tokens=1))
    with pytest.raises(RuntimeError, match="before load_weights"):
        engine.step()


def test_memory_follows_the_tokens_held(tmp_path: Path) -> None:
    save("llama", tmp_path)
    engine = _engine(tmp_path, max_slots=9)
    engine.submit(0, prompt_of(200), Sampling(max_tokens=20))
    for i in range(1, 9):
        engine.submit(i, prompt_of(10), Sampling(max_tokens=20))
    for _ in range(10):
        engine.step()
    rows = {slab.capacity: slab.num_rows for slab in engine._cache.slabs()}
    assert rows == {64: 8, 256: 1}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    folder = save("llama", tmp_path_factory.mktemp("llama"))
    return folder, _weights(folder)


def _small_engine(small: tuple[Path, Weights], num_tokens: int, **options: object) -> NativeEngine:
    """With memory for so many tokens; a request of 60 needs 184: a row of 64, and 2 · 60 beside rows."""
    return _engine(
        *small, **{"max_seq_len": 60, "prefill_budget": 8, "kv_cache_bytes": num_tokens * TOKEN_BYTES} | options
    )


TOKEN_BYTES = 2 * 3 * 2 * 8 * 4  # keys and values of 3 layers, 2 heads of 8 floats


@given(
    num_tokens=st.integers(184, 1500),
    groups=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 9), st.integers(1, 8)), min_size=1, max_size=6
    ),
    swap_at=st.integers(0, 12),
    prefill_budget=st.sampled_from([8, 60, 256]),
    deterministic=st.booleans(),
)
@example(  # once they have sampled 3 tokens, all are computed anew in two steps
    num_tokens=16 * 64 + 120,
    groups=[(40, 20, 0, 8), (39, 20, 0, 8)],
    swap_at=2,
    prefill_budget=256,
    deterministic=False,
)
@settings(max_examples=20)
def test_keys_and_values_never_exceed_their_memory_and_every_request_is_served(
    small: tuple[Path, Weights],
    num_tokens: int,
    groups: list[tuple[int, int, int, int]],
    swap_at: int,
    prefill_budget: int,
    deterministic: bool,
) -> None:
    """Groups: length of the prompt, new tokens, step at which it comes, members; equal lengths are equal prompts."""
    requests = [group for group in groups for _ in range(group[3])]
    engine = _small_engine(small, num_tokens, prefill_budget=prefill_budget, deterministic=deterministic)
    done: dict[int, Completion] = {}
    for step in range(10_000):
        for i, (length, max_tokens, at, _) in enumerate(requests):
            if at == step:
                engine.submit(i, prompt_of(length), Sampling(max_tokens=max_tokens, seed=i))
        done.update(engine.step())  # asserts it for whatever it holds in between
        assert engine._cache.num_tokens <= num_tokens
        if step == swap_at:
            engine.load_weights(small[1], 1)
        if step > 9 and not engine.num_running and not engine.num_waiting:
            break
    assert {i: len(c.token_ids) for i, c in done.items()} == {i: n for i, (_, n, _, _) in enumerate(requests)}


def test_no_more_rows_are_held_than_there_are_slots(small: tuple[Path, Weights]) -> None:
    engine = _engine(*small, max_slots=5)
    for i in range(6):
        engine.submit(i, prompt_of(10 + i), Sampling(max_tokens=20))
    engine.step()
    assert [slab.num_rows for slab in engine._cache.slabs()] == [5]
    assert len(_run(engine)) == 6


def test_requests_wait_for_memory_though_slots_are_free(small: tuple[Path, Weights]) -> None:
    engine = _small_engine(small, 184 + 2 * 64)
    for i in range(5):
        engine.submit(i, prompt_of(5 + i), Sampling(max_tokens=6))
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (3, 2)  # a row of 64 for each
    assert engine.num_lacking_kv == 2
    assert sorted(_run(engine)) == [0, 1, 2, 3, 4]


def test_memory_in_which_not_even_one_request_fits_is_refused(small: tuple[Path, Weights]) -> None:
    with pytest.raises(ValueError, match=r"holds 183 tokens, a request of max_seq_len = 60 needs room for 184"):
        _small_engine(small, 183)
    assert _small_engine(small, 184).num_running == 0


@pytest.mark.parametrize("vocab", [50, 5000])
def test_samples_follow_the_distribution(vocab: int) -> None:
    num = 4000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 3
    uniforms = Uniforms(1)
    u = [uniforms.next() for _ in range(num)]
    for sampling, kept in (
        (Sampling(max_tokens=1, temperature=0.7), vocab),
        (Sampling(max_tokens=1, top_k=5), 5),
        (Sampling(max_tokens=1, top_p=0.6), None),
        (Sampling(max_tokens=1, top_p=0.6, top_k=3), None),
    ):
        tokens, logprobs = sample(logits.expand(num, -1), [sampling] * num, u)
        full = (logits / sampling.temperature).log_softmax(-1)
        torch.testing.assert_close(logprobs, full[tokens])  # before any truncation
        order = full.argsort(descending=True)
        probs = full.exp()[order]
        if sampling.top_k:
            probs[sampling.top_k :] = 0
        probs /= probs.sum()
        probs[probs.cumsum(0) - probs >= sampling.top_p] = 0
        expected = torch.zeros(vocab).index_put_((order,), probs / probs.sum())
        counts = torch.bincount(tokens, minlength=vocab) / num
        assert (counts[expected == 0] == 0).all() and (kept is None or (expected > 0).sum() <= kept)
        assert (counts - expected).abs().sum() < 0.06 + 1.2 * float((expected / num).sqrt().sum())


def test_a_seed_fixes_the_numbers_and_mixed_rows_do_not_interfere() -> None:
    assert [Uniforms(3).next(), Uniforms(3).next()] == [Uniforms(3).next()] * 2
    stream, other = Uniforms(3), Uniforms(4)
    numbers = [stream.next() for _ in range(200)]
    assert len(set(numbers)) == 200 and min(numbers) >= 0 and max(numbers) < 1 and other.next() not in numbers
    logits = torch.randn(4, VOCAB)
    rows = [Sampling(max_tokens=1, temperature=0), Sampling(max_tokens=1, top_p=0.5), Sampling(max_tokens=1)]
    rows.append(Sampling(max_tokens=1, temperature=2.0, top_k=3))
    tokens, logprobs = sample(logits, rows, numbers[:4])
    for i, row in enumerate(rows):
        token, logprob = sample(logits[i : i + 1], [row], numbers[i : i + 1])
        assert token.item() == tokens[i].item() and logprob.item() == pytest.approx(logprobs[i].item(), abs=1e-6)
    assert tokens[0] == logits[0].argmax()
    assert logprobs[0].item() == pytest.approx(logits[0].log_softmax(-1).max().item(), abs=1e-6)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("vocab", [10, 3000])
def test_the_ends_of_the_interval_never_give_an_impossible_token(u: float, vocab: int) -> None:
    logits = torch.full((1, vocab), float("-inf"))
    logits[0, 4:7] = 0
    tokens, _ = sample(logits, [Sampling(max_tokens=1)], [u])
    assert tokens.item() == (4 if u == 0 else 6)
