"""What a person sees: a line a step, a table at the end, a summary on disk.

Given the numbers of each step and the engines' figures.  What it counts is of the whole run, resumes included, what it
times of this process.  Idle shares leave out filling and emptying the pipeline: the trainer's run from its first batch
on, the engines' from the first admission until the last batch was formed.
Knows nothing of queues or ranks.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from spmd_rl.config.age_bound import Bound
from spmd_rl.diagnostics.terminal import escaped
from spmd_rl.metrics.ages import AgeStats
from spmd_rl.metrics.bottleneck import Knobs, Signals, diagnose
from spmd_rl.metrics.engine_rates import EngineFigures
from spmd_rl.metrics.eval_report import EvalReport
from spmd_rl.metrics.probe import MUCH_KL, together
from spmd_rl.types import Batch, Finish, Rollout

RECENT = 6  # ends of steps that the time left is judged by
ENDS = 5  # batches at either end of the run that reward_first and reward_last are the means of


def reward_metrics(rollouts: Sequence[Rollout]) -> dict[str, float | None]:
    """Mean reward and parts of what was sampled for a batch: its own rollouts and those given up meanwhile.

    "reward" is None where none of them was measured.
    """
    good = [r for r in rollouts if not r.failed]
    parts: dict[str, list[float]] = {}
    for rollout in good:
        for name, value in rollout.reward_parts.items():
            parts.setdefault(f"reward/{rollout.env}/{name}", []).append(value)
    for env in {r.env for r in good}:
        parts[f"reward/{env}"] = [r.reward for r in good if r.env == env]
    return {"reward": _mean([r.reward for r in good])} | {name: _mean(values) for name, values in parts.items()}


def batch_metrics(
    batch: Batch, *, given_up: Mapping[str, Sequence[Rollout]], usable: Callable[[Rollout], bool]
) -> dict[str, Any]:  # as metrics.jsonl has it: numbers, None, and the counts of ages
    """What a batch says of itself and of what was given up before it was full."""
    ages = AgeStats()
    ages.add(batch, usable)
    good = [r for r in batch.rollouts if usable(r)]

    return {
        **ages.record(),
        "reward_trained": _mean([r.reward for r in good]),
        "rollout/length": _mean([r.num_trainable for r in good]),
        "rollout/turns": _mean([r.num_turns for r in good]),
        "rollout/truncated": _mean([r.finish_reason == "length" for r in batch.rollouts]),
        "rollout/failed": _mean([r.finish_reason == Finish.ERROR for r in batch.rollouts]),
        **{f"rollout/{outcome}": len(rollouts) for outcome, rollouts in given_up.items()},
        "rollout/trainable_share": int(np.count_nonzero(batch.advantages))
        / (len(batch.rollouts) + sum(len(given_up.get(outcome, ())) for outcome in ("filtered", "dropped"))),
    }


def trainer_metrics(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What the trainer ranks say of a step; times, and what is of a second of the step, are means over them."""
    names = ("wait_s", "step_s", "hold_s")
    wait_s, step_s, hold_s = (float(np.mean([answer[f"trainer/{name}"] for answer in answers])) for name in names)
    values = dict(answers[0])
    return values | {
        "trainer/wait_s": wait_s,
        "trainer/step_s": step_s,
        "trainer/hold_s": hold_s,
        "trainer/idle": _part(wait_s, wait_s + step_s),
        "trainer/tokens_per_s": _part(values["trainer/input_tokens"], step_s),
        "trainer/mfu": _part(values["trainer/peak_s"], step_s),
    }


