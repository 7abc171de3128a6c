import asyncio
import json
import resource
import statistics
import time

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from spmd_rl.commands.simulate import latency, main
from spmd_rl.commands.simulate.command import table
from spmd_rl.commands.simulate.simulation import Settings, SimResult, _Simulation, simulate
from spmd_rl.commands.simulate.virtual_time import run_virtual

LAWS = ["fixed:3", "uniform:1,6", "integers:1,5", "pareto:1.5", "lognormal:0.5,1", "replay"]


def run(law: str, *, seed: int = 0, steps: int = 120, trainer_seconds: float = 1.0, **settings) -> SimResult:
    of_the_run = {name: settings.pop(name) for name in ("failing", "filtered", "lost") if name in settings}
    defaults = {"max_staleness": 2, "batch_size": 8, "group_size": 1, "max_concurrent": 64}
    return simulate(
        Settings(**defaults | settings),
        latencies=latency.stream(latency.parse(law), seed),
        trainer_seconds=trainer_seconds,
        steps=steps,
        seed=seed,
        **of_the_run,
    )


@pytest.fixture(scope="module")
def replay(tmp_path_factory) -> str:
    """A batch log whose rollouts took 1, 1, 2, 9 seconds."""
    batches = tmp_path_factory.mktemp("run") / "batches"
    batches.mkdir()
    rollouts = [{"generation_s": seconds} for seconds in (1.0, 1.0, 2.0, 9.0)]
    (batches / "step_0.json").write_text(json.dumps({"index": 0, "rollouts": rollouts}))
    return f"replay:{batches.parent}"


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"window": 1}, 2),
        ({"window": 8}, 3),
        ({"order": "completion", "max_age": 2}, 2),
        ({"order": "completion", "max_age": 3}, 3),
        ({"order": "completion", "max_age": 2, "over_age": "drop"}, 2),
        ({"order": "oldest", "max_age": 3, "over_age": "drop"}, 3),
        ({"window": 64, "max_age": 3}, 3),
        ({"gate": "ship", "queue_size": 8}, 12),
        ({"gate": "ship", "queue_size": 8, "window": 24}, 15),
        ({"gate": "ship", "queue_size": 8, "order": "completion", "max_age": 12}, 12),
        ({"gate": "ship", "queue_size": 8, "order": "completion", "max_age": 5, "over_age": "drop"}, 5),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_the_age_bound_holds_for_every_latency_law(law, settings, bound, replay):
    results = [run(replay if law == "replay" else law, seed=seed, steps=60, **settings) for seed in range(5)]
    assert {r.age_bound for r in results} == {bound}
    assert max(r.age_max for r in results) <= bound


@pytest.mark.parametrize("law", LAWS)
def test_strict_admission_order_gives_exactly_s_and_a_window_of_b_at_most_one_more(law, replay):
    law = replay if law == "replay" else law
    assert [run(law, seed=seed, steps=60, window=1).age_max for seed in range(5)] == [2] * 5
    assert all(2 <= run(law, seed=seed, steps=60, window=8).age_max <= 3 for seed in range(5))


def test_waiting_under_completion_order_reaches_exactly_its_cap():
    assert run("uniform:1,6", order="completion", max_age=2).age_max == 2
    assert run("uniform:1,6", order="completion").age_max > 2


@pytest.mark.parametrize("order", ["completion", "oldest", "admission"])
def test_a_synchronous_run_trains_at_age_zero_under_every_order(order):
    result = run("uniform:1,6", order=order, max_staleness=0, window=64)
    assert (result.age_max, result.age_mean) == (0, 0.0)
    assert result.most_slots == 8


