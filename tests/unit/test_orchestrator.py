"""The orchestrator whole, with ranks that answer at once, and evaluations that end when a test says so."""

import asyncio
import json
import threading
from collections import Counter
from contextlib import asynccontextmanager

import numpy as np
import pytest

from spmd_rl import config as config_module
from spmd_rl.metrics.probe import Limits
from spmd_rl.metrics.report import Report
from spmd_rl.orchestrator import orchestrator as wiring
from spmd_rl.orchestrator.difficulty import Difficulty
from spmd_rl.orchestrator.orchestrator import Orchestrator
from spmd_rl.orchestrator.task_stream import TaskStream
from spmd_rl.packing import packing
from spmd_rl.packing.messages import (
    AskCounters,
    CancelGroup,
    CheckpointWritten,
    Counters,
    FinishTraining,
    LoadFromDisk,
    MayLoad,
    PinVersion,
    ProbeSampled,
    ProbeScored,
    RolloutFinished,
    SampleProbe,
    ScoreProbe,
    StartGroup,
    StepDone,
    TrainingFinished,
    VersionPinned,
    WeightsLoaded,
    WeightsSent,
)
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.types import Disagreement, Rollout
from tests import fakes
from tests.unit.test_resume import state as saved

ENGINE, TRAINER, MEMBER = 0, 1, 2
STEP = {"wait_s": 0.0, "step_s": 1.0, "hold_s": 0.0, "grad_norm": 1.0, "learning_rate": 1.0}
STEP |= {"tokens": 8, "input_tokens": 8, "peak_s": 0.5}
COUNTERS = ("busy_s", "slot_s", "waiting_s", "kv_waiting_s", "kv_used", "version", "swaps", "pause_s", "recompute_s")


