"""Stopped, killed and resumed runs lose nothing and repeat nothing."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from spmd_rl.storage import checkpoint
from tests.end_to_end.jobs import ROOT, environment
from tests.end_to_end.live_jobs import LiveJob, assert_whole, metrics, steps, summary, trained_tickets


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    with LiveJob(tmp_path / "run", "run.steps=1000") as job:
        job.wait_for(r"step +3/")
        job.send(signal.SIGTERM)
        job.wait()
        assert "stopping on SIGTERM" in job.output
        assert "run failed" not in job.output
    assert summary(tmp_path / "run")["status"] == "stopped"
    version, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert version >= 3
    with LiveJob(tmp_path / "run", f"run.steps={version + 3}", "--resume") as job:
        assert job.wait() == 0, job.output
        assert "resuming from" in job.output
    assert_whole(tmp_path / "run", num_steps=version + 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_comes_back_and_the_run_reaches_its_target(tmp_path, rank):
    kill_and_restart(tmp_path, rank, ranks=2)


def test_a_run_that_named_its_folder_itself_goes_on_in_it(tmp_path):
    settings = ["run.dir=", "run.steps=10", "checkpoint.every=2", "eval.every=-1"]
    with LiveJob(tmp_path, *settings, max_restarts=1, cwd=tmp_path, start=subprocess.Popen) as job:
        job.wait_for(r"step +4/")
        job.send(signal.SIGKILL, rank=1)
        assert job.wait() == 0, job.output
        assert "resuming from" in job.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert_whole(folder, num_steps=10)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_any_of_four_ranks_may_be_killed(tmp_path, rank):
    kill_and_restart(tmp_path, rank, "topology.inference=2", "topology.trainer=2", ranks=4)


def kill_and_restart(run_dir, rank, *settings, ranks):
    with LiveJob(run_dir, "run.steps=14", "checkpoint.every=3", *settings, ranks=ranks, max_restarts=1) as job:
        job.wait_for(r"step +8/")
        job.send(signal.SIGKILL, rank=rank)
        assert job.wait() == 0, job.output
        assert "start number 2" in job.output
    assert_whole(run_dir, num_steps=14)
    assert list(run_dir.glob("abandoned/0/step_*.safetensors"))


@pytest.mark.full
def test_a_run_that_is_killed_before_it_saved_starts_again_and_is_evaluated_first_once(tmp_path):
    with LiveJob(tmp_path, "run.steps=4", "eval.num_tasks=8", max_restarts=1) as job:
        job.wait_for(r"step +1/")
        job.send(signal.SIGKILL, rank=1)
        assert job.wait() == 0, job.output
    assert_whole(tmp_path, num_steps=4)
    assert [record["version"] for record in metrics(tmp_path, "eval")] == [0, 4]
    assert summary(tmp_path)["eval_first"]["eval/fraction/oldest_version"] == 0


LORA = ["lora.rank=4", "lora.sync=adapter", "trainer.learning_rate=1e-2"]


@pytest.mark.full
@pytest.mark.parametrize("lora", [[], LORA], ids=["whole", "lora"])
def test_a_resumed_run_trains_what_an_uninterrupted_one_does(tmp_path, lora):
    settings = ["run.steps=6", "checkpoint.every=3", "eval.every=3"]
    settings += ["staleness.max_staleness=0", "inference.deterministic=true", *lora]
    with LiveJob(tmp_path / "whole", *settings) as job:
        assert job.wait() == 0, job.output
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_6")
    shutil.rmtree(tmp_path / "cut" / "model")
    (tmp_path / "cut" / "evals" / "eval_3.json").unlink()
    lines = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith('{"kind": "eval", "version": 3')]
    (tmp_path / "cut" / "metrics.jsonl").write_text("".join(kept))
    with LiveJob(tmp_path / "cut", *settings) as job:
        assert job.wait() == 0, job.output
        again = "engines hold the weights of version 3 again, by checksum"
        assert (again in job.output) == (not lora)  # another machine may merge to other bits
    assert_whole(tmp_path / "cut", num_steps=6, max_staleness=0)
    assert trained_tickets(tmp_path / "cut") == trained_tickets(tmp_path / "whole")
    for name in ("trainer/loss", "trainer/grad_norm", "reward"):
        whole, cut = ([record[name] for record in steps(tmp_path / folder)] for folder in ("whole", "cut"))
        assert cut == pytest.approx(whole, abs=1e-6), name
    assert (tmp_path / "cut" / "evals" / "eval_3.json").exists()  # an evaluation that was cut off runs again


@pytest.mark.full
def test_other_weights_than_those_saved_are_not_resumed_from(tmp_path):
    """As when the trainers' half is of another moment, or is not loaded as it was saved."""
    with LiveJob(tmp_path / "run", "run.steps=6", "checkpoint.every=3", "eval.every=-1") as job:
        assert job.wait() == 0, job.output
    checkpoints = tmp_path / "run" / "checkpoints"
    mixed = checkpoint.aside(checkpoints, 3)
    (checkpoints / "step_3").rename(mixed)
    shutil.rmtree(mixed / "trainer")
    (checkpoints / "step_6" / "trainer").rename(mixed / "trainer")
    checkpoint.complete(checkpoints, 3, {})
    shutil.rmtree(checkpoints / "step_6")
    with LiveJob(tmp_path / "run", "run.steps=6", "eval.every=-1") as job:
        assert job.wait() == 1
        assert "resumed engines do not hold the weights that they held at version 3" in job.output