@given(
    law=st.sampled_from(["fixed:3", "uniform:0.1,4", "integers:1,5", "pareto:1.2", "lognormal:0,1.5"]),
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([(4, 1), (8, 1), (8, 4), (12, 3)]),
    max_staleness=st.integers(0, 4),
    max_concurrent=st.integers(12, 80),
    order=st.sampled_from(["completion", "oldest", "admission"]),
    window=st.integers(1, 40),
    more_age=st.sampled_from([None, 0, 1, 3]),
    over_age=st.sampled_from(["wait", "drop"]),
    trainer_seconds=st.sampled_from([0.0, 0.3, 2.0]),
    failing=st.sampled_from([0.0, 0.2]),
    filtered=st.sampled_from([0.0, 0.4]),
)
@hypothesis_settings(max_examples=60, deadline=None, derandomize=True)
def test_the_bound_is_true_and_nothing_is_lost_for_any_settings(
    law, seed, groups, max_staleness, max_concurrent, order, window, more_age, over_age, trainer_seconds, **shares
):
    """Everything else is asserted inside, at every change: the gate's invariants and the ledger."""
    batch_size, group_size = groups
    result = run(
        law,
        seed=seed,
        steps=25,
        trainer_seconds=trainer_seconds,
        batch_size=batch_size,
        group_size=group_size,
        max_staleness=max_staleness,
        max_concurrent=max_concurrent,
        order=order,
        window=window,
        max_age=None if more_age is None else max_staleness + more_age,
        over_age=over_age,
        **shares,
    )
    assert result.steps == 25
    assert result.age_bound is None or result.age_max <= result.age_bound
    assert result.most_slots <= (max_staleness + 1) * batch_size


@given(
    law=st.sampled_from(["fixed:3", "uniform:0.1,4", "pareto:1.2", "lognormal:0,1.5"]),
    seed=st.integers(0, 10**6),
    groups=st.sampled_from([(8, 1), (8, 4), (12, 3)]),
    max_staleness=st.integers(0, 3),
    max_concurrent=st.integers(12, 60),
    queue_size=st.integers(1, 30),
    window=st.integers(1, 30),
    trainer_seconds=st.sampled_from([0.0, 0.3, 2.0]),
    failing=st.sampled_from([0.0, 0.2]),
    filtered=st.sampled_from([0.0, 0.4]),
)
@hypothesis_settings(max_examples=40, deadline=None, derandomize=True)
def test_the_bound_of_the_ship_gate_is_true(law, seed, groups, trainer_seconds, **settings):
    batch_size, group_size = groups
    result = run(
        law,
        seed=seed,
        steps=25,
        trainer_seconds=trainer_seconds,
        batch_size=batch_size,
        group_size=group_size,
        gate="ship",
        **settings,
    )
    assert result.age_max <= result.age_bound


@pytest.mark.parametrize("law", ["fixed:0", "fixed:3"])
@pytest.mark.parametrize("trainer_seconds", [0.0, 1.0, 8.0])
def test_the_ship_gate_samples_nothing_that_a_cap_must_drop(law, trainer_seconds):
    settings = {"gate": "ship", "max_staleness": 3, "max_age": 3, "over_age": "drop", "queue_size": 8}
    result = run(law, order="completion", trainer_seconds=trainer_seconds, **settings)
    assert (result.steps, result.dropped) == (120, 0.0) and result.age_max <= 3


def test_the_ship_gate_parks_batches_and_reaches_its_bound():
    result = run("fixed:3", gate="ship", queue_size=8, steps=100)
    assert result.age_max == result.age_bound == 12
    assert result.parked_s > 50


def test_failing_members_keep_the_bound_and_the_budget():
    result = run("uniform:1,6", steps=400, group_size=4, failing=0.1)
    assert (result.age_max, result.most_slots) == (2, 24)
    assert 0.08 < result.failed < 0.12


@pytest.mark.parametrize(("order", "age_max"), [("admission", 2), ("completion", 4)])
def test_a_filter_that_gives_up_half_leaves_the_budget_where_it_was(order, age_max):
    result = run("uniform:1,6", steps=200, order=order, filtered=0.5)
    assert result.age_max <= age_max and result.most_slots == 24
    assert 0.45 < result.filtered < 0.55