class Ranks:
    """One engine and one trainer: what either is asked for is answered in the next turn of the loop."""

    def __init__(self, folder, *, steps=6, version=0, shutdown_s=60.0, num_tasks=None, limits=None, **sections):
        self.lines: list[tuple[str, int]] = []  # of metrics: kind and version
        self.values: dict[tuple[str, int], dict] = {}  # of those
        self.scored = lambda version: -1.0  # by the trainer: the log-prob of each token that was sampled for a probe
        self.probed: list[tuple[int, int]] = []  # version that trainers held, and sequences that they scored
        self.sampled: list[tuple[int, int | None]] = []  # probes that the engine was asked for: number and version
        self.saved: list[tuple[int, list]] = []  # checkpoints: version, and the lines at that moment
        self.state: tuple = ()  # of the newest checkpoint
        self.evaluating: list = []  # works of evaluations in flight
        self.hold_evals = False
        self.exported: bool | None = None
        self.trainers_saved: bool | None = None  # at the end
        self.may_write = threading.Event()  # worker threads checkpoints and evaluations
        self.may_write.set()
        self.told: list = []  # versions that the engine may take, and their checksums
        self.held = {ENGINE: [1, 2], MEMBER: [1, 2]}  # checksums of what an engine's ranks take; [1, 2] are sent
        self.metrics = {f"trainer/{name}": value for name, value in STEP.items()}  # of every step
        self._tokens, self._changed = 0, asyncio.Event()
        self.now = 0.0  # by the orchestrator's clock
        self.version = version
        run = {"steps": steps, "metrics_interval_s": 1000.0, "shutdown_s": shutdown_s, "probe_every": 0}
        tree = {"run": run, "model": {"path": "x"}}
        tree |= {"env": {"fake": {"path": "a:b"}}, "rollout": {"batch_size": 4, "group_size": 2}}
        tree |= {"eval": {"every": 2, "num_tasks": 3}, **sections}
        config = config_module.from_tree(tree)
        self.run_dir = RunDir(folder)
        self.run_dir.create()
        self.orchestrator = Orchestrator(
            config=config,
            run_dir=self.run_dir,
            tasks=TaskStream({"fake": lambda: fakes.tasks(num_tasks)}, weights={"fake": 1.0}, seed=0),
            difficulty=Difficulty(least=0.0, most=1.0, revisit=0.0, solved_at=1.0, seed=0),
            eval_tasks={"fake": list(fakes.tasks(3))},
            ranks=wiring.Ranks(engines=(ENGINE,), holders=(ENGINE, MEMBER), trainers=(TRAINER,), senders=(TRAINER,)),
            send=self._asked,
            send_batch=lambda index, packed, save: self._soon(self._train, index + 1, save),
            layout="",
            recorder=self,
            report=Report(
                steps=steps,
                knobs=fakes.knobs(),
                slots=4,
                bound=config.age_bound,
                decode=lambda token_ids: "",
                say=lambda line: self._changed.set(),
            ),
            decode=self._decode,
            complete_checkpoint=self._complete,
            version=version,
            limits=limits or Limits(),
            clock=lambda: self.now,
        )

    @asynccontextmanager
    async def running(self):
        """The run as a task, which is to be awaited in the block."""
        self._publish()
        task = asyncio.create_task(self.orchestrator.run())
        task.add_done_callback(lambda _: self._changed.set())
        try:
            async with asyncio.timeout(60.0):
                yield task
        finally:
            self.may_write.set()
            task.cancel()

    async def until(self, true) -> None:
        """Wait for something to be so after a line of output, a saved checkpoint or an evaluation's work."""
        while not true():
            self._changed.clear()
            await self._changed.wait()

    async def stop_in_evaluation(self, task) -> None:
        """Ask to stop while it runs: the run waits for its end."""
        await self.until(lambda: len(self.evaluating) == 3)
        self.orchestrator.ending.stop()
        await asyncio.wait({task}, timeout=0.1)
        assert not task.done()
        self.end_evaluations()
        assert await task == "stopped"

    def end_evaluations(self) -> None:
        works, self.evaluating = self.evaluating, []
        for work in works:
            self._end(work)

    def count(self, kind: str) -> Counter:
        """How often each version has a line of this kind."""
        return Counter(version for of, version in self.lines if of == kind)

    def write(self, kind, version, values) -> None:
        self.lines.append((kind, version))
        self.values[kind, version] = values
        self._changed.set()

    def _soon(self, call, *args) -> None:
        asyncio.get_running_loop().call_soon(call, *args)

    def _asked(self, rank, message) -> None:
        match message:
            case StartGroup(work=work):
                self._work(work)
            case CancelGroup() | MayLoad():
                pass
            case AskCounters(number=number):
                self._soon(self._count, number)
            case PinVersion(number=number):
                self._say(ENGINE, VersionPinned(number=number, version=self.version, held_s=0.0))
            case LoadFromDisk(version=version, checksums=checksums):
                self.told.append((rank, version, checksums))
            case SampleProbe(number=number, version=version):
                self._sample(number, version)
            case ScoreProbe(number=number, sequences=sequences):
                self._score(number, sequences)
            case FinishTraining(export=export, save=save):
                self.exported, self.trainers_saved = export, save
                self._soon(self._finish)
            case _:
                raise AssertionError(message)

    def _say(self, rank, message) -> None:
        """In the next turn of the loop."""
        self._soon(self.orchestrator.handle, rank, message)

    def finished(self, rollout) -> None:
        """An episode ended."""
        self.orchestrator.handle(ENGINE, RolloutFinished(rollout=packing.pack([rollout])))

    def _work(self, work) -> None:
        if work.purpose == "eval" and self.hold_evals:
            self.evaluating.append(work)
            self._changed.set()
        else:
            self._soon(self._end, work)

    def _end(self, work) -> None:
        for sample in range(work.size):
            rollout = fakes.rollout(work, sample, versions=[self.version], reward=float(sample))
            self._tokens += 1
            self.finished(rollout)

    def _count(self, number) -> None:
        counts = {**dict.fromkeys(COUNTERS, 0), "tokens": self._tokens}
        self.orchestrator.handle(ENGINE, Counters(number=number, counts=counts))

    def _train(self, version, save) -> None:
        self.orchestrator.handle(TRAINER, StepDone(version=version, metrics=dict(self.metrics)))
        self.version = version
        self._publish()
        if save:
            written = CheckpointWritten(version=version, files={"__0_0.distcp": [1, version]})
            self.orchestrator.handle(TRAINER, written)

    def _publish(self) -> None:
        sent = WeightsSent(version=self.version, checksums=[1, 2], sent_bytes=1, send_s=0.0, update_norm=1.0)
        self.orchestrator.handle(TRAINER, sent)
        for rank, checksums in self.held.items():
            loaded = WeightsLoaded(version=self.version, checksums=checksums, receive_s=0.0, pause_s=0.0)
            self.orchestrator.handle(rank, loaded)
        for number, version in self.sampled:
            if version == self.version:
                self._sampled(number)

    def _sample(self, number, version) -> None:
        self.sampled.append((number, version))
        if version is None:
            self._soon(self._sampled, number)

    def _sampled(self, number) -> None:
        """Two tokens, at the version of now."""
        rollout = Rollout(env="probe", task_id="")
        rollout.append(np.array([1, 2]))
        rollout.append(np.array([3, 4]), np.full(2, -1.0), np.full(2, self.version))
        self._tokens += 2
        sampled = ProbeSampled(
            number=number,
            version=self.version,
            num_tokens=2,
            sequences=packing.pack([rollout]),
            scores=np.full(4, -1.0, np.float32),
            choices=np.empty((0, 0), np.int16),
        )
        self.orchestrator.handle(ENGINE, sampled)

    def _score(self, number, packed) -> None:
        self.probed.append((self.version, len(packed)))
        scores = np.full(len(packed.token_ids), self.scored(self.version), np.float32)
        scored = ProbeScored(
            number=number,
            version=self.version,
            packed=scores,
            alone=scores,
            plain=np.full_like(scores, -1.0),
            choices=np.empty((0, 0), np.int16),
            seconds=0.25,
        )
        self._say(TRAINER, scored)

    def _complete(self, version, words, rollouts, files) -> None:
        self.may_write.wait()
        assert files == {"__0_0.distcp": [1, version]}
        self.saved.append((version, list(self.lines)))
        self.state = (json.loads(json.dumps(words)), rollouts)

    def _decode(self, token_ids) -> str:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("the event loop stands still while texts are decoded")
        self.may_write.wait()
        return ""

    def _finish(self) -> None:
        finished = TrainingFinished(version=self.version, files={"__0_0.distcp": [1, self.version]})
        self.orchestrator.handle(TRAINER, finished)


