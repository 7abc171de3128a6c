"""What a run starts from, and what it refuses to start from."""

import copy
import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from spmd_rl import config as config_module
from spmd_rl.config.age_bound import age_bound
from spmd_rl.files.atomic_folder import written_aside
from spmd_rl.orchestrator.difficulty import Difficulty
from spmd_rl.orchestrator.dispatcher import Dispatcher
from spmd_rl.orchestrator.gate import AdaptiveAdmission, Gate
from spmd_rl.orchestrator.ledger import Ledger
from spmd_rl.orchestrator.order import make_order
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.state import from_json, to_json
from spmd_rl.orchestrator.train_path import PathState, TrainPath
from spmd_rl.orchestrator.train_sink import TrainSink
from spmd_rl.packing import packing
from spmd_rl.ranks import resume
from spmd_rl.storage import batch_log, checkpoint, continuation, history
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.types import Batch, Group, GroupWork, Rollout, Task
from tests.unit.test_checkpoint import mutate

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SEEDS = [range(100), pytest.param(range(100, 300), marks=pytest.mark.full)]
FACTS = {"run.seed": 0, continuation.WEIGHTS: "w", continuation.EVALUATED: "e"}
MODEL = {"hidden_size": 64, "transformers_version": "5"}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(MODEL | {"dtype": "float32"}))
    return config_module.from_tree(
        {
            "run": {"steps": 9},
            "model": {"path": str(model)},
            "env": {"e": {"path": "a:b"}},
            "rollout": {"batch_size": 4, "group_size": 2},
        }
    )


