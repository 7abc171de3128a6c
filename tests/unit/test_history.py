"""Each start keeps its config, a batch finds the one that trained it, and a directory of another format is refused."""

import json

import pytest

from spmd_rl import config as config_module
from spmd_rl.cli import main
from spmd_rl.storage import history
from spmd_rl.storage.run_dir import RunDir

BASE = {"model": {"path": "m"}, "env": {"a": {"path": "a:b", "args": {"path": "x.jsonl"}}}}


def config(**sections):
    return config_module.from_tree(BASE | sections)


def add(run_dir: RunDir, made: config_module.Config, version: int, resumed: bool = True) -> history.Start:
    time = "2026-01-01T00:00:00Z"
    return history.add(run_dir, made, version=version, time=time, weights="w", resumed=resumed)


@pytest.fixture
def run_dir(tmp_path):
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@pytest.mark.parametrize(
    ("began", "trained"),
    [
        ([0], {0: 0, 5: 0}),
        ([0, 4], {0: 0, 3: 0, 4: 1, 9: 1}),
        ([0, 4, 4], {3: 0, 4: 2, 9: 2}),  # the second one crashed before it saved
        ([0, 20, 10], {9: 0, 10: 2, 25: 2}),  # a checkpoint was removed to go back
        ([0, 0], {0: 1}),  # begun anew
        ([0, 4, 0, 2], {0: 2, 1: 2, 2: 3, 7: 3}),
    ],
)
def test_a_batch_was_trained_by_the_last_start_that_began_at_it_or_before(run_dir, began, trained):
    for number, version in enumerate(began):
        add(run_dir, config(run={"steps": 10 + number}), version, resumed=version > 0)
    starts = history.starts(run_dir)
    for index, number in trained.items():
        assert history.config_of(run_dir, history.start_of(starts, index)).run.steps == 10 + number
    assert config_module.load(run_dir.config).run.steps == 10 + len(began) - 1  # the newest one


def test_a_start_knows_what_changed_since_what_it_goes_on_from(run_dir):
    add(run_dir, config(), 0, resumed=False)
    assert add(run_dir, config(trainer={"loss": "ppo"}), 4).changed == ("trainer.loss decoupled → ppo",)
    again = add(run_dir, config(trainer={"loss": "ppo", "betas": (0.8, 0.9)}), 4)  # the one before saved nothing
    assert again.changed == ("trainer.betas [0.9, 0.95] → [0.8, 0.9]", "trainer.loss decoupled → ppo")
    assert add(run_dir, config(run={"dir": "elsewhere", "resume": "must"}), 4).changed == ()
    assert [start.version for start in history.starts(run_dir)] == [0, 4, 4, 4]
    assert add(run_dir, config(run={"steps": 7}), 0, resumed=False).changed == ()  # begun anew: from nothing
    assert add(run_dir, config(), 0).changed == ("run.steps 7 → 100",)  # of the checkpoint of a stop before version 1


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"env": {"b": {"path": "a:b"}}}, "env.a.path a:b → (unset)"),
        ({"env": {"a": {"path": "a:b", "weight": 2.0, "args": {"path": "x.jsonl"}}}}, "env.a.weight 1.0 → 2.0"),
        ({"env": {"a": {"path": "a:b", "args": {"path": "y.jsonl"}}}}, "env.a.args.path x.jsonl → y.jsonl"),
        ({"model": {"path": "m", "template": {"thinking": False}}}, "model.template.thinking (unset) → false"),
        ({"lora": {"rank": 8}}, "lora.rank 0 → 8"),
        ({"trainer": {"filter_zero_spread": False}}, "trainer.filter_zero_spread true → false"),
        ({"model": {"path": ""}}, 'model.path m → ""'),
    ],
)
def test_every_kind_of_setting_is_told(sections, line):
    assert line in history.changes(config(), config(**sections))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"it has no run\.json, so an earlier version wrote it"),
        (json.dumps({"format": 2, "starts": []}), "its format is 2, this version reads 1"),
        (json.dumps({"starts": []}), "KeyError|'format'"),
        ("[]", "run.json"),
        ("{", "run.json"),
        (json.dumps({"format": 1, "starts": [{"version": 0}]}), "run.json"),
    ],
)
@pytest.mark.parametrize("command", ["replay", "export"])
def test_another_format_is_refused_in_a_line(run_dir, capsys, text, message, command):
    run_dir.metrics.write_text(json.dumps({"kind": "step", "version": 1}) + "\n")
    if text is not None:
        run_dir.history.write_text(text)
    with pytest.raises(ValueError, match=message):
        history.starts(run_dir)
    more = ["--step", "0"] if command == "replay" else [str(run_dir.path.parent / "out")]
    assert main([command, str(run_dir.path), *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(run_dir.path) in line


def test_a_config_of_a_start_that_is_damaged_is_named(run_dir):
    add(run_dir, config(), 0, resumed=False)
    (run_dir.path / "configs" / "start_0.toml").write_text("[model]\npath = 3\n")
    with pytest.raises(ValueError, match=r"configs/start_0\.toml: not the config of a start"):
        add(run_dir, config(), 4)