def test_every_step_and_every_evaluation_is_recorded_once(tmp_path):
    async def main():
        ranks = Ranks(tmp_path)
        async with ranks.running() as task:
            assert await task == "done"
        assert ranks.count("step") == {version: 1 for version in range(1, 7)}
        assert ranks.count("eval")[0] == ranks.count("eval")[6] == 1
        assert ranks.exported and [version for version, _ in ranks.saved] == [6]

    asyncio.run(main())


def test_trainers_score_a_probe_at_the_version_that_sampled_it_before_they_train(tmp_path):
    async def main():
        ranks = Ranks(tmp_path, run={"steps": 6, "metrics_interval_s": 1000.0, "probe_every": 2})
        async with ranks.running() as task:
            assert await task == "done"
        assert ranks.sampled == [(1, None), (2, 2), (3, 4)]  # nothing is trained at 6
        assert ranks.probed == [(0, 1), (2, 3), (4, 3)]  # beside a short and a long one of the first
        assert ranks.count("probe") == {0: 1, 2: 1, 4: 1}
        assert ranks.values["probe", 2]["probe/tokens"] == 2
        assert ranks.values["probe", 2]["probe/cost_s"] == 0.25
        summary = ranks.orchestrator.ledger_summary()
        assert summary["in_flight_tokens"] == 0 and ranks._tokens > summary["generated_tokens"] > 0

    asyncio.run(main())


@pytest.mark.parametrize("every", [1, 0])
def test_an_explicit_number_of_versions_between_probes_is_obeyed(tmp_path, every):
    async def main():
        ranks = Ranks(tmp_path, run={"steps": 4, "metrics_interval_s": 1000.0, "probe_every": every})
        async with ranks.running() as task:
            assert await task == "done"
        assert ranks.count("probe") == ({0: 1, 1: 1, 2: 1, 3: 1} if every else {})

    asyncio.run(main())