def rollout(ticket: int) -> Rollout:
    made = Rollout(env="e", task_id="t", group_id=ticket // 2, sample=ticket % 2, ticket=ticket, finish_reason="stop")
    made.append(np.arange(3), np.zeros(3), np.full(3, 1))
    return made


def state(version: int) -> tuple[dict[str, object], list[Rollout]]:
    advantages = np.array([0.5, -0.5], np.float32)
    group = Group(
        group_id=6, first_ticket=12, admission_version=1, rollouts=[rollout(12), rollout(13)], advantages=advantages
    )
    work = GroupWork(group_id=7, first_ticket=14, size=2, task=Task(env="e", task_id="t", data={"n": 1}), version=1)
    batch = Batch(index=version, rollouts=[rollout(t) for t in range(8, 12)], advantages=np.tile(advantages, 2))
    ledger = Ledger()
    ledger.admit(16)
    ledger.settle("trained", 8, 24)
    ledger.waiting_tokens = 18
    path = PathState(
        version=version,
        next_ticket=16,
        next_group=8,
        unfinished=[work],
        groups=[group],
        batches=[batch],
        ledger=ledger.state(),
    )
    words, rollouts = to_json(path)
    return {
        "path": words,
        "tasks": {"cursor": 8, "sources": {"e": {"drawn": 8, "digest": "d", "state": None}}},
        "model": MODEL,
        "weights": {"layout": "x", "checksums": [1, 2]},
    } | {
        "difficulty": [("e", "t", 0.5)],
        "admission_limit": 4.0,
        "data_from": 0,
        "facts": FACTS,
    }, rollouts


def save(run_dir: RunDir, version: int = 2, *, exported: bool = True) -> Path:
    import torch

    folder = checkpoint.aside(run_dir.checkpoints, version)
    checkpoint.save_trainer({"w": torch.zeros(2)}, folder / "trainer", None).result()
    words, rollouts = state(version)
    checkpoint.save_orchestrator({**words, "exported": exported}, rollouts, folder)
    return checkpoint.complete(run_dir.checkpoints, version, {})


@pytest.fixture
def run_dir(tmp_path, config):
    made = RunDir(tmp_path)
    made.create()
    history.add(made, config, version=0, time="2026-01-01T00:00:00Z", weights="w", resumed=False)
    return made


def start(run_dir: RunDir, config, *, restarted: bool = False, **run) -> tuple[int, Path | None]:
    tree = {"run": {"steps": 9, **run}, "model": {"path": config.model.path}, "env": {"e": {"path": "a:b"}}}
    tree |= {"rollout": {"batch_size": 4, "group_size": 2}}
    return resume.starting_point(run_dir, config_module.from_tree(tree), restarted=restarted)


def test_a_fresh_directory_starts_at_version_0_and_must_says_no(run_dir, config):
    assert start(run_dir, config) == (0, None)
    assert start(run_dir, config, resume="never") == (0, None)
    with pytest.raises(ValueError, match="nothing to resume: no complete checkpoint"):
        start(run_dir, config, resume="must")


def test_the_newest_complete_checkpoint_is_taken(run_dir, config):
    save(run_dir, 2)
    newest = save(run_dir, 4)
    (save(run_dir, 6) / "COMPLETE").unlink()
    (run_dir.checkpoints / "step_8.tmp").mkdir()
    assert start(run_dir, config) == (4, newest)
    assert not (run_dir.checkpoints / "step_8.tmp").exists()


def test_a_used_directory_is_never_started_afresh_by_mistake(run_dir, config):
    run_dir.metrics.write_text("")
    for restarted in (False, True):
        assert start(run_dir, config, restarted=restarted) == (0, None)  # begun anew, beside what is there
    with pytest.raises(ValueError, match="nothing to resume"):
        start(run_dir, config, resume="must")
    save(run_dir)
    with pytest.raises(ValueError, match="holds a run already"):
        start(run_dir, config, resume="never")
    assert start(run_dir, config, restarted=True, resume="never")[0] == 2


def test_what_is_left_of_a_checkpoint_is_not_trained_past(run_dir, config):
    (save(run_dir) / "COMPLETE").unlink()
    for restarted in (False, True):
        with pytest.raises(ValueError, match="step_2 has no COMPLETE, so it is not whole: remove it to begin anew"):
            start(run_dir, config, restarted=restarted)


def test_a_directory_belongs_to_one_job_until_its_process_ends(run_dir):
    claims = f"RunDir(Path({str(run_dir.path)!r})).claim(); print('held'); input()"
    code = f"from pathlib import Path; from spmd_rl.storage.run_dir import RunDir; {claims}"
    words = [sys.executable, "-uc", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"is in use by process {other.pid} on \S+: end that job"):
            run_dir.claim()
        other.kill()
    run_dir.claim()


FOREIGN = [
    "weights/mine.safetensors",
    "model/config.json",
    "checkpoints/step_3.tmp/x",
    "summary.json",
    "notes.txt",
    ".git/HEAD",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_with_files_of_others_is_refused_and_left_as_it_is(tmp_path, name):
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(
        ValueError, match=rf"mine has files that no run made \({name.split('/')[0]}\), .*choose a new folder"
    ):
        RunDir(tmp_path / "mine").claim()
    assert [path for path in (tmp_path / "mine").rglob("*") if path.is_file()] == [file] and file.read_text() == "mine"


def test_a_folder_that_links_to_files_of_others_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_1.tmp").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"files that no run made \(checkpoints\)"):
        RunDir(tmp_path / "run").claim()


def test_folders_without_files_and_what_a_start_left_that_came_to_nothing_are_used(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / ".owner").write_text("process 1")
    RunDir(tmp_path / "run").claim()


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path, run_dir):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("mine")
    for name in ("step_1", "step_2.tmp"):
        (run_dir.checkpoints / name).symlink_to(tmp_path / "mine")
    run_dir.weights.symlink_to(tmp_path / "mine")
    save(run_dir, 5)
    checkpoint.tidy(run_dir.checkpoints)
    checkpoint.remove_old(run_dir.checkpoints, 1)
    run_dir.create()
    with written_aside(run_dir.model, replace=True) as aside:
        (aside / "config.json").write_text("{}")
    assert (tmp_path / "mine" / "x").read_text() == "mine" and not run_dir.weights.exists()
    assert [path.name for path in run_dir.checkpoints.iterdir()] == ["step_5"]


def test_a_finished_run_has_nothing_left_unless_its_model_or_its_last_evaluation_is_missing(run_dir, config):
    folder = save(run_dir, 2)
    assert start(run_dir, config, steps=2) == (2, folder)
    run_dir.model.mkdir()
    assert start(run_dir, config, steps=2) == (2, folder)
    (run_dir.evals / "eval_2.json").write_text("{}")
    with pytest.raises(ValueError, match="nothing is left to train"):
        start(run_dir, config, steps=2)


def test_a_model_of_an_earlier_end_is_not_taken_for_that_of_a_run_that_was_stopped_at_its_last_step(run_dir, config):
    folder = save(run_dir, 2, exported=False)
    run_dir.model.mkdir()
    (run_dir.evals / "eval_2.json").write_text("{}")
    assert start(run_dir, config, steps=2) == (2, folder)


@pytest.mark.parametrize(("version", "left"), [(1, [0, 1]), (0, [0]), (-1, [])])
def test_what_will_be_made_again_is_moved_aside(run_dir, version, left):
    """Batch v leads to version v + 1; -1 is a start without a checkpoint, which makes the first evaluation too."""
    lines = [json.dumps({"kind": kind, "version": v}) + "\n" for v in range(3) for kind in ("eval", "interval")]
    run_dir.metrics.write_text("".join(lines))
    for v in range(3):
        (run_dir.batches / f"step_{v}.json").write_text("")
        (run_dir.evals / f"eval_{v}.json").write_text("")
    run_dir.abandon_after(version)
    assert [json.loads(line)["version"] for line in run_dir.metrics.read_text().splitlines()] == sorted(left * 2)
    assert sorted(path.name for path in run_dir.evals.iterdir()) == [f"eval_{v}.json" for v in left]
    assert sorted(path.name for path in run_dir.batches.iterdir()) == [f"step_{v}.json" for v in left[:-1]]
    aside = {path.name for path in (run_dir.path / "abandoned" / "0").iterdir()}
    assert aside >= {f"eval_{v}.json" for v in range(3) if v not in left} | {"step_2.json", "metrics.jsonl"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"rollout": {"batch_size": 4, "group_size": 4}}, r"holds a group of 2 rollouts, rollout.group_size = 4"),
        (
            {"data": {"restart_at": 1}},
            "data.restart_at = 1, but the run goes on from version 2 with data",
        ),
        ({"lora": {"rank": 4}}, "holds a model with lora = None, here it is {'rank': 4, 'alpha': 16.0, 'targets': "),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_config_is_refused(run_dir, config, tree, message):
    folder = save(run_dir)
    base = {"model": {"path": config.model.path}, "env": {"e": {"path": "a:b"}}, "run": {"steps": 9}}
    base |= {"rollout": {"batch_size": 4, "group_size": 2}}
    other = config_module.from_tree({**base, **tree})
    with pytest.raises(ValueError, match=message) as refused:
        resume.starting_point(run_dir, other, restarted=False)
    assert folder.name in str(refused.value)


