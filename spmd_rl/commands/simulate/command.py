"""`spmd_rl simulate CONFIG.toml [section.key=value …] [options]`: ages and throughput before renting a GPU.

Reads the config, runs the simulation once per value of the sweep, and prints a table or JSON; a sweep also draws a PNG.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from spmd_rl import config as config_module
from spmd_rl.commands.simulate import latency
from spmd_rl.commands.simulate.simulation import Settings, SimResult, simulate

COLUMNS: dict[str, Callable[[SimResult], str]] = {  # by heading
    "bound": lambda r: "none" if r.age_bound is None else str(r.age_bound),
    "age mean": lambda r: f"{r.age_mean:.2f}",
    "p99": lambda r: str(r.age_p99),
    "max": lambda r: str(r.age_max),
    "trainer idle": lambda r: f"{r.trainer_idle:.1%}",
    "engine idle": lambda r: f"{r.engine_idle:.1%}",
    "places empty": lambda r: f"{r.places_empty:.1%}",
    "rollouts/s": lambda r: f"{r.rollouts_per_s:.3g}",
    "dropped": lambda r: f"{r.dropped:.1%}",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


def main(argv: Sequence[str]) -> int:
    """Exit code 0; ValueError for what the user wrote."""
    parser = _Parser(prog="spmd_rl simulate", description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--latency", default="uniform:1,6", help="of an episode, seconds: see simulate/latency.py")
    parser.add_argument("--trainer-seconds", type=float, default=1.0, help="of one step")
    parser.add_argument("--steps", type=int, default=400, help="batches to train")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failing", type=float, default=0.0, help="share of rollouts that fail")
    parser.add_argument("--filtered", type=float, default=0.0, help="share of groups that a filter gives up")
    parser.add_argument("--sweep", metavar="section.key=a,b,c", help="one run per value, and a plot")
    parser.add_argument("--plot", type=Path, default=Path("simulate.png"), help="where a sweep is drawn")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_intermixed_args(argv)
    if options.steps < 1 or options.trainer_seconds < 0:
        raise ValueError("--steps must be at least 1 and --trainer-seconds at least 0")
    draw = latency.parse(options.latency)
    key, values = _sweep(options.sweep)
    results: dict[str, SimResult] = {}
    for value in values:
        overrides = [*options.overrides, *([f"{key}={value}"] if key else [])]
        results[value] = simulate(
            settings_of(config_module.load(options.config, overrides)),
            latencies=latency.stream(draw, options.seed),
            trainer_seconds=options.trainer_seconds,
            steps=options.steps,
            failing=options.failing,
            filtered=options.filtered,
            seed=options.seed,
        )
    if options.json:
        print(json.dumps([({key: value} if key else {}) | asdict(r) for value, r in results.items()], indent=1))
    else:
        print(f"latency {options.latency} s, trainer {options.trainer_seconds:g} s a step, {options.steps} steps")
        print(table(key or "config", results))
    if key:
        _draw(key, results, options.plot, title=f"latency {options.latency} s, trainer {options.trainer_seconds:g} s")
        if not options.json:
            print(f"plot: {options.plot}")
    return 0


def settings_of(config: config_module.Config) -> Settings:
    """The plain values that the simulation needs."""
    s = config.staleness
    return Settings(
        max_staleness=s.max_staleness,
        batch_size=config.rollout.batch_size,
        group_size=config.rollout.group_size,
        max_concurrent=s.max_concurrent,
        gate=s.gate,
        order=s.order,
        window=s.window,
        max_age=None if s.max_age < 0 else s.max_age,
        over_age=s.over_age,
        queue_size=s.queue_size,
        adaptive=s.adaptive,
        target_idle=s.target_idle,
    )


def table(name: str, results: dict[str, SimResult]) -> str:
    """One line per result, columns aligned."""
    rows = [[name, *COLUMNS]]
    rows += [[value, *(column(r) for column in COLUMNS.values())] for value, r in results.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    notes = dict.fromkeys(
        f"{value}: {r.bound_line}" if len(results) > 1 else r.bound_line for value, r in results.items()
    )
    return "\n".join([*lines, *notes])


def _sweep(text: str | None) -> tuple[str, list[str]]:
    """The swept key and its values; one value without a name where nothing is swept."""
    if text is None:
        return "", ["this"]
    key, equals, rest = text.partition("=")
    values = list(dict.fromkeys(value.strip() for value in rest.split(",")))
    if not equals or "." not in key or not all(values):
        raise ValueError(f"--sweep {text!r}: written section.key=a,b,c")
    return key, values


def _draw(key: str, results: dict[str, SimResult], path: Path, *, title: str) -> None:
    """Age beside its bound, idle shares and throughput, over the swept values."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="medium")
    ages, idle, speed = figure.subplots(1, 3)
    values, runs = list(results), list(results.values())
    for label, of, marker, size in (
        ("max", "age_max", "s", 10),
        ("p99", "age_p99", "D", 6),
        ("mean", "age_mean", "o", 4),
    ):
        ages.plot(values, [getattr(r, of) for r in runs], marker=marker, markersize=size, label=label)
    bounds = [float("nan") if r.age_bound is None else r.age_bound for r in runs]
    ages.plot(values, bounds, color="black", linestyle="--", label="bound")
    ages.set(xlabel=key, ylabel="age, versions")
    ages.legend()
    shares = {"trainer idle": "trainer_idle", "engine idle": "engine_idle", "places empty": "places_empty"}
    for label, of in shares.items():
        idle.plot(values, [100 * getattr(r, of) for r in runs], marker="o", label=label)
    idle.set(xlabel=key, ylabel="share, %", ylim=(-2, 102))
    idle.legend()
    speed.plot(values, [r.rollouts_per_s for r in runs], marker="o", color="tab:green")
    speed.set(xlabel=key, ylabel="rollouts trained per second")
    speed.set_ylim(bottom=0)
    figure.savefig(path, dpi=120, format="png")