def test_by_default_a_probe_comes_after_the_first_step_and_then_when_it_costs_a_hundredth_of_the_time(tmp_path):
    async def main():
        ranks = Ranks(tmp_path, run={"steps": 60, "metrics_interval_s": 1000.0}, eval={"every": -1})
        train = ranks._train

        def in_seconds(version, save):
            ranks.now += 2.0
            train(version, save)

        ranks._train = in_seconds
        async with ranks.running() as task:
            assert await task == "done"
        assert list(ranks.count("probe")) == [0, 1, 15, 29, 43, 57]  # 0.25 s of 28

    asyncio.run(main())


def test_a_version_that_is_not_trained_on_after_all_is_sampled_and_counted(tmp_path):
    async def main():
        every = {"steps": 9, "metrics_interval_s": 1000.0, "probe_every": 3}
        ranks = Ranks(tmp_path, run=every, num_tasks=6)  # three batches
        async with ranks.running() as task:
            assert await task == "done"
        assert ranks.sampled[-1][1] == 3 and ranks.count("probe") == {0: 1}

    asyncio.run(main())


def test_a_stop_does_not_wait_for_an_engine_that_samples_for_a_probe(tmp_path):
    async def main():
        every = {"steps": 6, "metrics_interval_s": 1000.0, "probe_every": 2}
        ranks = Ranks(tmp_path, run=every, eval={"every": -1})
        answer = ranks._sampled

        def sampled(number):
            if number == 1:
                answer(number)
            else:
                ranks._tokens += 2  # counted, and not told of yet

        ranks._sampled = sampled
        async with ranks.running() as task:
            await ranks.until(lambda: ranks.count("step")[2])
            ranks.orchestrator.ending.stop()
            assert await task == "stopped"
        assert ranks.version == 2 and [version for version, _ in ranks.saved] == [2]
        assert ranks.orchestrator.ledger_summary()["in_flight_tokens"] == 2

    asyncio.run(main())


def test_an_engine_that_samples_from_another_model_ends_the_run_by_name(tmp_path):
    async def main():
        every = {"steps": 6, "metrics_interval_s": 1000.0, "probe_every": 1}
        ranks = Ranks(tmp_path, eval={"every": -1}, run=every, limits=Limits(exact=True))
        ranks.scored = lambda version: -1.0 if version < 3 else -1.5
        async with ranks.running() as task:
            with pytest.raises(Disagreement, match=r"rank 0 does not sample from .*: at version 3 .* 0\.5 where"):
                await task
        assert [ranks.values["probe", version]["probe/sampled_max"] for version in range(3)] == [0.0] * 3

    asyncio.run(main())


def of_mismatch(tmp_path, **sections) -> Ranks:
    """Trainers find a log-prob of a token that their version sampled off by 0.002."""
    run = {"steps": 3, "metrics_interval_s": 1000.0}
    ranks = Ranks(tmp_path, **{"run": run, "eval": {"every": -1}, "limits": Limits(exact=True)} | sections)
    ranks.metrics |= {"trainer/mismatch_kl": 1e-7, "trainer/mismatch_max": 0.002}
    return ranks


@pytest.mark.parametrize("sections", [{}, {"inference": {"kv_on_update": "keep"}, "staleness": {"on_update": "hold"}}])
def test_tokens_of_a_batch_that_the_trained_version_sampled_end_the_run_if_they_differ(tmp_path, sections):
    async def main():
        async with of_mismatch(tmp_path, **sections).running() as task:
            with pytest.raises(Disagreement, match=r"training version 0: .* up to 0\.002 where float32 allows 0\.001"):
                await task

    asyncio.run(main())


@pytest.mark.parametrize("sections", [{"inference": {"kv_on_update": "keep"}}, {"run": {"steps": 3, "probe_every": 0}}])
def test_tokens_that_may_be_exact_of_no_version_have_no_limit_nor_has_a_run_without_probes(tmp_path, sections):
    async def main():
        async with of_mismatch(tmp_path, **sections).running() as task:
            assert await task == "done"

    asyncio.run(main())


