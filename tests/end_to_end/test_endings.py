"""The three endings: done, stopped, failed; and what a stop leaves behind."""

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from spmd_rl.storage import checkpoint
from tests.end_to_end.live_jobs import LiveJob, assert_whole, steps, summary
from tests.end_to_end.test_failures import failing
from tests.ledgers import closed


def test_a_signal_to_any_rank_stops_the_run_and_every_rank_says_so(tmp_path):
    with LiveJob(tmp_path, "run.steps=1000", "eval.every=2", max_restarts=1) as job:
        job.wait_for(r"step +3/")
        job.send(signal.SIGTERM, rank=1)
        job.wait()
        assert job.exit_codes == {0: 143, 1: 143}, job.output
        assert "start number 2" not in job.output, job.output  # torchrun started again, and it did not go on
        assert "run failed" not in job.output
    end = summary(tmp_path)
    version, folder = checkpoint.newest(tmp_path / "checkpoints")
    checkpoint.verify(folder)
    assert end["status"] == "stopped"
    assert version == end["version"] == len(steps(tmp_path))
    words, _ = checkpoint.load_orchestrator(folder)
    assert words["path"]["unfinished"] == []  # what was in flight has ended
    assert words["path"]["version"] == version


@pytest.mark.full
def test_a_stop_while_its_version_is_being_saved_keeps_that_checkpoint_whole(tmp_path):
    settings = ["run.steps=1000", "eval.every=-1", "checkpoint.every=1", "checkpoint:0:slow"]
    with LiveJob(tmp_path, *settings, module="tests.end_to_end.misbehaving") as job:
        job.wait_for(r"step +3/")
        job.send(signal.SIGTERM)
        job.wait()
        assert "run failed" not in job.output, job.output
    for _, folder in checkpoint.all_complete(tmp_path / "checkpoints"):
        checkpoint.verify(folder)
    end = summary(tmp_path)
    assert end["status"] == "stopped"
    assert checkpoint.newest(tmp_path / "checkpoints")[0] == end["version"]
    assert not list(tmp_path.glob("checkpoints/*.tmp"))
    with LiveJob(tmp_path, f"run.steps={end['version'] + 2}", "eval.every=-1") as job:
        assert job.wait() == 0, job.output
    assert_whole(tmp_path, num_steps=end["version"] + 2)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_torchrun_stops_the_run_in_good_order(tmp_path, number):
    with LiveJob(tmp_path, "run.steps=1000", "eval.every=-1") as job:
        job.wait_for(r"step +2/")
        job.send(number)
        assert job.wait() != 0
        assert "run failed" not in job.output, job.output
    end = summary(tmp_path)
    assert (end["status"], end["saved_version"]) == ("stopped", end["version"])
    closed(end["ledger"])


@pytest.mark.full
def test_a_second_signal_to_torchrun_leaves_a_summary_that_closes(tmp_path):
    settings = ["run.steps=1000", "eval.every=-1", "run.shutdown_s=60", "staleness.order=completion"]
    with LiveJob(tmp_path, *settings, *failing("wait", each=100)) as job:
        job.wait_for(r"step +1/")
        job.send(signal.SIGTERM)
        job.wait_for("stopping on SIGTERM")
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(limit_s=4.0)
        job.send(signal.SIGTERM)
        job.wait()
    end = summary(tmp_path)
    assert end["status"] == "stopped" and "saved_version is lost" in end["error"]
    closed(end["ledger"])


@pytest.mark.full
def test_a_killed_job_leaves_the_ledger_of_its_last_step(tmp_path):
    with LiveJob(tmp_path, "run.steps=1000", "eval.every=-1") as job:
        job.wait_for(r"step +3/")
        job.send(signal.SIGKILL, rank=0)
        job.wait()
    end = summary(tmp_path)
    assert end["status"] == "failed" and end["version"] >= 2
    closed(end["ledger"])


def test_a_run_whose_tasks_are_used_up_is_done(tmp_path):
    few = ["env.fraction.path=tests.end_to_end.failing_env:Few", "env.fraction.args={num=20}", "eval.num_tasks=4"]
    with LiveJob(tmp_path, "run.steps=1000", *few) as job:
        assert job.wait() == 0, job.output
        assert "the tasks have ended: 2 full batches, 4 groups left over" in job.output
    end = summary(tmp_path)
    assert (end["status"], end["version"], end["ledger"]["admitted"]) == ("done", 2, 160)
    assert end["ledger"]["rollouts"]["trained"] == 128
    assert end["ledger"]["rollouts"]["left_over"] == 32
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert checkpoint.newest(tmp_path / "checkpoints")[0] == 2