def test_groups_that_are_lost_whole_free_their_slots():
    """10,000 groups, of which 30% are lost whole: no slow deadlock."""
    result = run("uniform:1,6", steps=3500, group_size=4, lost=0.3)
    assert result.ledger["admitted"] >= 40_000 * 0.97
    assert 0.28 < result.failed < 0.32
    assert (result.age_max, result.most_slots) == (2, 24)


def test_dropping_prefers_short_rollouts_and_says_so():
    result = run("uniform:1,6", order="completion", max_age=2, over_age="drop")
    assert result.dropped > 0.1 and result.dropped_length_s > result.trained_length_s


def adaptive_against_full(law: str, order: str) -> tuple[float, float]:
    """(throughput, mean age) of adaptive admission as shares of the full run's, medians of 5 seeds."""
    settings = {"order": order, "max_concurrent": 256, "batch_size": 64, "max_staleness": 8}
    ratios = []
    for seed in range(5):
        adaptive, full = (run(law, seed=seed, steps=120, adaptive=adaptive, **settings) for adaptive in (True, False))
        ratios.append((adaptive.rollouts_per_s / full.rollouts_per_s, adaptive.age_mean / full.age_mean))
    speed, age = (statistics.median(ratio) for ratio in zip(*ratios, strict=True))
    print(f"{law}, {order}: {speed:.3f} of the throughput at {age:.3f} of the age")
    return speed, age


def test_adaptive_admission_keeps_the_throughput_at_a_third_of_the_age():
    speed, age = adaptive_against_full("pareto:3,0.66666667", "completion")
    assert speed >= 0.97 and age <= 1 / 3


@pytest.mark.parametrize(
    "law",
    ["uniform:1,6", *(pytest.param(law, marks=pytest.mark.full) for law in ("pareto:3,0.66666667", "pareto:1.5"))],
)
def test_adaptive_admission_keeps_the_throughput_in_ticket_order_too(law):
    """Where nearly everything waits for the slowest there is little to save, and nothing may be lost."""
    speed, age = adaptive_against_full(law, "admission")
    assert speed >= 0.97 and age <= 1


def test_every_rollout_is_trained_once_at_its_own_length():
    """200 prompts, S = 2, admission order: what is trained is as long as what was generated."""
    generated, trained = [], []

    def remember(source):
        for seconds in source:
            generated.append(seconds)
            yield seconds

    result = simulate(
        Settings(max_staleness=2, batch_size=8, max_concurrent=64),
        latencies=remember(latency.stream(latency.parse("lognormal:1,1"), 0)),
        trainer_seconds=1.0,
        num_tasks=200,
        on_batch=lambda batch: trained.extend((r.ticket, r.generation_s) for r in batch.rollouts),
    )
    assert result.steps == 25 and result.age_max <= 2
    assert trained == list(enumerate(generated))


def test_the_same_seed_gives_the_same_run():
    assert run("pareto:1.5", seed=3) == run("pareto:1.5", seed=3)
    assert run("pareto:1.5", seed=3) != run("pareto:1.5", seed=4)


@pytest.mark.full
def test_a_million_rollouts_in_a_minute_of_one_core_with_flat_memory():
    run("uniform:1,6", steps=800, group_size=8, batch_size=64, max_concurrent=256, max_staleness=4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    result = run("uniform:1,6", steps=15_625, group_size=8, batch_size=64, max_concurrent=256, max_staleness=4)
    seconds = time.process_time() - start
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"1,000,000 rollouts: {seconds:.1f} CPU s, {grown_kib} KiB more memory")
    assert result.ledger["rollouts"]["trained"] == 1_000_000
    assert seconds < 60 and grown_kib < 20_000


@pytest.mark.parametrize(
    ("text", "mean"), [("fixed:2", 2.0), ("uniform:1,6", 3.5), ("integers:1,5", 3.0), ("pareto:3,2", 3.0)]
)
def test_a_latency_law_has_its_mean(text, mean):
    stream = latency.stream(latency.parse(text), 0)
    assert statistics.fmean(next(stream) for _ in range(100_000)) == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize("text", ["gauss:1,2", "uniform:1", "fixed:", "fixed:-1", "replay:/nowhere", "lognormal:0,-1"])