def test_steps_are_recorded_and_saved_while_an_evaluation_takes_its_time(tmp_path):
    async def main():
        ranks = Ranks(tmp_path, steps=12, checkpoint={"every": 3})
        async with ranks.running() as task:
            await ranks.until(lambda: ranks.count("eval")[0])
            ranks.hold_evals = True
            await ranks.until(lambda: ranks.count("step")[12])
            assert len(ranks.evaluating) == 3 and not task.done()
            ranks.hold_evals = False
            ranks.end_evaluations()
            assert await task == "done"
        assert ranks.count("step") == {version: 1 for version in range(1, 13)}
        assert len(ranks.count("eval")) == 3 and ranks.count("eval")[12] == 1
        assert [version for version, _ in ranks.saved] == [3, 6, 9, 12]
        for version, lines in ranks.saved:
            assert ("step", version) in lines

    asyncio.run(main())


def test_a_stop_in_the_first_evaluation_waits_for_it_and_it_is_not_made_again(tmp_path):
    async def main():
        ranks = Ranks(tmp_path)
        ranks.hold_evals = True
        async with ranks.running() as task:
            await ranks.stop_in_evaluation(task)
        assert ranks.lines == [("eval", 0)] and [version for version, _ in ranks.saved] == [0]
        resumed = Ranks(tmp_path)
        resumed.orchestrator.restore(*ranks.state)
        async with resumed.running() as task:
            assert await task == "done"
        assert resumed.count("eval")[0] == 0 and resumed.count("eval")[6] == 1

    asyncio.run(main())


def test_a_stop_in_the_last_evaluation_waits_for_it_for_half_of_its_window(tmp_path):
    async def main():
        ranks = Ranks(tmp_path, eval={"every": 0, "num_tasks": 3})
        async with ranks.running() as task:
            await ranks.until(lambda: ranks.count("eval")[0])
            ranks.hold_evals = True
            await ranks.stop_in_evaluation(task)
        assert ranks.count("eval") == {0: 1, 6: 1} and ranks.exported

    asyncio.run(main())


def test_a_last_evaluation_that_was_cut_is_made_by_a_resume(tmp_path):
    async def main():
        ranks = Ranks(tmp_path, shutdown_s=2.0)
        async with ranks.running() as task:
            await ranks.until(lambda: ranks.count("step")[6])
            ranks.hold_evals = True
            await ranks.until(lambda: ranks.saved and len(ranks.evaluating) == 3)
            ranks.orchestrator.ending.stop()
            assert await task == "stopped"
            ranks.end_evaluations()  # no error, though it is over
        assert ranks.count("eval")[6] == 0
        resumed = Ranks(tmp_path, version=6)
        resumed.orchestrator.restore(*ranks.state)
        async with resumed.running() as task:
            assert await task == "done"
        assert resumed.lines == [("eval", 6), ("interval", 6)] and resumed.exported

    asyncio.run(main())


def test_an_evaluation_that_is_being_written_is_not_cut_by_a_stop(tmp_path):
    async def main():
        ranks = Ranks(tmp_path, shutdown_s=6.0)
        ranks.may_write.clear()
        async with ranks.running() as task:
            await ranks.until(lambda: ranks.count("eval")[0])
            ranks.orchestrator.ending.stop()
            await asyncio.wait({task}, timeout=3.5)  # the half of its window
            ranks.may_write.set()
            assert await task == "stopped"
        assert ranks.lines == [("eval", 0)] and ranks.run_dir.evaluation(0).exists()

    asyncio.run(main())


