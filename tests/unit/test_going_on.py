"""A resume as the leading rank prepares it, on real folders: what goes on, what is told, what is refused by name."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spmd_rl import config as config_module
from spmd_rl.demo import tiny_model
from spmd_rl.ranks import program
from spmd_rl.ranks.resume import model_config
from spmd_rl.storage import checkpoint
from spmd_rl.storage.run_dir import RunDir
from tests.unit.test_resume import state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CPU = torch.device("cpu")
ROWS = [{"question": f"{i}?", "answer": str(i)} for i in range(12)]
DRAWN = 7
JOB = """
[run]
steps = 9
[env.q]
path = "spmd_rl.envs.questions:Questions"
[rollout]
batch_size = 4
group_size = 2
max_tokens = 8
[inference]
max_seq_len = 64
[data]
max_solve_rate = 0.9
[eval]
every = -1
"""


def world(restarted: bool = False) -> SimpleNamespace:
    return SimpleNamespace(engine_device=CPU, device=CPU, restarted=restarted, describe=lambda: "2 ranks")


def prepared(made: config_module.Config, *, restarted: bool = False) -> program.Start:
    start = program._prepare(world(restarted), made, "job")
    program._begin(world(restarted), made, start, ())
    return start


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(root: Path, *overrides: str) -> config_module.Config:
    settings = [f'run.dir="{root}/run"', f'model.path="{root}/model"', f'env.q.args.path="{root}/rows.jsonl"']
    return config_module.load(root / "job.toml", [*settings, *overrides])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run at version 2 that has drawn seven of twelve rows."""
    root = tmp_path_factory.mktemp("going_on") / "whole"
    tiny_model.make(root / "model")
    write(root / "rows.jsonl", ROWS)
    write(root / "eval.jsonl", ROWS)
    (root / "job.toml").write_text(JOB)
    made = config(root)
    start = prepared(made)
    drawn = [next(start.tasks.train).task_id for _ in range(DRAWN)]
    words, rollouts = state(2)
    words |= {"tasks": start.tasks.train.state(), "facts": start.facts, "model": model_config(made)}
    words["path"]["unfinished"][0]["task"] = {"env": "q", "task_id": "0", "data": {}}
    run_dir = RunDir(start.run_dir)
    folder = checkpoint.aside(run_dir.checkpoints, 2)
    checkpoint.save_trainer({"w": torch.zeros(2)}, folder / "trainer", None).result()
    checkpoint.save_orchestrator(words, rollouts, folder)
    checkpoint.complete(run_dir.checkpoints, 2, {})
    run_dir.metrics.write_text("")
    return root, drawn


@pytest.fixture
def lineage(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "copy")
    return tmp_path / "copy", whole[1]


def rows_with(number: int) -> list[dict]:
    return [row | {"answer": "99"} if i == number else row for i, row in enumerate(ROWS)]


REFUSED = [
    ("seed", ["run.seed=7"], None, "run.seed = 7, it was 0: .*data.restart_at=2"),
    ("weight", ["env.q.weight=2"], None, "env.q.weight = 2.0, it was 1.0: .*data.restart_at=2"),
    ("renamed", ["env.q.weight=1", "env.r.path=spmd_rl.envs.echo:Echo"], None, "env.r.weight = 1.0, it was not there"),
    ("holdout", ["env.q.args.holdout=3"], None, "env.q: holdout = 3, it was 0: .*data.restart_at=2"),
    ("reversed", [], ROWS[::-1], f"env.q: the {DRAWN} tasks that were drawn are others now, .*data.restart_at=2"),
    ("shorter", [], ROWS[:-1], "env.q: 11 rows to train on, there were 12 when the epoch under way began"),
    ("columns", ['env.q.args.question="answer"'], None, "env.q: the 7 tasks that were drawn are others now"),
    ("template", ["model.template.thinking=true"], None, 'model.template = {"thinking": true}, it was {}'),
    ("group", ["rollout.group_size=4"], None, "group of 2 rollouts, rollout.group_size = 4"),
    ("critic", ["trainer.advantage=gae"], None, "critic is own, it was none"),
    ("lora", ["lora.rank=2"], None, "holds a model with lora = None"),
    ("restart", ["data.restart_at=1"], None, "data.restart_at = 1, but the run goes on from version 2"),
]


