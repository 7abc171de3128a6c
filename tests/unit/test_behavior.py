"""Whether a model is exact is decided by trying it: exact ones are, planted faults are found, odd ones get one line."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from spmd_rl import attention, behavior, model
from spmd_rl.attention import Rule
from spmd_rl.behavior import Verdict, Ways, cache, check, compare, examine, samples
from spmd_rl.behavior.shrink import shrunk
from spmd_rl.engine.native import NativeEngine
from spmd_rl.engine.step_attention import StepAttention
from spmd_rl.trainer import models, sharding

SCALED = {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
EXACT = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "gemma3_text",
    "gemma2",
    "phi3",
    "olmo2",
    "granite",
)


def config_of(kind: str, **settings: Any) -> PretrainedConfig:
    return CONFIG_MAPPING[kind](**settings)


@pytest.mark.parametrize("kind", EXACT)
def test_a_family_is_exact(kind: str) -> None:
    verdict = examine(config_of(kind), Ways(share_prefix=True))
    assert not verdict.refusal
    assert {"packed", "gradients", "share_prefix", "engine", "export"} == verdict.differences.keys()
    worst = max(verdict.differences.values())
    assert worst < check.LIMIT and min(verdict.faults.values()) > check.MARGIN * worst


@pytest.mark.parametrize(
    ("kind", "settings", "fault"),
    [
        ("mistral", {}, "no window"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "no window"),
        ("gemma2", {}, "no softcap of attention"),
        ("gemma2", {}, "no softcap of logits"),
        ("gpt_oss", {}, "no attention sinks"),
        ("llama4_text", {}, "no chunks"),
        ("cohere", {}, "logits not scaled"),
        ("deepseek_v3", {}, "without e_score_correction_bias"),
        ("granite", {"residual_multiplier": 0.22}, "residuals not scaled"),
        ("llama", SCALED, "another rope scaling"),
        ("gpt2", {}, "positions begin late"),
    ],
)
def test_a_property_of_the_config_has_a_fault_that_shows(kind: str, settings: dict[str, Any], fault: str) -> None:
    assert examine(config_of(kind, **settings), Ways(engine=False)).faults[fault] > 0.1


def test_a_property_that_is_switched_off_has_none() -> None:
    assert "no window" not in examine(config_of("qwen2", use_sliding_window=False), Ways(engine=False)).faults


# What our code would do wrong, and which way notices it.


def _other_rule(patch: pytest.MonkeyPatch, change: Callable[[Rule], dict[str, Any]]) -> None:
    """Attention by another rule than its layer's."""
    right = attention.causal_attention
    patch.setattr(attention, "causal_attention", lambda q, k, v, rule: right(q, k, v, rule._replace(**change(rule))))


def no_window(patch: pytest.MonkeyPatch) -> None:
    _other_rule(patch, lambda rule: {"window": None})


def window_off_by_one(patch: pytest.MonkeyPatch) -> None:
    _other_rule(patch, lambda rule: {"window": rule.window and rule.window + 1})


def no_chunk(patch: pytest.MonkeyPatch) -> None:
    _other_rule(patch, lambda rule: {"chunk": None})


def no_softcap(patch: pytest.MonkeyPatch) -> None:
    _other_rule(patch, lambda rule: {"softcap": None})


def no_sinks(patch: pytest.MonkeyPatch) -> None:
    _other_rule(patch, lambda rule: {"sinks": None})


def leak(patch: pytest.MonkeyPatch) -> None:
    """Sequences of a forward see each other; positions are right."""
    patch.setattr(attention, "spans", lambda cu, parents=(): [attention.Span(0, cu[-1], 0, 0)])
    patch.setattr(model, "token_positions", lambda packed, device: torch.arange(packed[0].end, device=device))


def positions_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model, "token_positions", lambda packed, device: torch.arange(packed[-1].end, device=device))


def start_forgotten(patch: pytest.MonkeyPatch) -> None:
    """What a group shares is not seen by its members."""
    patch.setattr(attention.Span, "keys", lambda self, x, end=None: x[:, :, self.start : end or self.end])


def wrong_gradient(patch: pytest.MonkeyPatch) -> None:
    right = sharding.token_logprobs
    patch.setattr(sharding, "token_logprobs", lambda h, *args: right(h.detach() + 1.01 * (h - h.detach()), *args))


def decode_one_late(patch: pytest.MonkeyPatch) -> None:
    """Positions of the engine's next tokens."""
    right = StepAttention.__init__

    def late(self: StepAttention, rows: Any, chunks: Any, device: Any) -> None:
        right(self, rows, chunks, device)
        num = sum(n for _, _, n in rows)
        self.positions[:num] = [p + 1 for p in self.positions[:num]]

    patch.setattr(StepAttention, "__init__", late)


def stale_keys(patch: pytest.MonkeyPatch) -> None:
    """Keys and values of the version before are kept after a swap."""
    patch.setattr(compare, "NativeEngine", partial(NativeEngine, kv_on_update="keep"))


def old_weights(patch: pytest.MonkeyPatch) -> None:
    """The engine says a new version and computes with the one before."""
    right = NativeEngine.load_weights
    first: dict[NativeEngine, Any] = {}
    patch.setattr(
        NativeEngine, "load_weights", lambda self, tensors, v: right(self, first.setdefault(self, tensors), v)
    )


