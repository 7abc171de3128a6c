"""The staleness settings on real jobs: what they promise holds for what was really trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from spmd_rl.packing import packing
from tests.end_to_end import jobs
from tests.recomputed import differences

MODEL = f"model.path={jobs.MODELS}/tiny"
SMALL = ("rollout.batch_size=16", "rollout.group_size=4", "staleness.max_concurrent=48", "eval.num_tasks=4")
SLOW = (*SMALL, "env.fraction.weight=1e-9", "env.slow.path=tests.end_to_end.slow_tool:SlowTool")
LONG = (  # generated one by one, so that a sequence takes longer than a training step and runs into updates
    *SMALL,
    *("env.fraction.args.length=48", "rollout.max_tokens=48", "inference.deterministic=true"),
)
ENDS = ("trained", "filtered", "dropped", "failed", "skipped", "left_over")


def run(run_dir: Path, *settings: str, num_steps: int = 8, ranks: int = 2) -> dict:
    """Runs a job to its end; its summary, with both ledgers added up."""
    job = jobs.run("tiny_cpu.toml", run_dir, f"run.steps={num_steps}", MODEL, *settings, num_ranks=ranks)
    assert job.code == 0, job.output
    end = job.summary
    assert (end["status"], end["version"]) == ("done", num_steps)
    ledger = end["ledger"]
    assert ledger["admitted"] == sum(ledger["rollouts"][name] for name in ENDS)
    assert ledger["generated_tokens"] == sum(ledger["tokens"][name] for name in ENDS) + ledger["wasted_tokens"]
    assert sum(ledger["rollouts"][end] for end in ("trained", "failed", "filtered")) >= 16 * num_steps
    assert differences(run_dir) == []
    for record in steps(run_dir):
        assert record["age/max_staleness"] == end["max_staleness"] and record["age/bound"] == end["age_bound"]
        assert record["age/rollout_p50"] <= record["age/rollout_p99"] <= record["age/rollout_max"]
        assert record["age/token_p50"] <= record["age/token_p99"] <= record["age/token_max"]
        assert end["age_bound"] is None or record["age/rollout_max"] <= end["age_bound"]
    return end


def steps(run_dir: Path) -> list[dict]:
    return jobs.Job(0, "", run_dir).metrics("step")


def trained(run_dir: Path) -> dict[int, packing.Packed]:
    """What was trained, by the version it trained."""
    paths = (run_dir / "batches").glob("step_*.safetensors")
    return {int(path.stem.removeprefix("step_")): packing.load(path) for path in paths}


def runs_of(run_dir: Path) -> list[list[list[int]]]:
    """[version, count] runs of every trained rollout."""
    paths = (run_dir / "batches").glob("step_*.json")
    return [rollout["versions"] for path in paths for rollout in json.loads(path.read_text())["rollouts"]]


def ages(run_dir: Path) -> np.ndarray:
    """Of every trained token that the live policy sampled, recomputed from the batch log."""
    return np.concatenate([i - b.versions[b.loss_mask & (b.versions >= 0)] for i, b in trained(run_dir).items()])


def test_a_synchronous_run_trains_every_token_at_age_zero(tmp_path):
    end = run(tmp_path, *SMALL, "staleness.max_staleness=0", "eval.every=3", num_steps=6)
    assert end["age_bound"] == 0 and end["age"]["token_max"] == end["age"]["rollout_max"] == 0
    assert set(ages(tmp_path).tolist()) == {0}
    assert {record["admission/per_step"] for record in steps(tmp_path)} <= {0, 16}


def test_a_slow_tool_call_spans_versions_and_stored_answers_have_no_age(tmp_path):
    end = run(tmp_path, *SLOW, "staleness.order=completion", "env.slow.args.stored_every=5", num_steps=12)
    assert end["age_bound"] is None and "no bound" in end["age_bound_line"]
    spans = [runs for runs in runs_of(tmp_path) if len(runs) == 2 and runs[0][1] == 4 and runs[1][1] == 4]
    assert any(newer[0] >= older[0] + 2 for older, newer in spans)
    stored = sum(record["age/unversioned_rollouts"] for record in steps(tmp_path))
    assert 0 < stored < 16 * 12 and end["age"]["unversioned_tokens"] == 4 * stored
    assert end["age"]["token_max"] == ages(tmp_path).max()
    assert end["age"]["token_mean"] == pytest.approx(ages(tmp_path).mean())
    assert end["ledger"]["wasted_tokens"] > 0  # the tool's questions


def test_what_is_over_age_is_dropped_and_aborted_while_it_runs(tmp_path):
    cap = ("staleness.order=completion", "staleness.max_age=2", "staleness.over_age=drop")
    end = run(tmp_path, *SLOW, *cap, "env.slow.args.updates=1000", num_steps=10)
    assert (end["age_bound"], end["age_max"] <= 2) == (2, True)
    assert end["ledger"]["rollouts"]["dropped"] >= 4
    dropped, kept = end["mean_length"]["dropped"], end["mean_length"]["trained"]
    assert kept["seconds"] < dropped["seconds"] < 20  # else they would have gone on for patience_s = 30
    assert 4 < kept["tokens"] <= 8 < dropped["tokens"]  # every question of the tool cost a token


def test_the_ship_gate_holds_batches_and_keeps_its_own_bound(tmp_path):
    ship = ("staleness.gate=ship", "staleness.max_staleness=1", "staleness.queue_size=16", "eval.every=3")
    end = run(tmp_path, *SMALL, *ship, num_steps=10)
    assert end["age_bound"] == ((1 + 2) * 16 + 16 + 48 - 1) // 16 == 6
    assert 1 < end["age_max"] <= 6  # beyond S: it bounds the batches ahead, not the age
    assert end["parked_s"] == pytest.approx(sum(record["time/parked_s"] for record in steps(tmp_path)), abs=1e-3)
    assert end["parked_s"] > 0


@pytest.mark.full
@pytest.mark.parametrize("on_update", ["restart", "continue", "hold"])
def test_sequences_that_run_at_an_update_do_what_on_update_says(on_update, tmp_path):
    end = run(tmp_path, *LONG, f"staleness.on_update={on_update}", num_steps=8)
    whole = all(len(runs) == 1 for runs in runs_of(tmp_path))
    assert whole == (on_update != "continue")
    assert (end["ledger"]["wasted_tokens"] > 0) == (on_update == "restart")
    assert end["age_max"] <= 2


@pytest.mark.full
@pytest.mark.parametrize("on_update", ["continue", "hold", "restart"])
def test_two_engines_and_two_trainers_keep_the_bound_and_the_ledger(on_update, tmp_path):
    ranks = ("topology.inference=2", "topology.trainer=2", f"staleness.on_update={on_update}")
    end = run(tmp_path, *LONG, *ranks, "eval.every=3", ranks=4)
    assert end["age_max"] <= 2 == end["age_bound"]
    assert (end["ledger"]["wasted_tokens"] > 0) == (on_update == "restart")


@pytest.mark.full
def test_numbers_of_two_trainers_with_several_optimizer_steps_a_batch_are_what_is_on_disk(tmp_path):
    """Replies to vowels are all cut off here, those of the other environment end by themselves."""
    several = ("trainer.num_minibatches=2", "trainer.num_epochs=2", "trainer.entropy=0.01", "trainer.warmup_steps=5")
    ship = ("staleness.gate=ship", "staleness.max_staleness=1", "staleness.queue_size=16")
    env = (
        "env.lookup.path=spmd_rl.envs.lookup:Lookup",
        "eval.samples=3",
        "eval.every=3",
        "trainer.mask_truncated=true",
    )
    run(tmp_path / "run", *SMALL, *several, *ship, *env, "topology.trainer=2", ranks=3)
    assert all(step["trainer/computed_tokens"] == step["trainer/tokens"] for step in steps(tmp_path / "run"))


@pytest.mark.full
@pytest.mark.parametrize("order", ["completion", "oldest", "admission"])
def test_waiting_keeps_the_cap_under_every_order(order, tmp_path):
    cap = (f"staleness.order={order}", "staleness.window=64", "staleness.max_age=2")
    end = run(tmp_path, *SLOW, *cap, num_steps=12)
    assert end["age_bound"] == 2 and end["age_max"] == 2
    assert end["ledger"]["rollouts"]["dropped"] == 0


@pytest.mark.full
def test_a_window_lets_quick_rollouts_pass_and_costs_what_its_bound_says(tmp_path):
    end = run(tmp_path, *SLOW, "staleness.window=20", num_steps=12)
    assert end["age_bound"] == 3 == 2 + (20 - 4) // 16
    assert 2 <= end["age_max"] <= 3


@pytest.mark.full
def test_adaptive_admission_is_restored_where_it_stood_and_the_first_step_keeps_its_bound(tmp_path):
    adaptive = (*SMALL, "staleness.max_staleness=8", "staleness.max_concurrent=160", "staleness.adaptive=true")
    adaptive += ("trainer.num_epochs=6",)  # so that training is slower than generation
    run(tmp_path, *adaptive, num_steps=24)
    kept = json.loads((tmp_path / "checkpoints" / "step_24" / "orchestrator.json").read_text())["admission_limit"]
    assert 16 <= kept < 9 * 16  # generation is far ahead here, so the limit has fallen from the ceiling
    job = jobs.run("tiny_cpu.toml", tmp_path, MODEL, *adaptive, "run.steps=27")
    assert job.code == 0, job.output
    records = steps(tmp_path)
    assert [record["version"] for record in records] == list(range(1, 28))
    assert records[24]["admission/limit"] == pytest.approx(kept)
    assert records[24]["admission/per_step"] <= records[24]["admission/bound"] == 9 * 16
