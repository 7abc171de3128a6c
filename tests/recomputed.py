"""Metrics computed again from what a run left: `batches/`, `evals/` and its config, by numpy, json and safetensors.

Nothing here is of the package.  `differences(folder)` is empty where metrics.jsonl says what is on disk.
"""

from __future__ import annotations

import itertools
import json
import math
import tomllib
from collections.abc import Iterator
from math import comb
from pathlib import Path

import numpy as np
from safetensors import safe_open

UNMEASURED = {"error", "skipped", "cancelled"}
ARRAYS = ("ticket", "group_id", "reward", "usable", "minibatch", "admission_version", "finished_version")
WORDS = ("env", "task_id", "reward_parts", "finish_reason")
FROM_ALL = {"rollout/truncated": "length", "rollout/failed": "error"}


def differences(folder: Path) -> list[str]:
    """A line for each number that is not what is on disk."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    starts = starts_of(folder)
    found, batches = [], {}
    for step in steps:
        index = step["version"] - 1
        config = next(config for version, config in reversed(starts) if version <= index)
        batch = batches[index] = Logged(folder / "batches", index)
        found += [f"step_{index}.json: rollout {row} differs from the safetensors" for row in shown_otherwise(batch)]
        found += _differences(f"step {step['version']}", step, of_step(step, batch, config))
        found += [f"step {step['version']}: {wrong}" for wrong in broken(step)]
    given_up = any(step["rollout/filtered"] or step["rollout/dropped"] or step["rollout/skipped"] for step in steps)
    if batches and not given_up and len(starts) == 1:  # else some that were admitted are not there, or again
        admitted = np.concatenate([batch["admission_version"] for batch in batches.values()])
        for step in steps:
            expected = {"admission/per_step": int(np.count_nonzero(admitted == step["version"] - 1))}
            found += _differences(f"step {step['version']}", step, expected)
    for line in lines:
        if line["kind"] == "eval":
            config = next(config for version, config in reversed(starts) if version <= line["version"])["eval"]
            logged = json.loads((folder / "evals" / f"eval_{line['version']}.json").read_text())
            expected = of_eval(logged["rollouts"], config["samples"], config["solved_at"])
            found += _differences(f"eval {line['version']}", line, expected)
            found += _differences(f"eval {line['version']}.json", logged, expected)
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
        found += _differences("summary", summary, of_summary(steps, list(batches.values())))
        if "trained" in summary["mean_length"] and len(starts) == 1:
            num = sum(map(num_usable, batches.values()))
            seconds = sum(batch["generation_s"][batch["usable"]].sum() for batch in batches.values())
            expected = {"tokens": sum(map(num_live, batches.values())) / num, "seconds": seconds / num}
            found += _differences("mean length", summary["mean_length"]["trained"], expected)
        if ledger := summary["ledger"]:
            for entry, count in (("rollouts", num_usable), ("tokens", num_live)):
                expected = {"trained": sum(map(count, batches.values()))}
                found += _differences(f"ledger of {entry}", ledger[entry], expected)
    return found


def starts_of(folder: Path) -> list[tuple[int, dict]]:
    """The version of each start, and its config; what a run without a history has is of its only one."""
    if not (folder / "run.json").exists():
        return [(0, tomllib.loads((folder / "config.toml").read_text()))]
    starts = json.loads((folder / "run.json").read_text())["starts"]
    return [(start["version"], tomllib.loads((folder / start["config"]).read_text())) for start in starts]


class Logged:
    """A logged batch; rows by name, segments as sequences of their own."""

    def __init__(self, folder: Path, index: int) -> None:
        self.index = index
        with safe_open(folder / f"step_{index}.safetensors", "numpy") as file:
            self._arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.words = json.loads(file.metadata()["words"])
        shown = json.loads((folder / f"step_{index}.json").read_text())
        assert shown["index"] == index
        self.shown = shown["rollouts"]

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    @property
    def spans(self) -> list[slice]:
        return [slice(a, b) for a, b in itertools.pairwise(self["cu_seqlens"].tolist())]

    @property
    def num_loss_tokens(self) -> int:
        usable = itertools.compress(self.spans, self["usable"])
        return sum(int(self["loss_mask"][span].sum()) for span in usable)

    def sequences(self) -> Iterator[tuple[int, np.ndarray]]:
        """Index of the rollout and its loss mask, of each segment."""
        for i, (span, words) in enumerate(zip(self.spans, self.words, strict=True)):
            edges = [span.start, *(span.start + cut for cut in words["segments"]), span.stop]
            for a, b in itertools.pairwise(edges):
                yield i, self["loss_mask"][a:b]


def of_step(step: dict, batch: Logged, config: dict) -> dict[str, object]:
    """What the step that trained the batch should have logged."""
    trainer, index, size = config["trainer"], batch.index, len(batch["ticket"])
    usable = [
        words["finish_reason"] not in UNMEASURED
        and bool(batch["loss_mask"][span].any())
        and not (trainer["mask_truncated"] and words["finish_reason"] == "length")
        for words, span in zip(batch.words, batch.spans, strict=True)
    ]
    assert usable == batch["usable"].tolist() == [rollout["usable"] for rollout in batch.shown]
    assert size == config["rollout"]["batch_size"] and batch["ticket"].tolist() == sorted(batch["ticket"].tolist())
    good = np.flatnonzero(usable)
    versions = [batch["versions"][span][batch["loss_mask"][span]] for span in batch.spans]
    lengths = [len(of_one) for of_one in versions]
    live = {i: versions[i][versions[i] >= 0] for i in good}
    heads = {i: int(own.min()) for i, own in live.items() if len(own)}
    finished = batch["finished_version"]
    ages = {
        "rollouts": [index - head for head in heads.values()],
        "tokens": [index - version for own in live.values() for version in own.tolist()],
        "in_flight": [int(finished[i]) - head for i, head in heads.items()],
        "in_queue": [index - int(finished[i]) for i in heads],
    }
    every = trainer["entropy"] or trainer["kl_coefficient"] or trainer["reject"] != "none"
    computes_all = bool(every) or trainer["advantage"] == "gae"
    computed = [i for i in good if computes_all or batch["advantage"][i] != 0]
    epochs, minibatches = trainer["num_epochs"], trainer["num_minibatches"]
    cut = np.bincount(batch["minibatch"], minlength=minibatches)
    assert len(cut) == minibatches and (np.diff(batch["minibatch"]) >= 0).all()
    assert trainer["share_prefix"] or cut.max() - cut.min() <= 1
    inputs = sum(int(np.flatnonzero(mask)[-1]) for i, mask in batch.sequences() if i in set(computed) and mask.any())
    given_up = {name: step[f"rollout/{name}"] for name in ("filtered", "dropped", "skipped")}
    num_sampled = size + given_up["filtered"] + given_up["dropped"]
    on_version = sum(int(np.count_nonzero(versions[i] == index)) for i in computed)
    rate = trainer["learning_rate"] * min(1.0, (index + 1) / max(1, trainer["warmup_steps"]))
    values: dict[str, object] = {
        "reward_trained": _mean(batch["reward"][good]),
        "rollout/length": _mean([lengths[i] for i in good]),
        "rollout/turns": _mean(batch["num_turns"][good]),
        **{name: _mean([w["finish_reason"] == end for w in batch.words]) for name, end in FROM_ALL.items()},
        "rollout/trainable_share": np.count_nonzero(batch["advantage"]) / num_sampled,
        "age/in_flight_mean": _mean(ages["in_flight"]) or 0.0,
        "age/in_queue_mean": _mean(ages["in_queue"]) or 0.0,
        "age/counts": {name: np.bincount(of_name).tolist() for name, of_name in ages.items()},
        "age/unversioned_rollouts": len(good) - len(heads),
        "age/unversioned_tokens": sum(lengths[i] for i in good) - len(ages["tokens"]),
        "age/optimizer_steps_max": (max(ages["tokens"], default=0) + 1) * epochs * minibatches - 1,
        "age/max_staleness": config["staleness"]["max_staleness"],
        "trainer/tokens": sum(lengths[i] for i in good),
        "trainer/computed_tokens": sum(lengths[i] for i in computed),
        "trainer/input_tokens": epochs * inputs - step["trainer/shared_tokens"],
        "trainer/learning_rate": rate,
        "trainer/idle": step["trainer/wait_s"] / (step["trainer/wait_s"] + step["trainer/step_s"]),
        "trainer/tokens_per_s": step["trainer/input_tokens"] / step["trainer/step_s"],
        "trainer/mfu": step["trainer/peak_s"] / step["trainer/step_s"],
    }
    if on_version or "trainer/mismatch_tokens" in step:
        values["trainer/mismatch_tokens"] = on_version
    for one, name in (("rollout", "rollouts"), ("token", "tokens")):
        values |= {f"age/{one}_{figure}": value for figure, value in _figures(ages[name]).items()}
    if not any(given_up.values()):
        values |= rewards(batch)
    return values


def shown_otherwise(batch: Logged) -> list[int]:
    """Rollouts that the JSON shows otherwise than the safetensors have them."""
    found = []
    for i, (span, words, row) in enumerate(zip(batch.spans, batch.words, batch.shown, strict=True)):
        expected = {name: batch[name][i].item() for name in ARRAYS} | {name: words[name] for name in WORDS}
        mask = batch["loss_mask"][span]
        versions = batch["versions"][span][mask].tolist()
        expected |= {"tokens": len(mask), "trainable": len(versions)}
        expected["versions"] = [[version, len(list(run))] for version, run in itertools.groupby(versions)]
        rounded = {"advantage": batch["advantage"][i].item(), "generation_s": batch["generation_s"][i].item()}
        same = all(math.isclose(row[name], value, abs_tol=1e-6) for name, value in rounded.items())
        if row != expected | {name: row[name] for name in rounded} or not same:
            found.append(i)
    return found


def num_usable(batch: Logged) -> int:
    return int(batch["usable"].sum())


def num_live(batch: Logged) -> int:
    """Tokens of usable rollouts that the live policy sampled."""
    spans = itertools.compress(batch.spans, batch["usable"])
    return sum(int(np.count_nonzero(batch["versions"][span] >= 0)) for span in spans)


def rewards(batch: Logged) -> dict[str, float | None]:
    """Means over all that was measured: where nothing was given up, of the batch alone."""
    found: dict[str, list[float]] = {"reward": []}
    for words, reward in zip(batch.words, batch["reward"].tolist(), strict=True):
        if words["finish_reason"] not in UNMEASURED:
            parts = {f"/{words['env']}/{name}": value for name, value in words["reward_parts"].items()}
            for name, value in {"": reward, f"/{words['env']}": reward, **parts}.items():
                found.setdefault(f"reward{name}", []).append(value)
    return {name: _mean(values) for name, values in found.items()}


def broken(step: dict) -> list[str]:
    """What the numbers of a step promise of each other."""
    most = step["admission/bound"] + step["admission/given_up"]
    promises = {
        "admitted within the bound": step["admission/per_step"] <= most,
        "age within the bound": step["age/bound"] is None or step["age/rollout_max"] <= step["age/bound"],
        "tokens have ages": sum(step["age/counts"]["tokens"]) + step["age/unversioned_tokens"]
        == step["trainer/tokens"],
        "computed are of the loss": step["trainer/computed_tokens"] <= step["trainer/tokens"],
        "shares": all(0 <= step[f"rollout/{name}"] <= 1 for name in ("truncated", "failed", "trainable_share")),
        "the trainer is held within its step": step["trainer/hold_s"] <= step["trainer/step_s"],
        "a share of the peak": 0 <= step["trainer/mfu"] < 1.5,
    }
    return [name for name, kept in promises.items() if not kept]


def of_eval(rollouts: list[dict], samples: int, solved_at: float) -> dict[str, object]:
    """What an evaluation of these should have logged."""
    values: dict[str, object] = {}
    for env in {rollout["env"] for rollout in rollouts}:
        own = [rollout for rollout in rollouts if rollout["env"] == env]
        good = [rollout for rollout in own if rollout["finish_reason"] not in UNMEASURED]
        tasks: dict[str, list[bool]] = {}
        for rollout in good:
            tasks.setdefault(rollout["task_id"], []).append(rollout["reward"] >= solved_at)
        versions = [version for rollout in own for version, _ in rollout["versions"] if version >= 0]
        named: dict[str, object] = {
            "reward": _mean([rollout["reward"] for rollout in good]),
            "length": _mean([sum(count for _, count in rollout["versions"]) for rollout in good]),
            "truncated": _mean([rollout["finish_reason"] == "length" for rollout in good]),
            "failed": _mean([rollout["finish_reason"] in ("error", "cancelled") for rollout in own]),
            "skipped": _mean([rollout["finish_reason"] == "skipped" for rollout in own]),
            "oldest_version": min(versions, default=-1),
            "newest_version": max(versions, default=-1),
            f"avg@{samples}": _mean([float(np.mean(solved)) for solved in tasks.values()]),
        }
        for k in {2**n for n in range(9) if 2**n < samples} | {samples}:
            enough = [(len(solved), sum(solved)) for solved in tasks.values() if len(solved) >= k]
            named[f"pass@{k}"] = _mean([1 - comb(n - c, k) / comb(n, k) for n, c in enough])
        values |= {f"eval/{env}/{name}": value for name, value in named.items()}
    return values


def of_summary(steps: list[dict], batches: list[Logged]) -> dict[str, object]:
    """What summary.json should say of all steps together."""
    ages = {}
    for name in ("rollouts", "tokens"):
        ages[name] = [age for step in steps for age, n in enumerate(step["age/counts"][name]) for _ in range(n)]
    figures = {one: _figures(ages[name]) for one, name in (("rollout", "rollouts"), ("token", "tokens"))}
    judged = [step["reward"] for step in steps]
    return {
        "steps": len(steps),
        "tokens_trained": sum(batch.num_loss_tokens for batch in batches),
        "age_mean": figures["rollout"]["mean"],
        "age_p99": figures["rollout"]["p99"],
        "age_max": figures["rollout"]["max"],
        "parked_s": sum(step["time/parked_s"] for step in steps),
        "reward_first": _mean([reward for reward in judged[:5] if reward is not None]),
        "reward_last": _mean([reward for reward in judged[-5:] if reward is not None]),
    }


def _figures(ages: list[int]) -> dict[str, float]:
    if not ages:
        return dict.fromkeys(("mean", "p50", "p99", "max"), 0)
    ranks = {f"p{q}": int(np.percentile(ages, q, method="inverted_cdf")) for q in (50, 99)}
    return {"mean": float(np.mean(ages)), "max": max(ages), **ranks}


def _mean(values) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _differences(where: str, logged: dict, expected: dict[str, object]) -> list[str]:
    return [
        f"{where}: {name} = {logged.get(name, 'absent')}, on disk {value}"
        for name, value in expected.items()
        if name not in logged or not _same(logged[name], value)
    ]


def _same(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one == other
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
