"""The vLLM adapter in this process, on a group of one rank: every promise of the engine, every trap of vLLM.

vLLM takes seconds to start and allows one engine at a time, so few are built, each after the one before was closed: one
that recomputes its KV cache at an update, one that keeps it, two in bfloat16, one whose head is not tied.  Each test
begins by loading weights.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.demo.tiny_model import VOCAB, random_model
from spmd_rl.engine.vllm import VllmEngine
from spmd_rl.model.causal_lm import build
from spmd_rl.types import Completion, Sampling
from spmd_rl.weights.layout import manifest

SLOTS, MAX_SEQ_LEN = 4, 256  # the model has 256 positions
BLOCK = 32  # tokens of the KV cache that are found again together
EOS = 2  # in its config.json
TOLERANCE = 1e-4


class Counting(VllmEngine):
    """Sees how many tokens of each prompt were found in the cache, and vLLM's own record of versions."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.num_cached: dict[int, int] = {}
        self.spans: dict[int, list[tuple[int, int, int]]] = {}  # version, first token, end

    def _take(self, request_id: int, request: object, output: object) -> None:
        self.num_cached[request_id] = output.num_cached_tokens
        if output.finished:
            spans = output.outputs[0].weight_versions
            self.spans[request_id] = [(int(span.version), span.start, span.end) for span in spans]
        super()._take(request_id, request, output)


def weights(version: int) -> dict[str, Tensor]:
    """Far from each other, and from the uniform distribution."""
    model = random_model(seed=version)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def plain(version: int) -> torch.nn.Module:
    model = random_model(0).eval()
    model.load_state_dict(weights(version), strict=False)
    model.tie_weights()
    return model