class Report:
    """Collects while the run goes on; `summary` and `table` when it ends."""

    def __init__(
        self,
        *,
        steps: int,
        knobs: Knobs,
        slots: int,  # of all engines
        bound: Bound,
        decode: Callable[[np.ndarray], str],
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.say = say
        self.ages = AgeStats()
        self._optimizer_steps = 0  # of the oldest token, see docs/metrics.md
        self.version = 0
        self._steps, self._knobs, self._slots, self._bound = steps, knobs, slots, bound
        self.engines = EngineFigures(clock=clock)
        self._decode, self._clock = decode, clock
        self._started = clock()
        self._num_steps = 0
        self._resumed_at = 0
        self._first_step: float | None = None  # when it began
        self._step_times: deque[float] = deque(maxlen=RECENT)
        self._first_rewards: list[float | None] = []
        self._last_rewards: deque[float | None] = deque(maxlen=ENDS)
        self._waited_s = self._worked_s = 0.0  # by the trainer, from its first batch on
        self._held_back_s = 0.0  # of the waiting: a batch's worth of finished rollouts lay there
        self._held_s = 0.0  # complete batches, by this process
        self._sampled = self._taught = self._dropped = 0.0  # rollouts: all, with an advantage, given up for their age
        self._num_moved = 0  # steps that changed weights
        self._trained_tokens = 0.0
        self._parked_s = 0.0
        self._evals: list[tuple[int, Mapping[str, float | None], Sequence[Rollout]]] = []  # the first and the last
        self._failures: Counter[str] = Counter()  # rollouts by what they failed of
        self._num_skipped = 0  # rollouts, by this process
        self._probe: dict[str, float] = {}  # the worst of all, by metric
        self._sampled_kl: float | None = None  # of the newest probe
        self._mismatch: float | None = None  # of batches, the worst; where one has no such tokens, the newest probe's
        self._probe_s = self._probe_start_s = 0.0  # that training was held up, by this process

    def restore(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Go on from what the run recorded up to the version that is resumed."""
        for record in records:
            version = record["version"]
            if record["kind"] == "step":
                self._count(version, record)
                failures = {name: value for name, value in record.items() if name.startswith("failures/")}
                self._failures = Counter({name.removeprefix("failures/"): value for name, value in failures.items()})
            elif record["kind"] == "eval":
                values = {name: value for name, value in record.items() if name.startswith("eval/")}
                self._evals = [*self._evals[:1], (version, values, [])]
            elif record["kind"] == "probe":
                self._add_probe(record)
        self._resumed_at = self.version

    # ---- while it goes on

    def training_begins(self) -> None:
        """Right after a count of the engines."""
        self.engines.mark()
        self._first_step = self._clock()
        self._step_times.append(self._first_step)

    def step(self, version: int, values: dict[str, float]) -> None:
        self._step_times.append(self._clock())
        if self._worked_s > 0:  # the first batch is waited for anyway
            self._waited_s += values["trainer/wait_s"]
            self._held_back_s += min(values["trainer/wait_s"], values["time/held_back_s"])
        sampled = self._knobs.batch_size + values["rollout/filtered"] + values["rollout/dropped"]
        self._sampled += sampled
        self._taught += sampled * values["rollout/trainable_share"]
        self._dropped += values["rollout/dropped"]
        self._num_moved += values["weights/update_norm"] != 0
        self._held_s += values["time/parked_s"]
        self._worked_s += values["trainer/step_s"]
        self._count(version, values)
        recent = self._step_times
        left_s = (recent[-1] - recent[0]) / max(1, len(recent) - 1) * (self._steps - version)
        in_force = values.get("age/bound", self._bound.age)
        bound = "" if in_force is None else f" (bound {in_force})"
        self.say(
            f"step {version:>{len(str(self._steps))}}/{self._steps}  reward {_number(values['reward'])}  "
            f"age mean {values['age/rollout_mean']:.2f} max {values['age/rollout_max']:.0f}{bound}  "
            f"idle trainer {_share(self.trainer_idle)} engine {_share(values.get('engine/idle'))}  "
            f"tokens/s engines {values.get('engine/tokens_per_s', 0):.0f} trainer "
            f"{values['trainer/tokens_per_s']:.0f}  left {_duration(left_s)}"
        )

    def evaluated(
        self, version: int, report: EvalReport, values: Mapping[str, float | None], rollouts: Sequence[Rollout]
    ) -> None:
        self._evals = [*self._evals[:1], (version, values, list(rollouts))]
        for env, result in report.envs.items():
            lost = f", {result.unmeasured}" if result.unmeasured else ""
            self.say(
                f"eval at version {version}: {env} reward {_number(result.reward)} over {result.num_tasks} tasks{lost}"
            )

    def failed(self, rollout: Rollout) -> None:
        """A rollout ended without a reward: counted by the name of its error, the first of each told."""
        task = f"{rollout.env}, task {escaped(rollout.task_id)}"
        if rollout.finish_reason == Finish.ERROR:
            kind = rollout.error.partition(":")[0].partition(" ")[0]
            self._failures[kind] += 1
            if self._failures[kind] == 1:
                self.say(f"{task}: {rollout.error} (counted from here on)")
        elif rollout.skipped:
            if not self._num_skipped:
                self.say(f"{task}: {rollout.error}: skipped (counted from here on)")
            self._num_skipped += 1

    def failures(self) -> dict[str, float]:
        """Of the run so far, as metrics."""
        return {f"failures/{kind}": count for kind, count in self._failures.items()}

    def probed(self, version: int, values: Mapping[str, float]) -> None:
        names = ("probe/sampled_kl", "probe/kl")
        kl, before = (max(known.get(name, 0.0) for name in names) for known in (values, self._probe))
        if not kl <= max(before, MUCH_KL):
            self.say(
                f"warning: at version {version} engines compute other log-probs than trainers, by {kl:.2g} nats per "
                f"token (the worst so far, more than {MUCH_KL:g}): their kernels differ much, or an engine does not "
                "compute with the weights that it received"
            )
        if self._first_step is None:
            self._probe_start_s += values["probe/cost_s"]
        else:
            self._probe_s += values["probe/cost_s"]
        self._add_probe(values)

    def mismatched(self, version: int, kl: float | None) -> None:
        """Of the tokens of a batch that the trained version sampled."""
        if kl is not None and not kl <= max(self._mismatch or 0.0, MUCH_KL):
            self.say(
                f"warning: tokens that version {version} sampled have other log-probs in training on it, by {kl:.2g} "
                f"nats per token (the worst so far, more than {MUCH_KL:g}): engines' and trainers' kernels differ "
                "much, or an environment gives back other tokens than were sampled"
            )

    # ---- at the end

    @property
    def trainer_idle(self) -> float | None:
        """Share of its time, from its first batch on, that the trainer waited for the next."""
        return self._waited_s / (self._waited_s + self._worked_s) if self._worked_s else None

    def signals(self, closed_s: Mapping[str, float]) -> Signals:
        """What the verdict goes by."""
        engines = self.engines.within
        return Signals(
            trainer_idle=self.trainer_idle,
            engine_idle=engines.get("idle"),
            slots_used=engines.get("running", 0.0) / self._slots,
            requests_wait=engines.get("waiting", 0.0),
            kv_wait=engines.get("kv_waiting", 0.0),
            closed_by_concurrency=_part(closed_s["concurrency"], sum(closed_s.values())),
            held_back=_part(self._held_back_s, self._waited_s),
            parked=_part(self._held_s, self._training_s()),
            trainable=self._taught / self._sampled if self._sampled else None,
            dropped=_part(self._dropped, self._sampled),
            moved=_part(self._num_moved, self.version - self._resumed_at),
            reward=_mean([reward for reward in self._last_rewards if reward is not None]),
        )

    def summary(
        self,
        ledger: dict[str, object],
        lengths: dict[str, dict[str, float]],
        closed_s: Mapping[str, float],  # of the gate
    ) -> dict[str, object]:
        """What summary.json holds beside how the run ended."""
        signals = self.signals(closed_s)
        ages = self.ages.summary()
        wall_s = self._clock() - self._started
        stage, advice = diagnose(signals, self._knobs)
        return {
            "steps": self._num_steps,
            "version": self.version,
            "resumed_at": self._resumed_at,
            "reward_first": _mean([reward for reward in self._first_rewards if reward is not None]),
            "reward_last": _mean([reward for reward in self._last_rewards if reward is not None]),
            "age_mean": ages["rollout_mean"],
            "age_p99": ages["rollout_p99"],
            "age_max": ages["rollout_max"],
            "age_optimizer_steps_max": self._optimizer_steps,
            "age": ages,
            "age_bound": self._bound.age,
            "age_bound_line": self._bound.line,
            "max_staleness": self._knobs.max_staleness,
            "trainer_idle": signals.trainer_idle,
            "engine_idle": signals.engine_idle,
            "signals": asdict(signals),
            "engines": self.engines.summary(),
            "parked_s": self._parked_s,
            "probe_kl_max": self._probe.get("probe/kl"),
            "sampled_kl_max": self._probe.get("probe/sampled_kl"),
            "sampled_max": self._probe.get("probe/sampled_max"),
            "mismatch_kl_max": self._mismatch,
            "probe_start_s": self._probe_start_s,
            "probe_share": _part(self._probe_s, self._training_s()),
            "tokens_trained": self._trained_tokens,
            "eval_first": self._evals[0][1] if self._evals else None,
            "eval_last": self._evals[-1][1] if self._evals else None,
            "wall_s": wall_s,
            "steps_per_minute": self._steps_per_minute(),
            "bottleneck": stage,
            "advice": advice,
            "failures": dict(self._failures),
            "mean_length": lengths,
            "ledger": ledger,
        }

    def table(self, summary: Mapping[str, Any], *, paths: dict[str, object]) -> str:
        """The end of the run for a person."""

        bound = "none" if summary["age_bound"] is None else summary["age_bound"]
        dropped = {
            f"mean length, {end}": f"{length['tokens']:.1f} tokens, {length['seconds']:.2f} s"
            for end, length in summary["mean_length"].items()
            if "dropped" in summary["mean_length"] and end in ("trained", "dropped")
        }
        rows = {
            "status": summary["status"],
            "steps": (
                f"{summary['version'] - summary['resumed_at']} in {_duration(summary['wall_s'])}, version "
                f"{summary['version']}"
            ),
            f"reward, first {ENDS} → last {ENDS}": (
                f"{_number(summary['reward_first'])} → {_number(summary['reward_last'])}"
            ),
            "age mean / p99 / max": (
                f"{summary['age_mean']:.2f} / {summary['age_p99']} / {summary['age_max']}   (S = "
                f"{summary['max_staleness']}, bound {bound}; {summary['age_optimizer_steps_max']} optimizer "
                "steps at most)"
            ),
            "idle trainer / engine": f"{_share(summary['trainer_idle'])} / {_share(summary['engine_idle'])}",
            **_shares_of_engines(summary["engines"]),
            **dropped,
            "mismatch KL, probe": (
                f"{_number(summary['sampled_kl_max'], '.1e')}   (largest difference of a sampled token "
                f"{_number(summary['sampled_max'], '.1e')}; {summary['probe_start_s']:.1f} s at the start, then "
                f"{100 * summary['probe_share']:.1f}% of the time)"
            ),
            "mismatch KL, batches": _number(summary["mismatch_kl_max"], ".1e"),
            "bottleneck": f"{summary['bottleneck']}: {summary['advice']}",
            **paths,
        }
        width = max(map(len, rows))
        lines = [f"  {name:<{width}}  {value}" for name, value in rows.items()]
        for version, example in self._examples():
            lines.append(f"  example at version {version} (reward {example.reward:g}):")
            lines += [f"    {escaped(line)}" for line in self._decode(example.token_ids).strip().splitlines()]
        return "\n".join(lines)

    def _examples(self) -> list[tuple[int, Rollout]]:
        """The task whose reward rose most from the first evaluation to the last; of one before a resume, no text."""
        if len(self._evals) < 2:
            return []
        (first, _, before), (last, _, after) = self._evals
        earlier = {(r.env, r.task_id, r.sample): r for r in before if not r.failed}
        pairs = [(earlier.get((r.env, r.task_id, r.sample)), r) for r in after if not r.failed]
        both = [(then, now) for then, now in pairs if then is not None]
        if not both:
            return [(last, now) for _, now in pairs[:1]]
        then, now = max(both, key=lambda pair: pair[1].reward - pair[0].reward)
        return [(first, then), (last, now)]

    def _count(self, version: int, values: Mapping[str, Any]) -> None:
        """A step, of this process or of one before."""
        self.version = version
        self.ages.merge(AgeStats.from_record(values))
        self._optimizer_steps = max(self._optimizer_steps, values.get("age/optimizer_steps_max", 0))
        self._first_rewards += [values["reward"]] * (self._num_steps < ENDS)
        self._last_rewards.append(values["reward"])
        self._num_steps += 1
        self._trained_tokens += values["trainer/tokens"]
        self._parked_s += values["time/parked_s"]
        mismatch = values.get("trainer/mismatch_kl", self._sampled_kl)
        if mismatch is not None:
            self._mismatch = max(self._mismatch or 0.0, mismatch)

    def _add_probe(self, values: Mapping[str, Any]) -> None:
        """Of this process or of one before."""
        self._sampled_kl = values.get("probe/sampled_kl", self._sampled_kl)
        numbers = {name: value for name, value in values.items() if name.startswith("probe/") and value is not None}
        self._probe = together([self._probe, numbers])

    def _training_s(self) -> float:
        """From the first admission of this process to its last step."""
        return 0.0 if self._first_step is None else self._step_times[-1] - self._first_step

    def _steps_per_minute(self) -> float | None:
        seconds = self._training_s()
        return 60.0 * (self.version - self._resumed_at) / seconds if seconds else None


def eval_values(report: EvalReport) -> dict[str, float | None]:
    """The numbers of an evaluation by name."""
    values: dict[str, float | None] = {}
    for env, result in report.envs.items():
        values |= {
            f"eval/{env}/reward": result.reward,
            f"eval/{env}/length": result.length,
            f"eval/{env}/truncated": result.truncated,
            f"eval/{env}/failed": result.failed,
            f"eval/{env}/skipped": result.num_skipped / result.num_rollouts,
            f"eval/{env}/oldest_version": result.oldest_version,
            f"eval/{env}/newest_version": result.newest_version,
        }
        values[f"eval/{env}/avg@{result.samples}"] = result.solved
        values |= {f"eval/{env}/pass@{k}": value for k, value in result.pass_at.items()}
    return values


def eval_texts(rollouts: Sequence[Rollout], decode: Callable[[np.ndarray], str]) -> list[dict[str, object]]:
    """What an evaluation's file says of each rollout."""
    return [
        {
            "env": r.env,
            "task_id": r.task_id,
            "reward": None if r.failed else r.reward,
            "reward_parts": r.reward_parts,
            "finish_reason": r.finish_reason,
            "versions": r.version_runs(),
            "error": r.error,
            "text": decode(r.token_ids),
        }
        for r in rollouts
    ]


def _shares_of_engines(engines: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Where there are several: which one made most of the rollouts, which least."""
    if len(engines) < 2:
        return {}
    total = max(sum(engine["rollouts"] for engine in engines.values()), 1)
    ordered = sorted(engines.items(), key=lambda item: -item[1]["rollouts"])
    shares = [
        f"{name} {_share(engine['rollouts'] / total)} (idle {_share(engine['idle'])})"
        for name, engine in (ordered[0], ordered[-1])
    ]
    return {f"rollouts of {len(engines)} engines": f"most {shares[0]}, least {shares[1]}"}


def _part(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _duration(seconds: float) -> str:
    """Example: 75 → 1m15s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
