"""Every rule of the table with numbers; docs/staleness.md has the same rules in the same order."""

import re
from pathlib import Path

import pytest

from spmd_rl.config.age_bound import age_bound
from spmd_rl.metrics.bottleneck import RULES, Signals, diagnose
from spmd_rl.metrics.report import Report
from tests import fakes
from tests.unit.test_report import step

HEALTHY = {
    "trainer_idle": 0.02,
    "engine_idle": 0.02,
    "slots_used": 0.8,
    "requests_wait": 0.0,
    "closed_by_concurrency": 0.0,
    "held_back": 0.0,
    "parked": 0.0,
    "kv_wait": 0.0,
    "trainable": 0.9,
    "dropped": 0.0,
    "moved": 1.0,
    "reward": 0.4,
}
ROOM = {"trainer_idle": 0.74, "engine_idle": 0.95, "slots_used": 0.05}  # an environment that is slow, at S = 2
ALONE = {"trainer_idle": 0.4, "engine_idle": 0.0, "slots_used": 1 / 64}  # one sequence of 64 at any time
CASES = [
    ({"trainable": None, "moved": 0.0, "reward": None, "trainer_idle": None}, {}, "nothing trained", "no batch was"),
    (
        {"trainable": 0.0, "moved": 0.0, "reward": 0.0},
        {},
        "nothing trained",
        "no rollout had .* reward .* is 0: ",
    ),
    ({"trainable": 0.0, "reward": 0.0}, {}, "nothing trained", "look at the reward"),  # weight decay moves weights
    ({"trainable": 0.0, "reward": 0.8}, {"solved_at": 0.8}, "nothing trained", "all is solved: .* 0.8; draw harder"),
    ({"trainable": 0.0, "dropped": 0.9}, {"max_age": 3}, "nothing trained", "90% .* for its age: .*max_age above 3"),
    ({"moved": 0.0}, {}, "nothing trained", "no step changed a weight .* 90% .* trainer.learning_rate"),
    ({"trainable": 0.4, "dropped": 0.5}, {"max_age": 3}, "dropping", "50% of .* staleness.max_age above 3"),
    ({"trainable": 0.4, "trainer_idle": None}, {}, "rewards", "only 40% of .* data.max_solve_rate"),
    (
        ALONE | {"requests_wait": 90.0, "kv_wait": 90.0},
        {"kv_cache_mib": 64},
        "KV cache",
        "90 req.* above 64,",
    ),
    (ALONE | {"requests_wait": 9.0, "kv_wait": 2.0}, {}, "generation", "topology.inference"),
    ({"trainer_idle": None}, {}, "unknown", "too few steps"),
    ({"engine_idle": 0.3}, {}, "trainer", "topology.trainer"),
    ({"slots_used": 0.1}, {}, "trainer", "topology.trainer"),
    ({"parked": 0.7}, {"gate": "ship"}, "trainer", "topology.trainer"),
    ({}, {}, "none", "both sides"),
    ({"requests_wait": 5.0, "slots_used": 0.1}, {}, "none", "both sides"),
    (ROOM | {"trainable": 0.4, "dropped": 0.5}, {"max_age": 3}, "dropping", "50% of .* staleness.max_age above 3"),
    (ROOM | {"trainable": 0.4, "dropped": 0.1}, {}, "rewards", "only 40% of .* data.max_solve_rate"),
    (ROOM, {"max_staleness": 0}, "taking turns", "raise staleness.max_staleness to 1$"),
    (ALONE, {"max_staleness": 0}, "taking turns", "raise staleness.max_staleness to 1$"),
    (ROOM | {"held_back": 0.8}, {"window": 8}, "stragglers", "staleness.window above 8, or .*'completion'"),
    (ROOM | {"held_back": 0.8}, {"order": "oldest", "max_age": 2}, "stragglers", "staleness.max_age above 2, or"),
    (ROOM | {"closed_by_concurrency": 0.9}, {"max_concurrent": 8}, "concurrency", "max_concurrent above 8$"),
    (ROOM, {"gate": "ship"}, "queue", "raise staleness.queue_size$"),
    (ROOM, {}, "staleness", "raise staleness.max_staleness above 2$"),
    (ROOM, {"max_concurrent": 15}, "staleness", "above 2, and staleness.max_concurrent to 16$"),  # (S + 2)·B
    (ALONE, {}, "staleness", "raise staleness.max_staleness above 2$"),
    (ROOM, {"max_staleness": 8}, "batch size", "S = 8 .* raise rollout.batch_size above 4$"),
    (ALONE | {"requests_wait": 3.0}, {}, "generation", "in 2% of their slots: .*topology.inference"),
    ({"trainer_idle": 0.4}, {}, "generation", "in 80% of their slots: .*topology.inference.*rollout.max_tokens"),
    ({"trainer_idle": 0.4}, {"max_staleness": 0}, "generation", "topology.inference"),
]