def no_temperature(patch: pytest.MonkeyPatch) -> None:
    right = compare.Sampling
    patch.setattr(compare, "Sampling", lambda temperature, **rest: right(temperature=1.0, **rest))


def wrong_merge(patch: pytest.MonkeyPatch) -> None:
    """Engines and exports add less than the trainer."""
    right = models.merged
    patch.setattr(models, "merged", lambda weight, a, b, scale: right(weight, a, b, 0.9 * scale))


@pytest.mark.parametrize(
    ("fault", "kind", "settings", "way"),
    [
        (no_window, "mistral", {}, "packed"),
        (window_off_by_one, "gemma3_text", {}, "packed"),
        (no_softcap, "gemma2", {}, "packed"),
        (no_sinks, "gpt_oss", {}, "packed"),
        (leak, "llama", {}, "packed"),
        (positions_go_on, "gpt2", {}, "packed"),
        (wrong_gradient, "qwen3", {}, "gradients"),
        (start_forgotten, "qwen3", {}, "share_prefix"),
        (decode_one_late, "qwen3", {}, "engine"),
        (stale_keys, "qwen3_moe", {}, "engine"),
        (old_weights, "qwen2", {}, "engine"),
        (no_temperature, "llama", {}, "engine"),
        (wrong_merge, "llama", {}, "lora"),
    ],
)
def test_a_fault_of_ours_is_found_by_its_way(
    fault: Callable[[pytest.MonkeyPatch], None], kind: str, settings: dict[str, Any], way: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        verdict = examine(
            config_of(kind, **settings), Ways(share_prefix=True, lora=("q_proj",) if way == "lora" else ())
        )
    assert verdict.refusal.startswith(f"{way}: ") and "off the plain model" in verdict.refusal
    assert "\n" not in verdict.line and verdict.differences[way] > check.LIMIT


def test_weights_that_hide_differences_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "GAIN", 1e-3)
    monkeypatch.setattr(samples, "NOISE", 0.0)
    verdict = examine(config_of("llama"), Ways(engine=False))
    assert "cannot be decided: the planted fault" in verdict.refusal


# The small config.


def test_the_first_layers_of_every_kind_are_kept_and_sequences_cross_every_length() -> None:
    small = shrunk(config_of("gemma3_text"))  # five layers with a window, then one without
    assert small.layer_types == ["sliding_attention"] * 5 + ["full_attention"] and small.sliding_window == 7
    factors = [1.0 + i for i in range(48)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    small = shrunk(config_of("phi3", rope_parameters=rope, original_max_position_embeddings=4096))
    assert small.original_max_position_embeddings == 24 and len(small.rope_parameters["long_factor"]) == 8
    small = shrunk(config_of("qwen3_moe", decoder_sparse_step=3))  # dense, dense, experts, …
    assert small.num_hidden_layers == 3


def test_nothing_is_made_larger() -> None:
    tiny = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 50}
    tiny |= {"num_hidden_layers": 1, "intermediate_size": 20, "sliding_window": 3}
    small = shrunk(config_of("mistral", **tiny))
    assert {name: getattr(small, name) for name in tiny} == tiny


# What was found is kept.


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The models that were tried; the cache is a folder of its own."""
    tried: list[str] = []

    def try_it(config: PretrainedConfig, ways: Ways) -> Verdict:
        tried.append(config.model_type)
        return Verdict(model_type=config.model_type, differences={"packed": 1e-6}, faults={"leak": 2.0}, seconds=1.0)

    monkeypatch.setattr(behavior, "examine", try_it)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tried


def remembered(config: PretrainedConfig, ways: Ways = Ways()) -> Verdict:  # noqa: B008
    return cache.remembered(config, ways, lambda: behavior.examine(config, ways))


def test_the_same_question_is_asked_once(asked: list[str]) -> None:
    assert remembered(config_of("llama")) == remembered(config_of("llama"))
    assert asked == ["llama"]


@pytest.mark.parametrize("changed", ["config", "ways", "source", "version"])
def test_another_question_is_asked_anew(asked: list[str], changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered(config_of("llama"))
    config, ways = config_of("llama"), Ways()
    if changed == "config":
        config = config_of("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    elif changed == "ways":
        ways = Ways(share_prefix=True)
    elif changed == "source":
        monkeypatch.setattr(cache, "source_digest", lambda: "other")
    else:
        monkeypatch.setattr(cache, "version", lambda name: "9.9")
    remembered(config, ways)
    assert asked == ["llama", "llama"]


def test_a_refusal_is_kept_too(asked: list[str]) -> None:
    no = Verdict(model_type="llama", refusal="packed: 3 nats off")
    first = cache.remembered(config_of("llama"), Ways(), lambda: no)
    assert first == no == remembered(config_of("llama")) and not asked


@pytest.mark.parametrize("broken", ["unwritable", "damaged"])
def test_a_cache_that_cannot_be_used_changes_nothing(asked: list[str], broken: str) -> None:
    if broken == "unwritable":
        cache.folder().parent.mkdir()
        cache.folder().write_text("a file")
    else:
        remembered(config_of("llama"))
        (kept,) = cache.folder().glob("*.json")
        kept.write_text('{"model_type": "lla')
    assert not remembered(config_of("llama")).refusal and asked[-1] == "llama"
