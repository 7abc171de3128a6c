"""A run as a picture: reward, age and idle shares over the versions, from its metrics.jsonl."""

from __future__ import annotations

import json
from pathlib import Path


def plot_run(metrics: Path, picture: Path, *, bound: int | None) -> None:
    """Draw what is there; nothing where no step was made."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = map(json.loads, metrics.read_text().splitlines())
    steps = [record for record in records if record["kind"] == "step"]
    if not steps:
        return
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    reward, age, time = figure.subplots(1, 3)
    versions = [step["version"] for step in steps]
    measured = [(step["version"], step["reward"]) for step in steps if step["reward"] is not None]
    reward.plot(*zip(*measured, strict=True), color="tab:green") if measured else None
    reward.set(title="reward, mean of the sampled", ylim=(min([0.0, *(value for _, value in measured)]), None))
    age.fill_between(versions, [step["age/rollout_max"] for step in steps], step="mid", alpha=0.25, label="max")
    age.plot(versions, [step["age/rollout_mean"] for step in steps], label="mean")
    if bound is not None:
        age.axhline(bound, color="tab:red", linestyle="--", label=f"bound {bound}")
    age.set(title="age of the trained rollouts, versions", ylim=(0, None))
    age.legend()
    time.plot(versions, [step["trainer/step_s"] for step in steps], label="trainer works")
    time.plot(versions, [step["trainer/wait_s"] for step in steps], label="trainer waits")
    time.set(title="seconds per step", yscale="log")
    time.legend()
    for axes in (reward, age, time):
        axes.set_xlabel("version")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=110)
