"""Every number of a run that can be computed again from its batches and evaluations is what these say.

The real orchestrator and a real trainer on made-up episodes that fail, are cut off, span turns, versions and contexts.
"""

import asyncio
import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from spmd_rl import config as config_module
from spmd_rl.metrics.report import trainer_metrics
from spmd_rl.packing import packing
from spmd_rl.packing.messages import CheckpointWritten, StepDone
from spmd_rl.ranks.build_trainer import make_trainer
from spmd_rl.types import Finish, Rollout
from tests.recomputed import differences
from tests.unit.test_orchestrator import TRAINER, Ranks
from tests.unit.test_trainer import CPU, folder  # noqa: F401 (a fixture)

STEPS, WASTED = 6, 3
LENGTH = "eval/fake/length"
ROOT = Path(__file__).parents[2]


def episode(work, sample: int, version: int) -> Rollout:
    """Decided by its ticket, but for the versions, which are those that are live."""
    coin = random.Random(f"{work.purpose} {work.first_ticket + sample}")
    made = Rollout(
        env=work.task.env,
        task_id=work.task.task_id,
        group_id=work.group_id,
        sample=sample,
        ticket=work.first_ticket + sample,
        purpose=work.purpose,
        reward=coin.choice([0.0, 0.5, 1.0]),
        finish_reason=coin.choice([Finish.STOP, Finish.STOP, Finish.ENV, Finish.LENGTH]),
        num_turns=coin.randint(1, 3),
        num_wasted_tokens=WASTED * coin.randint(0, 1),
        admission_version=work.version,
    )
    made.reward_parts = {"right": made.reward} | {"form": 0.25} if coin.random() < 0.5 else {}
    for turn in range(made.num_turns):
        made.append(np.array([3 + coin.randrange(40) for _ in range(2 + turn)]))
        num, stored = coin.randint(1, 9), coin.random() < 0.1
        versions = np.linspace(work.version, version, num).astype(int)
        tokens = np.array([3 + coin.randrange(40) for _ in range(num)])
        made.append(tokens, np.full(num, -3.5), None if stored else versions)
        if coin.random() < 0.3:
            made.new_segment()
    if coin.random() < 0.3:
        made.append(np.array([5, 6, 7]))  # a tool's last word
    if coin.random() < 0.12:
        made.finish_reason, made.error, made.reward = Finish.ERROR, "ValueError: made to fail", 0.0
    return made


class Varied(Ranks):
    """Episodes take a number of turns of the loop, and a trainer trains them."""

    def __init__(self, run_dir: Path, model: Path, **sections) -> None:
        settings = {"run": {"steps": STEPS, "metrics_interval_s": 1000.0, "seed": 1}, "model": {"path": str(model)}}
        settings |= {"rollout": {"batch_size": 12, "group_size": 3, "max_failure_rate": 1.0}}
        settings |= {"eval": {"every": 2, "num_tasks": 3, "samples": 3}, "env": {"fake": {"path": "a:b"}}}
        super().__init__(run_dir, **settings | sections)
        self.config = config_module.from_tree(settings | sections)
        self.run_dir.config.write_text(config_module.dump(self.config))
        self.trainer = make_trainer(self.config, device=CPU)
        self.orchestrator.stepping._send_batch = self.ship
        self.coin = random.Random(0)

    def _work(self, work) -> None:
        self._wait(self.coin.randrange(300), self._end, work)

    def _wait(self, turns: int, call, *args) -> None:
        self._soon(*(self._wait, turns - 1, call, *args) if turns else (call, *args))

    def _end(self, work) -> None:
        for sample in range(work.size):
            rollout = episode(work, sample, self.version)
            self._tokens += rollout.num_sampled + rollout.num_wasted_tokens
            self.finished(rollout)

    def ship(self, index: int, packed: packing.Packed, save: bool) -> None:
        self._wait(150, self.train, index, packed, save)

    def train(self, index: int, packed: packing.Packed, save: bool) -> None:
        stepped = self.trainer.step(packing.by_segment(packed), index)
        times = {"wait_s": 0.5 + index, "step_s": 2.0 + index, "hold_s": 0.25}
        metrics = {f"trainer/{name}": value for name, value in (stepped | times).items()}
        self.orchestrator.handle(TRAINER, StepDone(version=index + 1, metrics=metrics))
        self.version = index + 1
        self._publish()
        if save:
            written = CheckpointWritten(version=index + 1, files={"__0_0.distcp": [1, index + 1]})
            self.orchestrator.handle(TRAINER, written)

    def play(self) -> list[dict]:
        """The run; its lines of metrics."""

        async def main() -> str:
            async with self.running() as task:
                return await task

        assert asyncio.run(main()) == "done"
        lines = [{"kind": kind, "version": version, **self.values[kind, version]} for kind, version in self.lines]
        self.run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        summary = self.orchestrator._report.summary({}, {}, {"concurrency": 0.0, "bound": 0.0})
        self.run_dir.summary.write_text(json.dumps(summary))
        return lines