def test_a_latency_law_that_makes_no_sense_is_refused(text):
    with pytest.raises(ValueError, match="--latency"):
        latency.parse(text)


CONFIG = """
[model]
path = "unused"
[env.sums]
path = "unused:Unused"
[rollout]
batch_size = 8
group_size = 4
[staleness]
max_concurrent = 32
"""


def command(tmp_path, *arguments: str) -> int:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return main([str(path), *arguments])


def test_the_command_prints_a_table_with_the_bound(tmp_path, capsys):
    assert command(tmp_path, "--steps", "20", "staleness.max_staleness=1") == 0
    out = capsys.readouterr().out
    assert "age mean" in out and "age ≤ 1 = S" in out


def test_a_sweep_prints_json_and_draws_a_plot(tmp_path, capsys):
    plot = tmp_path / "ages.png"
    sweep = ("--sweep", "staleness.max_staleness=0,1,2", "--steps", "20", "--json", "--plot", str(plot))
    assert command(tmp_path, *sweep) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [r["staleness.max_staleness"] for r in runs] == ["0", "1", "2"]
    assert [r["age_max"] for r in runs] == [0, 1, 2]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_without_values_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--sweep 'max_staleness'"):
        command(tmp_path, "--sweep", "max_staleness")


def test_the_columns_of_the_table_line_up():
    lines = table("S", {"0": run("fixed:3", steps=10), "10": run("fixed:3", steps=10, max_staleness=10)}).splitlines()
    assert len({len(line) for line in lines[:3]}) == 1


def test_idle_engines_are_those_without_any_work_and_places_are_counted_one_by_one():
    """Taken in turns: 8 of 16 places for 3 s, then a step of 1 s, four times over."""
    result = run("fixed:3", max_staleness=0, max_concurrent=16, steps=4)
    assert (result.duration_s, result.engine_idle, result.places_empty) == (16.0, 0.25, 1 - 8 * 12 / (16 * 16))


def test_batches_are_formed_ahead_of_the_trainer_as_in_a_run():
    """24 rollouts end at 3 s: of three batches two are shipped at once; later ones are full 2 s before a step ends."""
    result = run("fixed:3", steps=3, trainer_seconds=5.0)
    assert result.parked_s == 5.0 + 2.0 + 2.0  # from 3 to 8 s, 11 to 13 s, 16 to 18 s


@pytest.mark.parametrize(
    ("law", "trainer_seconds", "least", "most"),
    [
        ("fixed:3", 8.0, 0.0, 0.0),
        ("fixed:3", 1.0, 1.1, 1.4),
        ("lognormal:0.5,1", 8.0, 0.7, 1.1),
        ("uniform:10,30", 1.0, 1.8, 2.0),
    ],
)
def test_the_lag_is_nothing_where_the_trainer_is_the_limit_and_about_s_where_generation_is(
    law, trainer_seconds, least, most
):
    """Versions that pass while the oldest group in flight runs, at S = 2; the pages say so."""
    settings = Settings(max_staleness=2, batch_size=64, group_size=8, max_concurrent=256)
    latencies = latency.stream(latency.parse(law), 0)
    lags = []

    async def look(simulation: _Simulation) -> None:
        while True:
            await asyncio.sleep(0.37)
            oldest = simulation.dispatcher.oldest_version
            lags.append(0 if oldest is None else simulation.policy.version - oldest)

    async def watched() -> None:
        loop = asyncio.get_running_loop()
        simulation = _Simulation(loop, settings, latencies, trainer_seconds, 0.0, 0.0, 0.0, None, 0, None)
        looking = asyncio.create_task(look(simulation))
        await simulation.run(60, None)
        looking.cancel()

    run_virtual(watched())
    settled = lags[len(lags) // 5 :]
    assert least <= statistics.mean(settled) <= most and max(lags) <= 2
