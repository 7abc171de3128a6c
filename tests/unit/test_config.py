import dataclasses
import datetime
import math
import re
import tomllib
from pathlib import Path

import pytest

from spmd_rl import config

TREE = {"model": {"path": "x"}, "env": {"a": {"path": "m:C", "args": {"n": [1, 2.5e-7], "text": 'é "quoted"'}}}}
ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def _write(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text('[model]\npath = "x"\n[env.a]\npath = "m:C"\n')
    return path


def test_the_resolved_config_reads_back_as_itself() -> None:
    resolved = config.from_tree(TREE)
    assert config.from_tree(tomllib.loads(config.dump(resolved))) == resolved


def test_overrides_are_parsed_as_toml_and_bare_words_are_strings(tmp_path: Path) -> None:
    resolved = config.load(
        _write(tmp_path), ["staleness.max_staleness=0", "run.dir=out/a", "trainer.betas=[0.9, 0.99]"]
    )
    assert resolved.staleness.max_staleness == 0
    assert resolved.run.dir == "out/a"
    assert resolved.trainer.betas == (0.9, 0.99)


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        ("123", "123"),
        ("007", "007"),
        ("-1", "-1"),
        ("1e3", "1e3"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("true", "true"),
        ("nan", "nan"),
        ("2024-01-01", "2024-01-01"),
        ("12:30:00", "12:30:00"),
        ("[a]", "[a]"),
        ('["a", 1]', '["a", 1]'),
        ("{a = 1}", "{a = 1}"),
        ("7 # seven", "7 # seven"),
        ("1\ndir = 2", "1\ndir = 2"),
        ("a=b", "a=b"),
        ("", ""),
        ('"quoted"', "quoted"),
        ("'123'", "123"),
        ('"a\\tb"', "a\tb"),
    ],
)
def test_a_setting_that_is_text_is_taken_as_written(tmp_path: Path, written: str, taken: str) -> None:
    resolved = config.load(_write(tmp_path), [f"run.dir={written}", f"model.path={written}"])
    assert (resolved.run.dir, resolved.model.path) == (taken, taken)
    assert config.from_tree(tomllib.loads(config.dump(resolved))) == resolved