@pytest.mark.full
def test_a_run_resumes_on_other_numbers_of_ranks(tmp_path):
    settings = ["checkpoint.every=3"]
    with LiveJob(tmp_path, *settings, "run.steps=1000", "topology.trainer=2", ranks=3) as job:
        job.wait_for(r"step +3/")
        job.send(signal.SIGINT)
        job.wait()
    version, _ = checkpoint.newest(tmp_path / "checkpoints")
    with LiveJob(tmp_path, *settings, f"run.steps={version + 3}", "topology.inference=2", ranks=3) as job:
        assert job.wait() == 0, job.output
    assert_whole(tmp_path, num_steps=version + 3)


@pytest.mark.full
def test_ten_kills_at_random_times_cost_nothing_but_time(tmp_path):
    """100 steps of 8 prompts are four epochs of 200: in each every prompt's group is trained once."""
    rng, start = random.Random(0), 0
    settings = ["run.steps=100", "checkpoint.every=2", "eval.every=-1", "topology.trainer=2"]
    settings += ["env.fraction.path=tests.end_to_end.failing_env:Epochs"]
    with LiveJob(tmp_path, *settings, ranks=3, max_restarts=10) as job:
        for life in range(1, 11):
            job.wait_for("age bound:", after=start)
            if life % 2:
                job.wait_for("^step ", after=start)  # in the midst of training, or of saving
            time.sleep(rng.uniform(0.0, 1.5 if life % 2 else 3.0))  # else wherever it is by then
            start = len(job.lines)
            job.send(signal.SIGKILL, rank=rng.randrange(3))
        assert job.wait(limit_s=300.0) == 0, job.output
        assert "start number 11" in job.output
    assert_whole(tmp_path, num_steps=100)
    paths = sorted((tmp_path / "batches").glob("step_*.json"))
    trained = {r["ticket"]: r["task_id"] for path in paths for r in json.loads(path.read_text())["rollouts"]}
    assert trained == {ticket: str(ticket // 8 % 200) for ticket in range(4 * 200 * 8)}


@pytest.mark.full
def test_a_resume_with_other_data_is_refused_and_one_with_another_loss_is_told_and_replayed(tmp_path):
    settings = ["checkpoint.every=2", "checkpoint.keep_last=9", "eval.every=-1"]
    with LiveJob(tmp_path, *settings, "run.steps=4") as job:
        assert job.wait() == 0, job.output
    with LiveJob(tmp_path, *settings, "run.steps=8", "run.seed=7", max_restarts=1) as job:
        assert job.wait() == 1
        assert job.exit_codes == {0: 2, 1: 2}
        line = job.wait_for("^error: cannot resume from ")
        assert "run.seed = 7, it was 0: " in line and line.rstrip().endswith("with data.restart_at=4")
    with LiveJob(tmp_path, *settings, "run.steps=8", "trainer.loss=reinforce", "topology.trainer=2", ranks=3) as job:
        assert job.wait() == 0, job.output
        assert "run.steps 4 → 8; topology.trainer 1 → 2; trainer.loss decoupled → reinforce" in job.output
    with LiveJob(tmp_path, *settings, "run.steps=10", "run.seed=7", "data.restart_at=8") as job:
        assert job.wait() == 0, job.output
    history = summary(tmp_path)["history"]
    assert [start["version"] for start in history] == [0, 4, 8]
    assert [line for line in history[2]["changed"] if line.startswith(("run.seed", "data."))] == [
        "data.restart_at -1 → 8",
        "run.seed 0 → 7",
    ]
    for step in (3, 5, 9):  # of each start
        done = subprocess.run(
            [sys.executable, "-m", "spmd_rl", "replay", str(tmp_path), "--step", str(step)],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        loss, before = re.search(r"loss (\S+) logged (\S+) .*", done.stdout.splitlines()[-1]).groups()
        assert float(loss) == pytest.approx(float(before), abs=1e-6), done.stdout