@pytest.mark.parametrize("ending", ["stopped", "done"])
def test_an_end_at_a_version_with_a_checkpoint_of_its_own_waits_for_that_and_keeps_it(tmp_path, ending):
    """Two would be written into one folder: by the trainers, while rank 0 sums up and renames."""

    async def main():
        num_tasks = 6 if ending == "done" else None  # three batches
        ranks = Ranks(tmp_path, steps=1000, num_tasks=num_tasks, checkpoint={"every": 1}, eval={"every": -1})
        ranks.may_write.clear()
        async with ranks.running() as task:
            await ranks.until(lambda: ranks.count("step")[3])
            if ending == "stopped":
                ranks.orchestrator.ending.stop()
            await asyncio.wait({task}, timeout=0.1)
            assert ranks.exported is None and not task.done()
            ranks.may_write.set()
            assert await task == ending
        assert sorted(version for version, _ in ranks.saved) == list(range(1, ranks.version + 1))
        assert (ranks.exported, ranks.trainers_saved) == (ending == "done", False)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("held", "difference"),
    [([1, 18], "checksum 1 of 2 is 0x12, the trainers' is 0x2"), ([1], "it has 1 checksums, the trainers' are 2")],
)
def test_a_rank_that_holds_other_weights_than_were_sent_ends_the_run_by_name(tmp_path, held, difference):
    async def main():
        ranks = Ranks(tmp_path, eval={"every": -1})
        async with ranks.running() as task:
            ranks.held[MEMBER] = held  # from version 1 on
            with pytest.raises(
                RuntimeError, match="rank 2 does not hold the weights of version 1 that were sent"
            ) as seen:
                await task
        assert difference in str(seen.value)
        assert ranks.orchestrator.policy.version == 0 and not ranks.exported

    asyncio.run(main())


def test_engines_are_told_of_weights_on_disk_with_the_checksums_of_the_trainers(tmp_path):
    async def main():
        ranks = Ranks(tmp_path, steps=2, weights={"mode": "disk"}, eval={"every": -1})
        async with ranks.running() as task:
            assert await task == "done"
        assert ranks.told == [(rank, version, [1, 2]) for version in (0, 1, 2) for rank in (ENGINE, MEMBER)]

    asyncio.run(main())


def held(version: int = 2):
    """A checkpoint's half with a kept group, a formed batch and an unfinished group, of rewards 0 and 1."""
    words, rollouts = saved(version)
    for rollout in rollouts:
        rollout.reward = float(rollout.ticket % 2)
    return words, rollouts


def advantages(tmp_path, **sections) -> list[list[float]]:
    """Of what is held, after a resume with these settings: kept groups, then formed batches."""
    words, rollouts = held()
    words["tasks"] = {"cursor": 0, "sources": {}}
    ranks = Ranks(tmp_path, version=2, **sections)
    ranks.orchestrator.restore(words, rollouts)
    groups, batches = ranks.orchestrator.sink.snapshot()
    return [each.advantages.tolist() for each in (*groups, *batches)]


@pytest.mark.parametrize(
    ("trainer", "group"),
    [
        ({}, [-0.70711, 0.70711]),
        ({"advantage": "rloo"}, [-1.0, 1.0]),
        ({"advantage": "dr_grpo"}, [-0.5, 0.5]),
        ({"advantage_scale": -2.0}, [1.41421, -1.41421]),
    ],
)
def test_what_is_held_has_the_advantages_of_the_settings_resumed_with(tmp_path, trainer, group):
    kept, batch = advantages(tmp_path, trainer=trainer)
    assert kept == pytest.approx(group, abs=1e-5) and batch == pytest.approx(2 * group, abs=1e-5)


def test_an_estimator_over_the_batch_is_not_given_what_another_made_of_the_groups(tmp_path):
    kept, batch = advantages(tmp_path, trainer={"advantage": "reinforce_pp"})
    assert kept == [0.0, 1.0]  # rewards, until a batch is formed
    assert batch == pytest.approx([-1, 1] * 2, abs=1e-5)


def test_where_the_data_start_anew_what_is_unfinished_is_of_the_new_data_under_its_tickets(tmp_path):
    words, rollouts = held()
    ranks = Ranks(tmp_path, version=2)
    ranks.orchestrator.restore(words, rollouts, data_anew=True)
    after, _ = ranks.orchestrator.snapshot()
    (before,), (work,) = words["path"]["unfinished"], after["path"]["unfinished"]
    assert before["task"]["env"] == "e" and work["task"] == {"env": "fake", "task_id": "0", "data": {}}
    assert {**before, "task": 0, "version": 2} == {**work, "task": 0}
    assert after["tasks"]["cursor"] == 1 and after["data_from"] == 2 and after["difficulty"] == []