RUNS = {
    "nothing is given up": {"trainer": {"filter_zero_spread": False, "learning_rate": 1e-4, "warmup_steps": 4}},
    "groups are filtered": {"staleness": {"max_staleness": 2, "max_concurrent": 36}},
    "cut off, minibatches, epochs, entropy, ship gate": {
        "trainer": {
            "mask_truncated": True,
            "num_minibatches": 2,
            "num_epochs": 2,
            "entropy": 0.01,
            "filter_zero_spread": False,
            "warmup_steps": 3,
        },
        "staleness": {"gate": "ship", "max_staleness": 1, "queue_size": 12, "max_concurrent": 24},
    },
    "dropped for their age": {
        "staleness": {"max_staleness": 1, "max_age": 1, "over_age": "drop", "order": "completion"},
        "eval": {"every": 2, "num_tasks": 3, "samples": 5, "pin": True},
        "trainer": {"mask_truncated": True, "num_epochs": 3, "advantage": "dr_grpo"},
    },
    "over the batch, rejected, shared prompts": {
        "trainer": {"advantage": "reinforce_pp", "reject": "off_policy", "share_prefix": True, "num_epochs": 2},
        "staleness": {"max_staleness": 3, "order": "oldest"},
    },
    "a critic of its own, a reference": {
        "trainer": {"advantage": "gae", "kl_coefficient": 0.1, "num_epochs": 2},
        "run": {"steps": STEPS, "metrics_interval_s": 0.1, "seed": 1},
    },
    "a critic, adaptive": {
        "trainer": {"advantage": "gae", "num_minibatches": 3, "mask_truncated": True},
        "critic": {"body": "shared"},
        "staleness": {"adaptive": True, "max_staleness": 3},
    },
}


@pytest.fixture(scope="module")
def played(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[dict]]]:  # noqa: F811
    """The folder and the metrics of each run."""
    folders = {name: tmp_path_factory.mktemp("run") for name in RUNS}
    return {name: (folders[name], Varied(folders[name], folder, **settings).play()) for name, settings in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_metrics_are_what_batches_and_evaluations_say(name: str, played: dict[str, tuple[Path, list[dict]]]) -> None:
    run_dir, lines = played[name]
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(steps) == STEPS and {line["kind"] for line in lines} >= {"step", "eval"}
    assert differences(run_dir) == []
    given_up = sum(step["admission/given_up"] for step in steps)
    assert (given_up == 0) == (name == "nothing is given up")


@pytest.mark.parametrize(("kind", "name"), [("step", "rollout/length"), ("step", "age/token_mean"), ("eval", LENGTH)])
def test_a_number_that_is_not_on_disk_is_found(
    kind: str, name: str, played: dict[str, tuple[Path, list[dict]]], tmp_path: Path
) -> None:
    run_dir, lines = played["nothing is given up"]
    shutil.copytree(run_dir, tmp_path / "run")
    wrong = [dict(line) for line in lines]
    next(line for line in wrong if line["kind"] == kind)[name] += 0.01
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in wrong))
    found = differences(tmp_path / "run")
    assert len(found) == 1 and re.fullmatch(rf"{kind} \d+: {name} = .*, on disk .*", found[0])


SEVERAL = {"engine/rankR/…", "rollouts", "version", "pause_s"}  # where there are several engines
GENERAL = {
    r"^eval/fake/(avg|pass)@.*": r"eval/ENV/\1@K",
    r"^eval/fake/": "eval/ENV/",
    r"^reward/[^/]+$": "reward/ENV",
    r"^reward/.*/.*": "reward/ENV/PART",
    r"^failures/.*": "failures/NAME",
}
ELSEWHERE = {"probe/kept_kl", "probe/flips"}  # with kv_on_update = "keep", with experts: tests of the probe show them
EXPERTS = {"trainer/expert_load_max", "trainer/expert_dead_share", "trainer/router_loss"}  # tests of experts show them


def described(heading: str) -> set[str]:
    """Names in the first column of a section's table."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    section = page.split(f"## `{heading}`")[1].split("\n## ")[0]
    return {name for row in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`([^`]+)`", row)}


@pytest.mark.parametrize("kind", ["step", "probe", "interval", "eval"])
def test_what_is_described_is_written_and_the_other_way_round(
    kind: str, played: dict[str, tuple[Path, list[dict]]]
) -> None:
    written = {name for _, lines in played.values() for line in lines if line["kind"] == kind for name in line}
    for pattern, name in GENERAL.items():
        written = {re.sub(pattern, name, one) for one in written}
    if kind == "interval":
        written = {name for name in written if not name.startswith("engine/")}  # told of with the steps
    expected = described(kind) - (SEVERAL | EXPERTS if kind == "step" else ELSEWHERE if kind == "probe" else set())
    assert expected == written - {"kind", "version"}


def test_rates_of_a_step_are_of_its_one_time() -> None:
    own = {"trainer/input_tokens": 600.0, "trainer/peak_s": 0.5, "trainer/hold_s": 0.1}
    ranks = [own | {"trainer/wait_s": wait, "trainer/step_s": step} for wait, step in ((1.0, 2.0), (3.0, 4.0))]
    values = trainer_metrics(ranks)
    assert (values["trainer/step_s"], values["trainer/tokens_per_s"], values["trainer/mfu"]) == (3.0, 200.0, 0.5 / 3)
    assert values["trainer/idle"] == 2 / 5