@pytest.mark.full
def test_a_second_signal_ends_at_once_and_hanging_episodes_cannot_hold_a_stop(tmp_path):
    settings = ["run.steps=1000", "eval.every=-1", "run.shutdown_s=60", "staleness.order=completion"]
    with LiveJob(tmp_path, *settings, *failing("wait", each=100)) as job:
        job.wait_for(r"step +1/")
        pid = job.pid(0)
        job.send(signal.SIGINT, rank=0)
        job.wait_for("stopping on SIGINT")
        for _ in range(20):  # those of the first 3 s are the same stop
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                job.wait(limit_s=1.0)
                break
        assert job.exit_codes[0] == 130, job.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("on_update", "each"),
    [("continue", 100), ("drain", 300)],  # under drain version 3 would wait for ever
)
def test_what_hangs_is_saved_as_unfinished_and_runs_again(tmp_path, on_update, each):
    settings = ["eval.every=-1", "staleness.order=completion", f"staleness.on_update={on_update}"]
    hanging = ["run.steps=1000", "run.shutdown_s=6", *failing("wait", each=each)]
    with LiveJob(tmp_path, *settings, *hanging) as job:
        job.wait_for(r"step +2/")
        job.send(signal.SIGTERM)
        job.wait()
    assert summary(tmp_path)["status"] == "stopped"
    version, folder = checkpoint.newest(tmp_path / "checkpoints")
    words, _ = checkpoint.load_orchestrator(folder)
    assert words["path"]["unfinished"]
    with LiveJob(tmp_path, *settings, f"run.steps={version + 4}") as job:
        assert job.wait() == 0, job.output
    assert_whole(tmp_path, num_steps=version + 4, max_staleness=4)


@pytest.mark.full
@pytest.mark.parametrize("what", ["reward", "engine", "collective", "disk"])
def test_nothing_that_hangs_holds_a_stop_longer_than_its_window(tmp_path, what):
    """A reward that blocks the event loop, an engine's step, a trainer that the others wait for, a file.

    Told to a rank, torchrun knows of no stop and starts all again: they do not go on.
    """
    rank = {"reward": 0, "engine": 1}.get(what)
    window = ["run.shutdown_s=6", "run.steps=1000", "eval.every=-1", "topology.trainer=2", "checkpoint.every=10"]
    window += ["run.probe_every=0"]  # or the engine hangs in it, before there is anything to stop
    hangs = {
        "reward": failing("block", each=300),
        "engine": ["engine:0:hang"],
        "collective": ["loss:2:hang"],
        "disk": [],
    }
    with LiveJob(
        tmp_path, *window, *hangs[what], ranks=3, max_restarts=1, module="tests.end_to_end.misbehaving"
    ) as job:
        if what == "disk":
            job.wait_for(r"step +1/")
            folder = checkpoint.aside(tmp_path / "checkpoints", 10) / "trainer"
            folder.mkdir(parents=True)
            os.mkfifo(folder / "__0_0.distcp")  # opening it to write waits for a reader
        job.wait_for("step +12/" if what == "disk" else "hanging")
        job.send(signal.SIGTERM, rank=rank)
        start = time.monotonic()
        if rank is not None:
            job.wait_for("this job was refused or stopped, and is not started again")
            assert "start number 2" not in job.output, job.output
        assert job.wait() == 1, job.output
        print(f"{what}: gone {time.monotonic() - start:.1f} s after the signal")
        assert time.monotonic() - start < 6.0 + 5.0 + (10.0 if rank is None else 20.0)
        said = "ending at once: 11 s after" if what == "reward" else "run.shutdown_s = 6 s were not enough"
        assert said in job.output, job.output
    assert not job.left
    assert checkpoint.newest(tmp_path / "checkpoints") is None  # nothing incomplete was made to look complete


@pytest.mark.full
def test_what_cannot_be_resumed_is_refused_by_path_and_reason(tmp_path):
    with LiveJob(tmp_path, "run.steps=2", "eval.every=-1") as job:
        assert job.wait() == 0, job.output
    shutil.rmtree(tmp_path / "model")
    said = (tmp_path / "summary.json").read_text()
    state = tmp_path / "checkpoints" / "step_2" / "orchestrator.json"
    words = json.loads(state.read_text())
    words["path"]["next_ticket"] += 1
    state.write_text(json.dumps(words))
    with LiveJob(tmp_path, "run.steps=4", max_restarts=1) as job:
        assert job.wait() == 1
        assert job.exit_codes == {0: 2, 1: 2}
        assert job.output.count("error: cannot resume") == 1  # nor is it tried again
        assert f"{state}: " in job.wait_for("^error: cannot resume: ")
    assert not list(tmp_path.glob("batches/step_2.*"))
    assert (tmp_path / "summary.json").read_text() == said
    assert closed(json.loads(said)["ledger"])["rollouts"]["trained"] == 128


@pytest.mark.full
@pytest.mark.parametrize("resume", ["must", "never"])
def test_resume_says_what_it_misses(tmp_path, resume):
    if resume == "never":
        (tmp_path / "metrics.jsonl").write_text("")
    with LiveJob(tmp_path, f"run.resume={resume}") as job:
        assert job.wait() == 1
        assert job.exit_codes == {0: 2, 1: 2}
        line = job.wait_for("^error: ")
        assert ("no complete checkpoint" if resume == "must" else "holds a run already") in line
