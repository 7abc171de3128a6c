"""Two trainer ranks send one checksum each; rank 4 leads an engine and rank 5 belongs to it."""

import asyncio

import pytest

from spmd_rl.orchestrator.answers import Answers
from spmd_rl.orchestrator.policy import Policy
from spmd_rl.orchestrator.weight_sync import WeightSync, assert_moved
from spmd_rl.packing.messages import MayLoad, StepDone, WeightsLoaded, WeightsSent
from tests.clock import run_virtual

TRAINERS, HOLDERS = (0, 1), (4, 5)


def sync(*, layout="wire", engines=(4,), version=3):
    lines, told, answers, policy = [], [], Answers(), Policy(version)
    weights = WeightSync(
        policy=policy,
        answers=answers,
        send=lambda rank, message: told.append((rank, message)),
        trainers=TRAINERS,
        senders=TRAINERS,
        holders=HOLDERS,
        engines=engines,
        layout=layout,
        by_disk=False,
        say=lines.append,
        clock=lambda: 0.0,
    )
    weights.answers, weights.policy, weights.told = answers, policy, told
    return weights, lines


def answer(weights, version):
    for rank in TRAINERS:
        sent = WeightsSent(version=version, checksums=[rank], sent_bytes=10, send_s=1.0 + rank, update_norm=3.0 + rank)
        weights.answers.add(rank, sent)
    for rank in HOLDERS:
        loaded = WeightsLoaded(version=version, checksums=[0, 1], receive_s=rank, pause_s=rank / 10)
        weights.answers.add(rank, loaded)


def take(weights, version=3):
    async def main():
        answer(weights, version)
        return await weights.take(version)

    return asyncio.run(main())


def test_the_figures_are_of_all_ranks_and_name_engines_where_there_are_several():
    figures = take(sync()[0])
    assert figures == {
        "weights/update_norm": 5.0,  # of 3 and 4
        "weights/sent_bytes": 20,
        "weights/send_s": 2.0,
        "weights/receive_s": 5,
        "weights/pause_s": 0.5,
        "weights/verified_engines": 2,
    }
    assert take(sync(engines=(4, 5))[0]).items() - figures.items() == {
        ("engine/rank4/pause_s", 0.4),
        ("engine/rank5/pause_s", 0.5),
    }


@pytest.mark.parametrize("drains", [False, True])
def test_engines_are_told_when_they_may_load_only_where_they_wait_for_it(drains):
    async def main():
        weights, _ = sync()
        for version in (4, 5):
            for rank in TRAINERS:
                weights.answers.add(rank, StepDone(version=version, metrics={}))
            answer(weights, version)
        await weights.run(
            last_version=lambda: 5,
            made=lambda *_: None,
            idle=(lambda: asyncio.sleep(0)) if drains else None,
            loaded=lambda *_: None,
        )
        return weights.told

    versions = [(rank, version) for version in (4, 5) for rank in HOLDERS] if drains else []
    assert asyncio.run(main()) == [(rank, MayLoad(version=version)) for rank, version in versions]


def watch(last_version: int, *, load_s: float = 2.0, wrong_at: int | None = None):
    """Trainers make versions at once; engines take `load_s` for each."""

    async def main():
        weights, _ = sync(version=0)
        events, loop = [], asyncio.get_running_loop()
        weights.policy.on_change(lambda: events.append(("live", weights.policy.version, loop.time())))
        for version in range(1, last_version + 1):
            for rank in TRAINERS:
                weights.answers.add(rank, StepDone(version=version, metrics={"rank": rank}))

        def made(version, metrics):
            events.append(("made", version, loop.time()))
            assert metrics == [{"rank": 0}, {"rank": 1}]
            loop.call_later(load_s, answer, weights, version)
            if version == wrong_at:
                weights.answers.add(5, WeightsLoaded(version=version, checksums=[7, 1], receive_s=0, pause_s=0))
                weights.answers.add = lambda rank, message, add=weights.answers.add: rank == 5 or add(rank, message)

        try:
            await weights.run(last_version=lambda: last_version, made=made, idle=None, loaded=lambda *_: None)
        finally:
            events.append(("version", weights.policy.version, loop.time()))
        return events

    return run_virtual(main())


def test_a_version_is_live_only_after_every_engine_has_loaded_it():
    live = [("made", 1, 0.0), ("live", 1, 2.0), ("made", 2, 2.0), ("live", 2, 4.0), ("version", 2, 4.0)]
    assert watch(2) == live


def test_other_weights_in_one_rank_of_an_engine_end_the_run_and_the_version_stays():
    with pytest.raises(RuntimeError, match=r"rank 5 does not hold the weights of version 2 .* checksum 0 of 2 is 0x7"):
        watch(3, wrong_at=2)


def test_what_a_checkpoint_remembers_is_asked_for_once_after_a_resume():
    before, _ = sync()
    take(before)
    weights, lines = sync()
    weights.restore(before.state)
    take(weights, 3)
    take(weights, 4)
    assert lines == ["engines hold the weights of version 3 again, by checksum"]


def test_other_weights_after_a_resume_end_the_run():
    weights, _ = sync()
    weights.restore({"layout": "wire", "checksums": [0, 7]})
    with pytest.raises(RuntimeError, match="at version 3: checksums \\[0, 1\\], the checkpoint's are \\[0, 7\\]"):
        take(weights)


@pytest.mark.parametrize(
    ("layout", "said"), [("wire", ["weights came wire, the checkpoint's disk: not compared"]), ("", [])]
)
def test_weights_of_another_layout_are_not_compared(layout, said):
    weights, lines = sync(layout=layout)
    weights.restore({"layout": "disk", "checksums": [7]})
    take(weights)
    assert lines == said


def test_a_step_that_moved_no_weight_had_no_gradient_or_no_rate():
    assert_moved(3, 0.0, gradient=0.0, rate=1.0)
    assert_moved(3, 0.0, gradient=1.0, rate=0.0)
    with pytest.raises(RuntimeError, match="frozen policy: the step to version 3"):
        assert_moved(3, 0.0, gradient=1.0, rate=1.0)
