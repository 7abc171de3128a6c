"""Whether a model is exact is decided by trying it: exact ones are, planted faults are found, odd ones get one line."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from spmd_rl import behavior, config
from spmd_rl.behavior import Verdict, Ways, cache, check, compare, examine, plain, ranks, samples
from spmd_rl.behavior.shrink import shrunk
from spmd_rl.cli import main
from spmd_rl.demo.tiny_model import write_tokenizer
from spmd_rl.engine import native
from spmd_rl.engine.native import NativeEngine
from spmd_rl.engine.step_attention import StepAttention
from spmd_rl.model import attention, causal_lm
from spmd_rl.model.attention import Rule
from spmd_rl.ranks.build_trainer import check_model
from spmd_rl.trainer import models, sharding
from tests.unit.families import save

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs" / "tiny_cpu.toml")

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
    patch.setattr(causal_lm, "token_positions", lambda packed, device: torch.arange(packed[0].end, device=device))


def positions_go_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(causal_lm, "token_positions", lambda packed, device: torch.arange(packed[-1].end, device=device))


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


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), ranks.NoAnswer("no answer")])
def test_an_accident_refuses_once_and_is_not_remembered(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def accident(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(compare, "alone", accident)
        first = remembered(config_of("llama"))
    assert first.refusal.startswith("training fails: ") and not first.lasting
    assert not remembered(config_of("llama")).refusal


@pytest.mark.parametrize(("cause", "lasts"), [(OSError(28, "No space left"), False), (KeyError("layer"), True)])
def test_what_an_error_was_raised_from_says_whether_it_lasts(
    cause: Exception, lasts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fails(*_: object) -> None:
        raise ValueError("config.json makes no causal LM") from cause

    monkeypatch.setattr(compare, "alone", fails)
    assert remembered(config_of("mistral")).lasting == lasts


@pytest.mark.parametrize("values", [[1.0, math.nan, 2.0], [math.nan, 1.0], [1.0, math.nan]])
def test_what_is_not_finite_is_the_largest_wherever_it_stands(values: list[float]) -> None:
    assert math.isnan(plain.largest(values)) and plain.largest([]) == 0.0
    theirs = {str(i): torch.ones(2) for i in range(len(values))}
    ours = {str(i): torch.tensor([1.0, value]) for i, value in enumerate(values)}
    assert math.isnan(plain.apart(ours, theirs))


def test_a_gradient_that_is_not_finite_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = compare.gradients

    def broken(models: object) -> dict[str, torch.Tensor]:
        return {name: g * math.nan if "k_proj" in name else g for name, g in sound(models).items()}

    monkeypatch.setattr(compare, "gradients", broken)
    assert examine(config_of("llama"), Ways(engine=False)).refusal.startswith("gradients: nan of a gradient's norm off")


def test_what_no_tried_sequence_reaches_is_not_called_exact() -> None:
    config = config_of("llama")
    config.attention_block_size_of_tomorrow = 4096
    refusal = (
        "cannot be decided: the sequences that are tried do not reach config.attention_block_size_of_tomorrow = 4096"
    )
    assert examine(config, Ways()).refusal == refusal


SPARSE = {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2}


@pytest.mark.skipif("minimax_m3_vl_text" not in CONFIG_MAPPING, reason="needs a newer transformers")
def test_attention_to_chosen_blocks_is_seen() -> None:
    """An indexer chooses 16 blocks of 128 keys: more than any small sequence has."""
    refusal = examine(CONFIG_MAPPING["minimax_m3_vl_text"](**SPARSE), Ways()).refusal
    assert refusal.startswith("packed: ") and "minimax_m3_sparse" in refusal


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


# Models that were once computed wrongly, or stopped a run with a traceback.

CONV = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
WINDOW = {"use_sliding_window": True, "max_window_layers": 1}


def long_rope(num: int) -> dict[str, Any]:
    """Other factors for sequences of more than 4096 tokens, one for each of `num` frequencies."""
    short, far = [1.0 + i / 20 for i in range(num)], [2.0 + i for i in range(num)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4096}
    return {"rope_parameters": rope | {"short_factor": short, "long_factor": far}}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("lfm2", CONV),
        ("qwen2_moe", WINDOW),
        ("gpt2", {}),
        ("deepseek_v2", {"num_experts_per_tok": 2, "n_routed_experts": 4}),
        *(
            pytest.param(kind, settings, marks=pytest.mark.full)
            for kind, settings in (
                ("qwen3_next", {}),
                ("qwen3_5_text", {}),
                ("bamba", {"attn_layer_indices": [1]}),
                ("qwen2", WINDOW),
                ("qwen3_moe", WINDOW),
                ("mixtral", {"sliding_window": 4096}),
                ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
                ("gpt_oss", {}),
            )
        ),
    ],
)
def test_a_model_that_once_went_wrong_is_exact(kind: str, settings: dict[str, Any]) -> None:
    verdict = examine(config_of(kind, **settings), Ways())
    assert not verdict.refusal and max(verdict.differences.values()) < check.LIMIT


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("phi3", long_rope(48) | {"original_max_position_embeddings": 4096, "max_position_embeddings": 32768}),
        ("bloom", {}),
        ("falcon", {}),
        ("mamba", {}),
        *(
            pytest.param(kind, settings, marks=pytest.mark.full)
            for kind, settings in (
                ("llama", long_rope(64)),
                ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
                ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
                ("llama4_text", {}),
                ("falcon_h1", {}),
                ("stablelm", {}),
                ("nemotron", {"head_dim": 128}),
                ("opt", {}),
                ("recurrent_gemma", {}),
                ("bart", {}),
                ("blt", {}),
            )
        ),
    ],
)
def test_a_model_of_another_kind_is_exact_or_refused_in_one_line(kind: str, settings: dict[str, Any]) -> None:
    verdict = examine(config_of(kind, **settings), Ways())
    if verdict.refusal:
        assert "\n" not in verdict.line and verdict.line.startswith(kind) and "spmd_rl_" not in verdict.line
    else:
        assert max(verdict.differences.values()) < check.LIMIT


def leaking_states(patch: pytest.MonkeyPatch) -> None:
    """Sequences are packed through layers that carry a state."""
    for module in (causal_lm, check):
        patch.setattr(module, "packs", lambda model: True)


def forgotten_states(patch: pytest.MonkeyPatch) -> None:
    """The engine has keys and values, and nothing else of what came before."""
    patch.setattr(native, "packs", lambda model: True)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("lfm2", CONV),
        pytest.param("qwen3_next", {}, marks=pytest.mark.full),
        pytest.param("bamba", {}, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize(("fault", "way"), [(leaking_states, "packed"), (forgotten_states, "engine")])
def test_states_that_leak_or_are_forgotten_are_found(
    fault: Callable[[pytest.MonkeyPatch], None], way: str, kind: str, settings: dict[str, Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        verdict = examine(config_of(kind, **settings), Ways())
    assert verdict.refusal.startswith(f"{way}: ") and verdict.differences[way] > 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("topology.tensor_parallel=2", "topology.trainer=2"), "tensor parallelism: phi3 is not one of"),
        (("lora.rank=4",), "no such linear layers; the model has down_proj, gate_up_proj, o_proj, qkv_proj"),
    ],
)
def test_what_a_model_cannot_do_is_said_before_anything_is_built(
    settings: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    save("phi3", tmp_path)
    with pytest.raises(ValueError, match=message) as refused:
        check_model(config.load(ROOT / "configs" / "tiny_cpu.toml", [f"model.path={tmp_path}", *settings]))
    assert "\n" not in str(refused.value)


def test_check_says_what_it_found_and_refuses_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokenizer(save("qwen3", tmp_path / "fine"))
    assert main(["check", TINY, f"model.path={tmp_path}/fine"]) == 0
    assert "model: qwen3, exact: packed " in capsys.readouterr().out
    folder = tmp_path / "bloom"
    AutoModelForCausalLM.from_config(shrunk(config_of("bloom"))).save_pretrained(folder)
    assert main(["check", TINY, f"model.path={folder}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "BloomBlock" in said and "nats off the plain model" in said