@pytest.mark.parametrize(("settings", "rows", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_another_value_is_refused_by_name_and_nothing_is_touched(lineage, settings, rows, message):
    root, _ = lineage
    if rows:
        write(root / "rows.jsonl", rows)
    before = {path: path.stat().st_mtime_ns for path in (root / "run").rglob("*")}
    with pytest.raises(ValueError, match=message) as refused:
        prepared(config(root, *settings))
    assert "\n" not in str(refused.value)
    after = {path: path.stat().st_mtime_ns for path in (root / "run").rglob("*")}
    assert {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} <= {
        root / "run" / ".owner"
    }


def test_a_drawn_row_that_is_edited_in_place_is_refused_and_one_that_is_not_drawn_goes_on(lineage):
    root, drawn = lineage
    write(root / "rows.jsonl", rows_with(int(drawn[3])))
    with pytest.raises(ValueError, match=r"env\.q: the 7 tasks that were drawn are others now, by content"):
        prepared(config(root))
    (undrawn, *_) = {str(i) for i in range(len(ROWS))} - set(drawn)
    write(root / "rows.jsonl", rows_with(int(undrawn)))
    tasks = prepared(config(root)).tasks.train
    left = [next(tasks) for _ in range(len(ROWS) - DRAWN)]
    assert {task.task_id for task in left} == {str(i) for i in range(len(ROWS))} - set(drawn)
    assert {task.task_id for task in left if task.data["answer"] == "99"} == {undrawn}


ALLOWED = [
    (["trainer.loss=ppo"], ["trainer.loss decoupled → ppo"]),
    (
        ["trainer.betas=[0.8,0.9]", "run.stall_timeout_s=5"],
        ["run.stall_timeout_s 600.0 → 5.0", "trainer.betas [0.9, 0.95] →"],
    ),
    (["env.q.args.max_epochs=5"], ["env.q.args.max_epochs (unset) → 5"]),
    (["data.max_solve_rate=0.5"], ["data.max_solve_rate 0.9 → 0.5"]),
    (
        ["inference.max_seq_len=99", "model.dtype=bfloat16"],
        ["inference.max_seq_len 64 → 99", "model.dtype auto → bfloat16"],
    ),
    (["topology.trainer=2"], ["topology.trainer 1 → 2"]),
    (["eval.every=0", "env.q.args.eval_path=@/eval.jsonl"], ["eval.every -1 → 0", "evaluations are of other tasks"]),
    ([], ["changed: env.q.args.path /", "; model.path /"]),  # the same content in another place
]


@pytest.mark.parametrize(("settings", "lines"), ALLOWED)
def test_what_changes_nothing_that_was_drawn_goes_on_and_is_told(lineage, capsys, settings, lines):
    root, drawn = lineage
    settings = [setting.replace("@", str(root)) for setting in settings]
    write(root / "rows.jsonl", [*ROWS, {"question": "new?", "answer": "13"}])  # joins with the next epoch
    start = prepared(config(root, *settings))
    said = capsys.readouterr().out
    assert "resuming from" in said and all(line in said for line in lines), said
    assert start.version == 2 and start.tasks.train.cursor == DRAWN
    left = [next(start.tasks.train).task_id for _ in range(len(ROWS) - DRAWN + 13)]
    assert sorted(drawn + left[: len(ROWS) - DRAWN], key=int) == [str(i) for i in range(12)]
    assert sorted(left[len(ROWS) - DRAWN :], key=int) == [str(i) for i in range(13)]
    starts = json.loads((root / "run" / "run.json").read_text())["starts"]
    assert [entry["version"] for entry in starts] == [0, 2]
    assert (root / "run" / "config.toml").read_text() == (root / "run" / "configs" / "start_1.toml").read_text()


def test_new_data_start_at_0_on_purpose_once(lineage, capsys):
    root, _ = lineage
    write(root / "rows.jsonl", ROWS[::-1])
    start = prepared(config(root, "data.restart_at=2", "run.seed=7", "env.q.weight=2"))
    said = capsys.readouterr().out
    assert start.tasks.train.cursor == 0
    assert "data.restart_at -1 → 2" in said and "the data start at 0, 7 tasks were drawn before" in said
    assert json.loads((root / "run" / "run.json").read_text())["starts"][1]["changed"][0] == "data.restart_at -1 → 2"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_run_that_left_no_checkpoint_is_begun_anew_beside_what_it_left(lineage, capsys, restarted):
    root, _ = lineage
    shutil.rmtree(root / "run" / "checkpoints")
    run_dir = RunDir(root / "run")
    run_dir.metrics.write_text(json.dumps({"kind": "step", "version": 1}) + "\n")
    (run_dir.batches / "step_0.json").write_text("{}")
    run_dir.model.mkdir()
    run_dir.summary.write_text("{}")
    start = prepared(config(root, "run.seed=7"), restarted=restarted)
    assert (start.version, start.restored, start.tasks.train.cursor) == (0, None, 0)
    assert f"it lies in {root}/run/abandoned/0 now" in capsys.readouterr().out
    left = {path.name for path in (root / "run" / "abandoned" / "0").iterdir()}
    assert left == {"metrics.jsonl", "step_0.json", "model", "summary.json"}
    assert not run_dir.model.exists() and not run_dir.summary.exists() and run_dir.metrics.read_text() == ""


@pytest.mark.parametrize("text", [None, '{"format": 99, "starts": []}'])
def test_a_directory_of_another_format_is_refused(lineage, text):
    root, _ = lineage
    (root / "run" / "run.json").unlink()
    if text:
        (root / "run" / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run is no run directory that this version can read: .*run\.json"):
        prepared(config(root))