def expected(version: int, prompt: np.ndarray, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """Log-prob of each sampled token by a plain forward."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens])).long()
    with torch.no_grad():
        logprobs = (plain(version)(input_ids=ids[None]).logits[0] / temperature).log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None])[:, 0].numpy()


def prompt_of(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(3, len(VOCAB), length).astype(np.int32)


def finish(engine: VllmEngine) -> dict[int, Completion]:
    done = dict(engine.step())
    for _ in range(2000):
        if not engine.num_running + engine.num_waiting:
            return done
        done |= dict(engine.step())
    raise AssertionError(f"still {engine.num_running} running and {engine.num_waiting} waiting")


class Builds:
    """The one engine there is; asking for another kind closes it."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._kind, self._engine = folder, "", None

    def __call__(self, kind: str) -> Counting:
        if kind == self._kind:
            return self._engine
        self.close()
        self._kind = kind
        model = build(self._write(kind), device="cpu", dtype=torch.float32, weights=False)
        dtype = torch.bfloat16 if kind in ("bfloat16", "float32 head") else torch.float32
        self._engine = Counting(
            folder=self._folder / kind,
            config=model.config,
            specs=manifest(model, dtype=dtype),
            group=dist.group.WORLD,
            device=torch.device("cpu"),
            dtype=dtype,
            head_dtype="float32" if kind == "float32 head" else "model",
            max_slots=SLOTS,
            max_seq_len=MAX_SEQ_LEN,
            kv_on_update="keep" if kind == "keep" else "recompute",
            decode=lambda token_ids: "".join(chr(ord("a") + i) for i in token_ids),
        )
        return self._engine

    def _write(self, kind: str) -> Path:
        """A config and no weights, and sampling defaults that nobody asked for."""
        folder = self._folder / kind
        folder.mkdir()
        config = random_model(0).config
        config.tie_word_embeddings = kind != "untied"
        config.save_pretrained(folder)
        unasked = {"do_sample": True, "temperature": 0.1, "top_k": 1, "repetition_penalty": 3.0, "eos_token_id": 5}
        (folder / "generation_config.json").write_text(json.dumps(unasked))
        return folder

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None


@pytest.fixture(scope="module")
def engine_that(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builds]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    builds = Builds(tmp_path_factory.mktemp("model"))
    yield builds
    builds.close()
    dist.destroy_process_group()


def test_weights_come_before_the_first_step(engine_that):
    with pytest.raises(RuntimeError, match="before load_weights"):
        engine_that("recompute").step()


def test_every_token_has_the_log_prob_of_the_version_that_sampled_it(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(0), 0)
    temperatures = [1.0, 0.7, 1.3, 1.0, 0.7, 1.0]  # more requests than slots
    for request, temperature in enumerate(temperatures):
        engine.submit(request, prompt_of(20 + 15 * request), Sampling(max_tokens=24, temperature=temperature, seed=5))
    done = {}
    for version in (1, 2):
        for _ in range(7):
            done |= dict(engine.step())
        assert not engine.recomputes
        engine.load_weights(weights(version), version)
        assert engine.recomputes
    done |= finish(engine)
    mixed, far = 0, []
    for request, temperature in enumerate(temperatures):
        prompt, got = prompt_of(20 + 15 * request), done[request]
        assert len(got.token_ids) == len(got.logprobs) == len(got.versions) == 24
        assert (np.diff(got.versions) >= 0).all()
        recorded = [version for version, start, end in engine.spans[request] for _ in range(start, end)]
        assert recorded == got.versions.tolist()
        mixed += len(set(got.versions)) > 1
        for version in range(3):
            error = np.abs(expected(version, prompt, got.token_ids, temperature) - got.logprobs)
            sampled_by = got.versions == version
            assert error[sampled_by].max(initial=0) <= TOLERANCE
            far += error[~sampled_by].tolist()
    assert mixed >= 4 and np.mean(far) > 0.3


def test_another_version_in_the_record_of_vllm_is_an_error(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(0), 0)
    engine.submit(0, prompt_of(40), Sampling(max_tokens=3))
    engine.step()
    engine._engine.set_weight_version("7")
    engine.step()
    with pytest.raises(RuntimeError, match=r"vLLM says that version 7 sampled tokens 1 to 3, we say \[0, 0\]"):
        engine.step()
    engine.cancel(0)
    engine.step()


def test_a_second_engine_in_the_process_is_refused(engine_that, tmp_path):
    engine = engine_that("recompute")
    with pytest.raises(RuntimeError, match="there is a vLLM engine in this process already"):
        Builds(tmp_path)("recompute")
    engine.load_weights(weights(0), 0)
    engine.submit(0, prompt_of(40), Sampling(max_tokens=3))
    assert len(finish(engine)[0].token_ids) == 3


def test_weights_are_copied(engine_that):
    """What they came in may be overwritten at once."""
    engine, tensors = engine_that("recompute"), weights(1)
    engine.load_weights(tensors, 1)
    for tensor in tensors.values():
        tensor.zero_()
    engine.submit(0, prompt_of(40), Sampling(max_tokens=8, seed=1))
    got = finish(engine)[0]
    assert np.abs(expected(1, prompt_of(40), got.token_ids) - got.logprobs).max() <= TOLERANCE


def test_an_update_drops_the_prefixes_of_older_weights(engine_that):
    engine = engine_that("recompute")
    prompt = prompt_of(200)
    for version in (0, 1):
        engine.load_weights(weights(version), version)
        for request in (0, 1):
            engine.submit(request, prompt, Sampling(max_tokens=4, seed=request))
            got = finish(engine)[request]
            assert np.abs(expected(version, prompt, got.token_ids) - got.logprobs).max() <= TOLERANCE
            assert engine.num_cached[request] == (0, 200 // BLOCK * BLOCK)[request]


def test_members_of_a_group_that_start_together_share_their_prompt(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(1), 1)
    for request in range(SLOTS):
        engine.submit(request, prompt_of(70), Sampling(max_tokens=3, seed=request))
    finish(engine)
    assert sorted(engine.num_cached[request] for request in range(SLOTS)) == [0] + [2 * BLOCK] * (SLOTS - 1)


def test_the_cache_has_room_for_all_slots_at_full_length(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(1), 1)
    assert engine.kv_used == 0
    for request in range(SLOTS):
        engine.submit(request, prompt_of(30 + request), Sampling(max_tokens=MAX_SEQ_LEN - 30 - request, seed=request))
    used = []
    for _ in range(MAX_SEQ_LEN - 30):  # a token of each in each step: nobody had to make room
        engine.step()
        used.append(engine.kv_used)
    assert engine.num_running == 0
    assert 0 < used[0] < max(used) <= SLOTS / (SLOTS + 1) + 0.01 and used[-1] == 0


def test_equal_seeds_sample_equal_tokens_alone_and_in_company(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(0), 0)
    engine.submit(0, prompt_of(30), Sampling(max_tokens=12, seed=2**62 + 1))
    alone = finish(engine)[0]
    for request in range(SLOTS + 2):
        engine.submit(request, prompt_of(30 + request % 2), Sampling(max_tokens=12, seed=2**62 + 1 + request // 2))
    done = finish(engine)
    np.testing.assert_array_equal(done[0].token_ids, alone.token_ids)
    assert not np.array_equal(done[2].token_ids, alone.token_ids)  # another seed


def test_stop_ids_are_the_only_stops(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(0), 0)
    hot = {"max_tokens": 200, "temperature": 2.0, "seed": 3}
    engine.submit(0, prompt_of(9), Sampling(**hot))
    free = finish(engine)[0]
    tokens = free.token_ids.tolist()
    assert free.finish_reason == "length" and EOS in tokens  # the model's own end of text does not stop
    other = tokens[tokens.index(EOS) // 2]  # comes first
    end = tokens.index(other) + 1
    for request, stop_ids in enumerate([(other, EOS), (EOS, other), (EOS,)]):
        engine.submit(request, prompt_of(9), Sampling(**hot, stop_ids=stop_ids))
    done = finish(engine)
    for request, num in enumerate([end, end, tokens.index(EOS) + 1]):
        assert done[request].finish_reason == "stop"
        assert done[request].token_ids.tolist() == tokens[:num]  # the stop token and its log-prob are kept
        np.testing.assert_array_equal(done[request].logprobs, free.logprobs[:num])


def test_a_stop_string_ends_a_request_at_the_token_that_completes_it(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(0), 0)
    hot = {"max_tokens": 60, "temperature": 2.0, "seed": 3}
    engine.submit(0, prompt_of(9), Sampling(**hot))
    free = finish(engine)[0]
    text = "".join(chr(ord("a") + i) for i in free.token_ids)
    stop = text[20:22]
    size = text.index(stop) + 2
    engine.submit(0, prompt_of(9), Sampling(**hot, stop=(stop,)))
    engine.submit(1, prompt_of(9), Sampling(**hot))
    done = finish(engine)
    assert (done[0].finish_reason, done[1].finish_reason) == ("stop", "length")
    np.testing.assert_array_equal(done[0].token_ids, free.token_ids[:size])
    np.testing.assert_allclose(done[0].logprobs, free.logprobs[:size], atol=TOLERANCE)
    np.testing.assert_array_equal(done[1].token_ids, free.token_ids)


def test_cancelling_frees_a_slot_and_hands_back_the_tokens_so_far(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(0), 0)
    for request in range(SLOTS + 2):
        engine.submit(request, prompt_of(12), Sampling(max_tokens=100, seed=request))
    for _ in range(3):
        assert engine.step() == []
    assert (engine.num_running, engine.num_waiting) == (SLOTS, 2)
    engine.cancel(1)
    engine.cancel(SLOTS + 1)  # waits, has no tokens
    engine.cancel(77)
    ended = dict(engine.step())
    assert {request: len(got.token_ids) for request, got in ended.items()} == {1: 3, SLOTS + 1: 0}
    assert {got.finish_reason for got in ended.values()} == {"cancelled"}
    assert (engine.num_running, engine.num_waiting) == (SLOTS, 0)
    engine.submit(1, prompt_of(12), Sampling(max_tokens=5, seed=1))  # its name is free again
    for request in (0, 2, 3):
        engine.cancel(request)
    done = finish(engine)
    np.testing.assert_array_equal(done[1].token_ids[:3], ended[1].token_ids)
    assert len(done[1].token_ids) == 5 and len(done[SLOTS].token_ids) == 100


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([5, len(VOCAB)], 4, "outside"),
        ([-1, 5], 4, "outside"),
        ([], 4, "T > 0"),
        ([5] * 250, 7, "max_seq_len 256"),
        ([5], 0, "max_tokens"),
        ([5], 4, "already in the engine"),
    ],
)
def test_what_vllm_would_choke_on_is_refused_before(engine_that, prompt, max_tokens, message):
    engine = engine_that("recompute")
    engine.load_weights(weights(0), 0)
    engine.submit(0, prompt_of(5), Sampling(max_tokens=3))
    with pytest.raises(ValueError, match=message):
        engine.submit(0, np.array(prompt, np.int64), Sampling(max_tokens=max_tokens))
    assert finish(engine).keys() == {0}


def test_a_temperature_that_vllm_does_not_take_is_refused_at_once(engine_that):
    engine = engine_that("recompute")
    with pytest.raises(ValueError, match="temperature"):
        engine.submit(0, prompt_of(5), Sampling(max_tokens=3, temperature=2.5))
    assert engine.num_waiting == 0


def test_an_update_that_does_not_fit_changes_nothing(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(0), 0)
    good, name = weights(1), "model.layers.1.self_attn.q_proj.weight"
    cut, without = {**good, name: good[name][:-1]}, {key: value for key, value in good.items() if key != name}
    for bad in (cut, without, {**good, "extra": good[name]}):
        with pytest.raises(ValueError, match="update"):
            engine.load_weights(bad, 1)
    assert engine.version == 0
    for version in (0, 1):
        if version:
            engine.load_weights(good, 1)
        np.testing.assert_allclose(
            engine.score(prompt_of(40))[1:], expected(version, prompt_of(40)[:1], prompt_of(40)[1:]), atol=TOLERANCE
        )


def test_the_engine_keeps_nothing_of_the_memory_that_weights_came_in(engine_that):
    engine = engine_that("recompute")
    tensors = {name: tensor.clone() for name, tensor in weights(1).items()}
    engine.load_weights(tensors, 1)
    for tensor in tensors.values():
        tensor.fill_(7.0)  # the next version is received there
    scored = engine.score(prompt_of(40))[1:]
    np.testing.assert_allclose(scored, expected(1, prompt_of(40)[:1], prompt_of(40)[1:]), atol=TOLERANCE)


def test_a_cache_that_vllm_does_not_drop_is_an_error(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(0), 0)
    engine.submit(0, prompt_of(40), Sampling(max_tokens=30))
    engine.step()
    drop = engine._engine.reset_prefix_cache
    assert not drop()  # what it answers while something runs, unless it is told to preempt that
    engine._engine.reset_prefix_cache = lambda reset_running_requests: drop()
    with pytest.raises(RuntimeError, match="did not drop its KV cache of version 0"):
        engine.load_weights(weights(1), 1)
    engine._engine.reset_prefix_cache = drop
    engine.cancel(0)
    engine.step()


def test_torch_is_left_as_it_was_but_for_the_compiler(engine_that):
    engine_that("recompute")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1  # vLLM's CPU worker would ignore it
    torch.set_num_threads(threads)
    assert torch._dynamo.config.disable  # compiling the sampler would take seconds
    assert dist.get_world_size() == 1 and dist.group.WORLD is not None


def test_scores_come_while_all_slots_are_taken_and_up_to_the_last_position(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(1), 1)
    for request in range(SLOTS + 1):
        engine.submit(request, prompt_of(10), Sampling(max_tokens=2 + 20 * request, seed=request))
    engine.step()
    for length in (1, 2, 77, MAX_SEQ_LEN):
        ids = prompt_of(length)
        scored = engine.score(ids)
        assert scored.dtype == np.float32 and scored[0] == 0
        np.testing.assert_allclose(scored[1:], expected(1, ids[:1], ids[1:]), atol=TOLERANCE)
    done = finish(engine)  # those that ended meanwhile too
    assert [len(done[request].token_ids) for request in range(SLOTS + 1)] == [2, 22, 42, 62, 82]


def test_greedy_and_cut_sampling_for_evaluations(engine_that):
    engine = engine_that("recompute")
    engine.load_weights(weights(0), 0)
    engine.submit(0, prompt_of(8), Sampling(max_tokens=10, temperature=0.0))
    engine.submit(1, prompt_of(8), Sampling(max_tokens=10, top_k=1, seed=9))
    done = finish(engine)
    np.testing.assert_array_equal(done[0].token_ids, done[1].token_ids)
    np.testing.assert_allclose(done[0].logprobs, expected(0, prompt_of(8), done[0].token_ids), atol=TOLERANCE)


def updated_and_run(engine: VllmEngine) -> dict[int, Completion]:
    for request in range(3):
        engine.submit(request, prompt_of(40 + request), Sampling(max_tokens=16, seed=request))
    return finish(engine)


def test_an_updated_engine_equals_a_fresh_one_and_closing_leaves_the_world_alive(engine_that):
    engine = engine_that("recompute")
    for version in range(3):
        engine.load_weights(weights(version), version)
        engine.submit(9, prompt_of(40), Sampling(max_tokens=3))
        finish(engine)
    updated = updated_and_run(engine)
    engine = engine_that("keep")  # closes the other
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == dist.get_world_size() == 1
    engine.load_weights(weights(2), 2)
    fresh = updated_and_run(engine)
    for request in range(3):
        np.testing.assert_array_equal(updated[request].token_ids, fresh[request].token_ids)
        np.testing.assert_array_equal(updated[request].logprobs, fresh[request].logprobs)


def test_with_keep_running_sequences_go_on_over_old_keys_and_new_ones_start_clean(engine_that):
    engine = engine_that("keep")
    engine.load_weights(weights(0), 3)
    prompt = prompt_of(100)
    for request in range(SLOTS + 1):  # one waits for a slot
        engine.submit(request, prompt, Sampling(max_tokens=12, seed=request))
    for _ in range(4):
        engine.step()
    engine.load_weights(weights(1), 4)
    engine.submit(90, prompt, Sampling(max_tokens=12, seed=90))
    done = finish(engine)
    assert engine.num_cached[3] == 3 * BLOCK  # of the same version
    for request in (SLOTS, 90):  # began after the update, on a prompt that the cache has of the old weights
        assert set(done[request].versions) == {4}
        assert np.abs(expected(1, prompt, done[request].token_ids) - done[request].logprobs).max() <= TOLERANCE
    for request in range(SLOTS):
        got = done[request]
        assert got.versions.tolist() == [3] * 4 + [4] * 8
        assert np.abs(expected(0, prompt, got.token_ids) - got.logprobs)[:4].max() <= TOLERANCE
        assert np.abs(expected(1, prompt, got.token_ids) - got.logprobs)[4:].mean() > 0.1  # mixed keys


def test_in_bfloat16_updates_arrive_and_scores_are_near_those_of_float32(engine_that):
    engine = engine_that("bfloat16")
    for version in (0, 1, 2):  # the head is tied: its packed copy must follow
        engine.load_weights({name: tensor.bfloat16() for name, tensor in weights(version).items()}, version)
        prompt = prompt_of(60)
        engine.submit(0, prompt, Sampling(max_tokens=40, seed=version))
        got = finish(engine)[0]
        near = np.abs(expected(version, prompt, got.token_ids) - got.logprobs)
        far = np.abs(expected(version + 1, prompt, got.token_ids) - got.logprobs)
        assert near.mean() < 0.1 and near.max() < 0.5 and far.mean() > 0.3


@pytest.mark.parametrize(("kind", "exact"), [("bfloat16", False), ("float32 head", True)])
def test_logits_of_a_bfloat16_model_are_float32_on_request(engine_that, kind, exact):
    engine = engine_that(kind)
    for version in (3, 4):
        tensors = {name: tensor.bfloat16() for name, tensor in weights(version).items()}
        engine.load_weights(tensors, version)
        hidden = torch.randn(5, 128, generator=torch.Generator().manual_seed(version)).bfloat16()
        logits = engine._engine.model_executor.driver_worker.get_model().compute_logits(hidden)
        error = logits.double() - hidden.double() @ tensors["model.embed_tokens.weight"].double().t()
        assert (error.abs().max() < 1e-5) == exact
    prompt = prompt_of(60)
    engine.submit(0, prompt, Sampling(max_tokens=40, seed=4))
    got = finish(engine)[0]
    assert np.abs(expected(4, prompt, got.token_ids) - got.logprobs).mean() < 0.1


def test_a_head_of_its_own_is_updated_too(engine_that):
    engine = engine_that("untied")
    for version in (0, 1):
        tied = weights(version)
        engine.load_weights({**tied, "lm_head.weight": tied["model.embed_tokens.weight"].flip(0)}, version)
        prompt = prompt_of(60)
        engine.submit(0, prompt, Sampling(max_tokens=10, seed=version))
        got = finish(engine)[0]
        flipped = len(VOCAB) - 1 - got.token_ids  # what the tied head calls these tokens
        first = expected(version, prompt, flipped[:1])  # later ones follow another context
        np.testing.assert_allclose(got.logprobs[:1], first, atol=TOLERANCE)