def test_other_overrides_keep_their_types(tmp_path: Path) -> None:
    overrides = ["env.x={path = 'a:B', args = {n = 1}}", "env.x.weight=2", "env.x.args.day=2024-01-01"]
    overrides += [
        "env.x.args.deep={k = [1, 'b']}",
        "env.x.args.word=bare",
        "env.x.args.limit=inf",
        "env.x.args.on=true",
    ]
    resolved = config.load(_write(tmp_path), overrides)
    env = resolved.env["x"]
    assert (env.path, env.weight) == ("a:B", 2.0)
    day = datetime.date(2024, 1, 1)
    assert env.args == {"n": 1, "day": day, "deep": {"k": [1, "b"]}, "word": "bare", "limit": math.inf, "on": True}
    assert config.from_tree(tomllib.loads(config.dump(resolved))) == resolved


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("env.a.path=7", "env.a.path = '7': an import path is written package.module:name"),
        ("staleness.max_stalness=1", "did you mean 'max_staleness'"),
        ("stalness.window=1", "did you mean 'staleness'"),
        ("rollout.batch_size=9", "batch_size = 9 is not a multiple of group_size = 8"),
        ("rollout.batch_size=8.0", "expected int"),
        ("staleness.max_staleness=-1", "must be at least 0"),
        ("staleness.max_age=1", "max_age = 1 is below max_staleness = 2"),
        ("staleness.max_concurrent=4", "max_concurrent = 4 is below rollout.group_size = 8"),
        ("staleness.gate=shop", "must be one of admission, ship"),
        (
            "staleness.gate=ship staleness.queue_size=8 staleness.max_concurrent=32",
            "= 40 is below rollout.batch_size = 64",
        ),
        ("staleness.gate=ship staleness.max_age=4", "max_age must be at least 5; or over_age = drop"),
        ("staleness.gate=ship staleness.adaptive=true", "needs staleness.gate = 'admission'"),
        ("trainer.learning_rate=nan", "trainer.learning_rate"),
        ("trainer.learning_rate=true", "expected float"),
        ("trainer.betas=[0.9]", "expected tuple"),
        ("env.a.weight=0", "must be above 0"),
        ("env.b.weight=1", "env.b.path is needed"),
        ("env.a.path=nothing", "package.module:name"),
        ("run.steps", "section.key=value"),
        ("run=3", "section.key=value"),
        ("topology.dp_replicate=2", "dp_replicate"),
        ("inference.tensor_parallel=2", "needs inference.engine = 'vllm'"),
        ("trainer.clip_high=nan", "trainer.clip_high = nan: must be a finite number"),
        ("trainer.entropy=nan", "trainer.entropy = nan"),
        ("trainer.advantage_scale=nan", "trainer.advantage_scale = nan"),
        ("eval.solved_at=nan", "eval.solved_at = nan"),
        ("lora.rank=4 lora.alpha=nan", "lora.alpha = nan"),
        ("trainer.learning_rate=inf", "trainer.learning_rate = inf: must be a finite number"),
        ("rollout.temperature=inf", "rollout.temperature = inf"),
        ("env.a.weight=inf", "env.a.weight = inf"),
        ("run.stall_timeout_s=inf", "run.stall_timeout_s = inf"),
        ("run.shutdown_s=1e308", "run.shutdown_s = 1e+308: must be at most 1e+08 s"),
        ("trainer.learning_rate=1" + "0" * 400, "expected float"),
        ('run.dir="a\\u0000b"', "run.dir = 'a\\x00b': a text without NUL"),
        ("trainer.max_staleness=1", "did you mean 'staleness.max_staleness'?"),
        ("trainer.tensor_parallel=2", "did you mean 'topology.tensor_parallel' or 'inference.tensor_parallel'?"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        config.load(_write(tmp_path), override.split())
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_bound_that_is_infinite_is_none(tmp_path: Path) -> None:
    resolved = config.load(_write(tmp_path), ["trainer.grad_clip=inf", "trainer.importance_high=inf"])
    assert (resolved.trainer.grad_clip, resolved.trainer.importance_high) == (math.inf, math.inf)
    assert config.from_tree(tomllib.loads(config.dump(resolved))) == resolved


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["staleness.on_update=drain", "staleness.gate=ship"], "needs staleness.gate = 'admission'"),
        (["inference.deterministic=true", "inference.engine=vllm"], "needs inference.engine = 'native'"),
        (["lora.rank=4", "lora.alpha=0"], "lora.alpha = 0.0: must be above 0"),
        (["lora.rank=4", "lora.alpha=-16"], "lora.alpha = -16.0: must be above 0"),
        (["lora.rank=4", "lora.targets=[]"], "name at least one linear layer"),
        (["lora.sync=adapter"], "lora.sync = 'adapter' with lora.rank = 0"),
        (["lora.rank=4", "lora.sync=adapter", "weights.mode=delta"], "with weights.mode = 'delta': additions change"),
        (["lora.rank=4", "lora.sync=adapter", "weights.mode=disk"], "use weights.mode = 'full', or lora.sync"),
        (["weights.receive=in_place", "inference.engine=vllm"], "weights.receive = 'in_place'"),
        (["weights.receive=in_place", "weights.mode=disk"], "weights.receive = 'in_place'"),
        (["weights.receive=in_place", "lora.rank=4", "lora.sync=adapter"], "weights.receive = 'in_place'"),
    ],
)
def test_settings_that_exclude_each_other_are_named(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.load(_write(tmp_path), overrides)


@pytest.mark.parametrize("override", ["rollout.top_p=0.9", "rollout.top_k=5", "rollout.temperature=2.5"])
def test_training_samples_of_vllm_are_of_the_whole_distribution(tmp_path: Path, override: str) -> None:
    config.load(_write(tmp_path), [override])
    with pytest.raises(ValueError, match=r"vLLM|'vllm'"):
        config.load(_write(tmp_path), [override, "inference.engine=vllm"])


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.toml: no such file"):
        config.load(tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ValueError, match=r"broken\.toml: "):
        config.load(broken)


def test_old_data_without_a_correction_is_warned_about() -> None:
    uncorrected = config.from_tree(TREE | {"trainer": {"loss": "ppo"}})
    assert "max_staleness = 2" in config.warnings(uncorrected)[0]
    assert (
        config.warnings(config.from_tree(TREE | {"trainer": {"loss": "ppo"}, "staleness": {"max_staleness": 0}})) == []
    )


NO_UNIT = {"seed", "rank"}  # whole numbers that count nothing


@pytest.mark.parametrize("section", config.sections())
def test_every_setting_tells_its_meaning_its_unit_and_what_it_moves(section: str) -> None:
    cls, metrics = config.sections()[section], (ROOT / "docs" / "metrics.md").read_text()
    docs = config.field_docs(cls)
    assert docs.keys() == cls.__dataclass_fields__.keys()
    for field in dataclasses.fields(cls):
        doc = docs[field.name]
        assert doc.meaning and doc.moves and (doc.unit != "-" or field.type != "int" or field.name in NO_UNIT), field
        assert [name for name in re.findall("`[^`]+`", doc.moves) if name not in metrics] == [], field.name


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_shipped_configs_are_valid_and_nothing_in_them_is_warned_of(path: Path) -> None:
    assert config.warnings(config.load(path), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}) == []  # as launch/ sets it


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (["staleness.max_staleness=8"], ["in flight: 64 rollouts at most = max_concurrent; (S+1)·B = 576 may be"]),
        (["staleness.max_concurrent=4000"], ["in flight: 192 rollouts at most = (S+1)·B"]),
        (["staleness.max_concurrent=192"], ["in flight: 192 rollouts at most = max_concurrent = (S+1)·B"]),
        (["staleness.gate=ship"], ["in flight: 64 rollouts at most = max_concurrent"]),
        ([], ["in flight: 64", "objective: decoupled, ratio clipped to 0.8 … 1.28, token_mean, advantages of grpo"]),
        (
            ["trainer.loss=gspo"],
            ["in flight: 64", "objective: gspo, ratio clipped to 0.9997 … 1.0004, sequence_mean, "],
        ),
        (
            ["checkpoint.every=0"],
            ["in flight: 64", "objective: ", "checkpoint.every = 0: nothing is saved before the end"],
        ),
    ],
)
def test_what_binds_is_said_at_the_start(tmp_path: Path, settings: list[str], lines: list[str]) -> None:
    said = config.limits(config.load(_write(tmp_path), settings))
    assert said[0].startswith("age bound: age ≤ ")
    assert all(line.startswith(begins) for line, begins in zip(said[1:], lines, strict=False))
    assert len(said) == (4 if "checkpoint.every=0" in settings else 3)
    assert "(S+1)·B" in said[1] or "gate=ship" in str(settings)


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            "staleness.max_concurrent=192",
            ["inference.max_slots = 64 on 1 engine for 192 rollouts in flight: .*to 192, or"],
        ),
        (
            "staleness.max_concurrent=4000 inference.max_slots=192",
            ["max_concurrent = 4000 is never .* lower it to 192"],
        ),
        ("staleness.max_concurrent=4000 staleness.gate=ship inference.max_slots=4000", []),
        (
            "staleness.max_concurrent=130 topology.inference=2",
            ["max_slots = 64 on 2 engines for 130 .* raise it to 65, or"],
        ),
        ("staleness.max_age=8", ["max_age = 8 does nothing, for age ≤ 2 = S holds without it"]),
        ("staleness.max_age=2", []),
        (
            "staleness.max_age=2 staleness.over_age=drop staleness.gate=ship",
            [r"gate = 'ship' with max_age = 2: .*\(max_age \+ 1\)·B = 192 .* raise max_age to 4, or lower .* to 0"],
        ),
        ("staleness.max_age=4 staleness.over_age=drop staleness.gate=ship", []),
        ("staleness.max_age=8 staleness.order=completion", []),
        ("trainer.loss=gspo", []),
        ("trainer.loss=gspo trainer.clip_low=0.2", ["'gspo' with clip_low = 0.2, clip_high = 0.0004: "]),
        ("trainer.loss=gspo trainer.clip_low=3e-4 trainer.clip_high=4e-4", []),
        ("trainer.loss=gspo trainer.aggregation=sequence_mean", []),
        ("trainer.loss=gspo trainer.aggregation=token_mean", ["long ones then weigh more; leave .* out"]),
        ("trainer.loss=gspo trainer.aggregation=constant", ["'gspo' with trainer.aggregation = 'constant'"]),
        ("trainer.loss=gspo trainer.correction=none", []),
        ("trainer.loss=gspo trainer.correction=mask", ["write trainer.correction_level = 'geometric'"]),
        ("trainer.loss=gspo trainer.correction=mask trainer.correction_level=geometric", []),
        ("trainer.loss=cispo", []),
        ("trainer.loss=cispo trainer.clip_dual=3", ["clip_dual = 3.0 with trainer.loss = 'cispo'"]),
        ("trainer.loss=cispo trainer.importance_high=5", ["nothing to truncate; write trainer.correction = 'mask'"]),
        ("trainer.loss=decoupled trainer.importance_high=5", []),
        ("trainer.clip_high=0.3", ["clip_high = 0.3 with .* is 1, so that nothing is ever clipped; write .* = 2"]),
        ("trainer.clip_high=0.3 trainer.num_epochs=2", []),
        ("trainer.loss=reinforce", []),
        ("trainer.loss=reinforce trainer.clip_dual=3", ["it clips nothing; write trainer.loss = 'ppo'"]),
        ("trainer.loss=reinforce trainer.correction=none", ["no importance weight corrects"]),
        (
            "trainer.loss=reinforce trainer.correction=none trainer.num_epochs=2 staleness.max_staleness=0"
            " staleness.max_concurrent=64",
            ["with 2 optimizer steps per batch: .* write trainer.correction = 'truncate'"],
        ),
        ("trainer.loss=reinforce trainer.correction=none staleness.max_staleness=0", []),
        ("trainer.reject_above=0.3", ["nothing is rejected; write trainer.reject = 'off_policy'"]),
        ("trainer.kl=k1 trainer.kl_coefficient=0.1", ["regularises nothing; write trainer.kl = 'k2' or 'k3', or"]),
        ("trainer.kl=k2 trainer.kl_coefficient=0.1", []),
        ("trainer.kl=k1 trainer.kl_in=reward trainer.kl_coefficient=0.1", []),
        ("trainer.kl_in=reward trainer.kl_coefficient=0.1", ["rewards pay k1, .* write trainer.kl = 'k1'"]),
        ("trainer.kl=k2 trainer.kl_in=reward trainer.kl_coefficient=0.1", ["trainer.kl = 'k2' with .* 'reward'"]),
        ("trainer.kl=k1", ["trainer.kl = 'k1' with trainer.kl_coefficient = 0.0: there is no KL; write"]),
        ("trainer.advantage=reinforce_pp trainer.filter_zero_spread=false", []),
        ("trainer.advantage=reinforce_pp_baseline trainer.aggregation=sequence_mean", ["write .* = 'token_mean'"]),
        ("trainer.advantage=reinforce_pp_baseline trainer.loss=gspo", ["write trainer.advantage = 'grpo'"]),
        (
            "trainer.advantage=gae trainer.filter_zero_spread=false trainer.advantage_scale=2",
            ["a standard deviation of"],
        ),
        ("trainer.advantage=reinforce_pp_baseline trainer.advantage_scale=2", []),
        ("topology.trainer=32 trainer.num_minibatches=4", ["16 rollouts for 32 shares .* lower it to 2"]),
        ("topology.trainer=32 topology.tensor_parallel=2 trainer.num_minibatches=4", []),
    ],
)
def test_settings_that_do_not_fit_each_other_are_warned_of(tmp_path: Path, settings: str, lines: list[str]) -> None:
    said = config.warnings(config.load(_write(tmp_path), settings.split()), {})
    assert len(said) == len(lines)
    assert all(re.search(pattern, line) and "\n" not in line for line, pattern in zip(said, lines, strict=True))


def test_the_dapo_preset_has_the_four_parts_of_the_paper() -> None:
    trainer = config.load(next(path for path in CONFIGS if path.stem == "tiny_dapo_cpu")).trainer
    assert (trainer.clip_low, trainer.clip_high) == (0.2, 0.28)  # clip-higher
    assert trainer.aggregation == "token_mean"
    assert trainer.filter_zero_spread  # dynamic sampling
    assert trainer.overlong_buffer > 0
    assert (trainer.mask_truncated, trainer.kl_coefficient, trainer.entropy) == (True, 0.0, 0.0)


def test_a_stop_that_torchrun_would_cut_short_is_warned_of() -> None:
    long = config.from_tree(TREE | {"run": {"shutdown_s": 60}})
    assert "torchrun kills every rank 30 s after" in config.warnings(long, {})[0]
    assert config.warnings(long, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "65"}) == []
    assert config.warnings(config.from_tree(TREE), {}) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.path="], "model.path = '': name a"),
        (["model.path=", "model.make=m:make"], "model.path = '': name a"),
        (["model.path=/nowhere"], "model.path = '/nowhere': no such folder"),
    ],
)
def test_a_model_folder_that_is_not_there_is_refused(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.check_model_folder(config.load(_write(tmp_path), settings))