def test_another_model_is_refused_by_what_differs(run_dir, config, tmp_path):
    save(run_dir)
    model = tmp_path / "other"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"hidden_size": 128}))
    tree = {"model": {"path": str(model)}, "env": {"e": {"path": "a:b"}}}
    with pytest.raises(ValueError, match="hidden_size = 64, here it is 128"):
        resume.starting_point(run_dir, config_module.from_tree(tree), restarted=False)


@pytest.mark.parametrize("seeds", SEEDS)
def test_whatever_the_state_says_it_is_taken_or_refused_in_a_line(run_dir, config, tmp_path, seeds):
    """As by somebody who also mends the checksums."""
    whole = save(run_dir)
    words = json.loads((whole / "orchestrator.json").read_text())
    for seed in seeds:
        rng = random.Random(seed)
        mutated = copy.deepcopy(words)
        spot, key = rng.choice(list(places(mutated)))
        if rng.random() < 0.3:
            del spot[key]
        else:
            spot[key] = rng.choice([None, -1, 3, 1e300, "x", [], {}, [1], {"a": 1}, True])
        folder = tmp_path / f"fuzz{seed}" / "step_2"
        shutil.copytree(whole, folder)
        (folder / "orchestrator.json").write_text(json.dumps(mutated))
        try:
            resume.check_fits(folder, config)
        except ValueError as error:
            assert str(folder) in str(error), seed
            assert "\n" not in str(error), seed
        else:
            restored(folder)


def restored(folder: Path) -> None:
    """As the orchestrator does it."""
    words, rollouts = checkpoint.load_orchestrator(folder)
    path = from_json(words["path"], rollouts)
    policy = Policy(path.version)
    gate = Gate(policy, max_staleness=2, batch_size=4, max_concurrent=8)
    submit = list[GroupWork]().append
    dispatcher = Dispatcher(tasks=iter(()), gate=gate, policy=policy, submit=submit, group_size=2)
    sink = TrainSink(
        batch_size=4,
        group_size=2,
        advantages=lambda rewards, usable: rewards,
        order=make_order("admission"),
        bound=age_bound(gate="admission", order="admission", max_staleness=2, batch_size=4, group_size=2),
    )
    ledger = Ledger()
    TrainPath(dispatcher=dispatcher, sink=sink, gate=gate, policy=policy, ledger=ledger).restore(path)
    AdaptiveAdmission(max_staleness=2, batch_size=4, target_idle=0.1).restore(words.get("admission_limit", 4.0))
    difficulty = Difficulty(least=0.1, most=0.9, revisit=0.1, solved_at=1.0, seed=0)
    difficulty.restore(words.get("difficulty", ()))
    difficulty.summary()
    ledger.close_tokens()
    ledger.assert_tokens_closed()


@pytest.mark.parametrize("seeds", SEEDS)
def test_whatever_is_damaged_in_a_run_directory_no_run_starts_afresh_in_it(run_dir, config, tmp_path, seeds):
    """Taken if it is as good as before, or the checkpoint before if it is incomplete, else refused in a line."""
    save(run_dir, 1)
    save(run_dir, 2)
    for index in range(3):
        batch_log.write(run_dir.batches, Batch(index=index, rollouts=[rollout(index)], advantages=np.ones(1)), bool)
    run_dir.metrics.write_text("".join(json.dumps({"kind": "step", "version": v}) + "\n" for v in (1, 2, 3)))
    shutil.rmtree(run_dir.tensorboard)
    met = Counter()
    for seed in seeds:
        copied = RunDir(tmp_path / f"fuzz{seed}")
        shutil.copytree(run_dir.path, copied.path, ignore=shutil.ignore_patterns("fuzz*", "step_1.*"))
        done = mutate(copied.path, random.Random(seed))
        try:
            version, folder = start(copied, config)
            copied.abandon_after(version)
            checkpoint.verify(folder)
            packing.load(copied.batches / "step_0.safetensors")
        except ValueError as error:
            assert str(copied.path) in str(error), done
            assert "\n" not in str(error), done
            version = -1
        assert version in (-1, 2) or (version, done) == (1, "remove COMPLETE"), done
        met[version] += 1
    assert min(met[-1], met[2]) > len(seeds) / 10


def places(node: object):
    if isinstance(node, dict | list):
        for key in list(node) if isinstance(node, dict) else range(len(node)):
            yield node, key
            yield from places(node[key])