@pytest.mark.parametrize(("signals", "knobs", "stage", "advice"), CASES)
def test_the_bottleneck_and_the_setting_to_change(signals, knobs, stage, advice):
    found, said = diagnose(Signals(**HEALTHY | signals), fakes.knobs(**knobs))
    assert found == stage and re.search(advice, said), said


def test_every_rule_has_a_case_and_a_row_in_the_page_in_the_same_order():
    page = (Path(__file__).parents[2] / "docs" / "staleness.md").read_text()
    section = page[page.index("## What the end of a run says") :].split("\n## ")[0]
    rows = re.findall(r"^\| ([A-Za-z ]+) \|", section, re.MULTILINE)[1:]
    stages = [stage for stage, _, _ in RULES]
    assert rows == stages and set(stages) == {stage for _, _, stage, _ in CASES} - {"unknown"}


def test_a_report_measures_the_signals_from_its_steps_and_counts():
    now = {"at": 0.0}
    bound = age_bound(gate="admission", order="admission", max_staleness=2, batch_size=4, group_size=2)
    report = Report(
        steps=2,
        knobs=fakes.knobs(),
        slots=8,
        bound=bound,
        decode=lambda ids: "",
        say=lambda line: None,
        clock=lambda: now["at"],
    )
    counts = {"recompute_s": 0, "pause_s": 0, "swaps": 0, "kv_used": 0, "version": 0, "rollouts": 0, "waiting_s": 0}
    counts |= {"kv_waiting_s": 0.0}
    report.engines.count({0: counts | {"busy_s": 0.0, "slot_s": 0.0, "tokens": 0}})
    report.training_begins()
    given_up = {"weights/update_norm": 0.5, "trainer/step_s": 2.0, "rollout/filtered": 4, "rollout/dropped": 2}
    first = {"trainer/wait_s": 9.0, "time/parked_s": 0.0, "time/held_back_s": 9.0, "rollout/trainable_share": 0.2}
    second = {"trainer/wait_s": 4.0, "time/parked_s": 2.0, "time/held_back_s": 3.0, "rollout/trainable_share": 0.4}
    second |= {"weights/update_norm": 0.0}
    report.step(1, step(1) | given_up | first)
    now["at"] = 8.0
    report.step(2, step(2) | given_up | second)
    now["at"] = 20.0
    report.engines.count({0: counts | {"busy_s": 5.0, "slot_s": 40.0, "tokens": 9, "kv_waiting_s": 40.0}})
    report.engines.mark()
    assert report.signals({"concurrency": 6.0, "bound": 2.0}) == Signals(
        trainer_idle=0.5,  # 4 s of 4 + 2 + 2: the first batch is waited for anyway
        engine_idle=0.75,
        slots_used=0.25,  # 40 sequences' seconds of 8 · 20
        requests_wait=0.0,
        kv_wait=2.0,  # 40 requests' seconds of 20
        closed_by_concurrency=0.75,
        held_back=0.75,  # 3 s of 4
        parked=0.25,  # 2 s of 8
        trainable=0.3,  # 2 and 4 of 20
        dropped=0.2,
        moved=0.5,
        reward=0.1875,  # 1/8 and 2/8
    )
