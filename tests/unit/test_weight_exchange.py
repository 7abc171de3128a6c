"""Two trainer ranks send one checksum each; rank 4 leads an engine and rank 5 belongs to it."""

import asyncio

import pytest

from spmd_rl.orchestrator.weight_exchange import Loaded, Sent, WeightExchange, assert_moved


def exchange(*, layout="wire", by_disk=False, engines=(4,)):
    lines: list[str] = []
    told: list[tuple[int, tuple[int, ...]]] = []
    weights = WeightExchange(
        senders=(0, 1),
        holders=(4, 5),
        engines=engines,
        layout=layout,
        by_disk=by_disk,
        swap=lambda version, checksums: told.append((version, tuple(checksums))),
        say=lines.append,
    )
    return weights, lines, told


def take(weights, version=3, *, tell=False):
    async def main():
        for rank in (0, 1):
            sent = Sent(checksums=(rank,), sent_bytes=10, send_s=1.0 + rank, update_norm=3.0 + rank)
            weights.sent(rank, version, sent)
        for rank in (4, 5):
            weights.loaded(rank, version, Loaded(checksums=(0, 1), receive_s=rank, pause_s=rank / 10))
        return await weights.take(version, tell=tell)

    return asyncio.run(main())


def test_the_figures_are_of_all_ranks_and_name_engines_where_there_are_several():
    figures = take(exchange()[0])
    assert figures == {
        "weights/update_norm": 5.0,  # of 3 and 4
        "weights/sent_bytes": 20,
        "weights/send_s": 2.0,
        "weights/receive_s": 5,
        "weights/pause_s": 0.5,
        "weights/verified_engines": 2,
    }
    assert take(exchange(engines=(4, 5))[0]).items() - figures.items() == {
        ("engine/rank4/pause_s", 0.4),
        ("engine/rank5/pause_s", 0.5),
    }


def test_engines_are_told_only_where_they_wait_for_the_word():
    weights, _, told = exchange()
    take(weights, 3)
    take(weights, 4, tell=True)
    assert told == [(4, ())]


def test_what_a_checkpoint_remembers_is_asked_for_once_after_a_resume():
    before, *_ = exchange()
    take(before)
    weights, lines, _ = exchange()
    weights.restore(before.state)
    take(weights, 3)
    take(weights, 4)
    assert lines == ["engines hold the weights of version 3 again, by checksum"]


def test_other_weights_after_a_resume_end_the_run():
    weights, *_ = exchange()
    weights.restore({"layout": "wire", "checksums": [0, 7]})
    with pytest.raises(RuntimeError, match="at version 3: checksums \\[0, 1\\], the checkpoint's are \\[0, 7\\]"):
        take(weights)


@pytest.mark.parametrize(
    ("layout", "said"), [("wire", ["weights came wire, the checkpoint's disk: not compared"]), ("", [])]
)
def test_weights_of_another_layout_are_not_compared(layout, said):
    weights, lines, _ = exchange(layout=layout)
    weights.restore({"layout": "disk", "checksums": [7]})
    take(weights)
    assert lines == said


def test_a_step_that_moved_no_weight_had_no_gradient_or_no_rate():
    assert_moved(3, 0.0, gradient=0.0, rate=1.0)
    assert_moved(3, 0.0, gradient=1.0, rate=0.0)
    with pytest.raises(RuntimeError, match="frozen policy: the step to version 3"):
        assert_moved(3, 0.0, gradient=1.0, rate=1.0)
