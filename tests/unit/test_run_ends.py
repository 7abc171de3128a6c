"""However a run ends, it has saved what there was, and both ledgers close from what its summary says."""

import asyncio

import pytest

from spmd_rl.packing.messages import BatchRefused
from spmd_rl.types import Finish
from tests import fakes
from tests.ledgers import closed
from tests.unit.test_orchestrator import TRAINER, Ranks


class Worlds(Ranks):
    """Ranks whose groups end as a test says: with these rewards or this error, or not before it says so."""

    def __init__(self, folder, *, rewards=lambda version: (0.0, 1.0), error="", hold_at=None, faulty_at=None, **more):
        super().__init__(folder, **more)
        self.rewards, self.error, self.hold_at, self.faulty_at = rewards, error, hold_at, faulty_at
        self.finish = Finish.SKIPPED if error.startswith("PromptTooLong") else Finish.ERROR
        self.held_works: list = []

    def _end(self, work) -> None:
        if work.purpose == "train" and self.version == self.hold_at:
            self.held_works.append(work)
            self._tokens += 1  # of a first turn
            self._changed.set()
            return
        for sample in range(work.size):
            rollout = fakes.rollout(work, sample, versions=[self.version], reward=self.rewards(self.version)[sample])
            if self.error and work.purpose == "train":
                rollout.finish_reason, rollout.error = self.finish, self.error
            self._tokens += 1
            self.finished(rollout)

    def _train(self, version, save) -> None:
        if self.faulty_at is not None and version > self.faulty_at:
            if version == self.faulty_at + 1:
                refused = BatchRefused(version=self.faulty_at, text="gradient norm nan")
                self.orchestrator.handle(TRAINER, refused)
        else:
            super()._train(version, save)


def run(worlds: Worlds, until=None) -> str:
    async def main() -> str:
        async with worlds.running() as task:
            if until is not None:
                await until(task)
            return await task

    return asyncio.run(main())


def solved_from(version: int):
    return lambda v: (0.0, 1.0) if v < version else (1.0, 1.0)


NO_SERVER = {"error": "OSError: no server"}
GUARDS = {
    "empty batches": (
        {"rewards": lambda version: (0.0, 1.0) if version < 3 else (0.0, 0.0), "steps": 50},
        "3 empty batches in a row, 12 rollouts in groups 6 zero_spread; reward mean 0",
    ),
    "failure rate": (NO_SERVER | {"trainer": {"max_empty_batches": 99}}, "5 times: OSError: no server"),
    "failed groups": (NO_SERVER | {"rollout": {"max_failure_rate": 1.0}}, "last error: OSError: no server"),
    "prompt too long": ({"error": "PromptTooLong: 9 tokens", "rollout": {"long_prompts": "refuse"}}, "long_prompts"),
    "too few tasks": ({"num_tasks": 1}, "the tasks ended with 1 groups before the first batch was full"),
    "solved at once": ({"rewards": lambda version: (1.0, 1.0)}, "all is solved before anything is trained, 12 roll"),
    "a trainer's": ({"faulty_at": 2}, "gradient norm nan"),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_run_that_a_guard_ends_has_saved_what_there_is(tmp_path, guard):
    settings, text = GUARDS[guard]
    rollout = {"batch_size": 4, "group_size": 2} | settings.get("rollout", {})
    worlds = Worlds(tmp_path, eval={"every": -1}, **{**settings, "rollout": rollout})
    assert run(worlds) == "failed"
    orchestrator = worlds.orchestrator
    assert text in str(orchestrator.ending.failure)
    assert (worlds.trainers_saved, worlds.exported) == (True, False)
    assert (
        [version for version, _ in worlds.saved]
        == [orchestrator.policy.version]
        == [orchestrator.checkpoints.saved_version]
    )
    assert worlds.count("step") == {version: 1 for version in range(1, orchestrator.policy.version + 1)}
    assert worlds.state[0]["path"]["version"] == orchestrator.policy.version
    closed(orchestrator.ledger_summary())
    assert orchestrator.ending.failed_rank == (TRAINER if guard == "a trainer's" else 0)


def test_a_run_that_has_solved_its_tasks_is_done_and_has_its_model(tmp_path):
    worlds = Worlds(tmp_path, rewards=solved_from(4), steps=50)
    assert run(worlds) == "done"
    assert (worlds.trainers_saved, worlds.exported) == (True, True)
    version = worlds.orchestrator.policy.version
    assert 4 <= version < 50 and worlds.count("eval")[version] == 1
    ledger = closed(worlds.orchestrator.ledger_summary())
    assert ledger["rollouts"]["filtered"] >= 12
    assert (ledger["in_flight_tokens"], ledger["rollouts"]["in_flight"], ledger["rollouts"]["waiting"]) == (0, 0, 0)


@pytest.mark.parametrize("hold_at", [None, 2])
def test_a_stopped_run_closes_with_what_waits_and_what_was_in_flight(tmp_path, hold_at):
    worlds = Worlds(tmp_path, steps=50, hold_at=hold_at, shutdown_s=1.0 if hold_at else 60.0, eval={"every": -1})

    async def stop(task) -> None:
        await worlds.until(lambda: worlds.count("step")[2])
        worlds.orchestrator.ending.stop()

    assert run(worlds, stop) == "stopped"
    ledger = closed(worlds.orchestrator.ledger_summary())
    assert ledger["generated_tokens"] == worlds._tokens
    assert ledger["in_flight_tokens"] == len(worlds.held_works)
    assert ledger["rollouts"]["in_flight"] == 2 * len(worlds.held_works)
    if hold_at:
        assert worlds.held_works


def test_a_run_in_the_middle_closes_with_what_engines_had_told(tmp_path):
    worlds, seen = Worlds(tmp_path, eval={"every": -1}), []
    worlds.orchestrator.stepping._on_recorded = lambda: seen.append(closed(worlds.orchestrator.ledger_summary()))
    assert run(worlds) == "done"
    assert len(seen) == 6 and seen[-1]["generated_tokens"] > 0
    last = closed(worlds.orchestrator.ledger_summary())
    assert last["generated_tokens"] == worlds._tokens and last["engines_counted_s_ago"] == 0.0
