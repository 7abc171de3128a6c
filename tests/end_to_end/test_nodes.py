"""Several nodes by launch/multi_node.sh: two network namespaces, gloo over the cable between them."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_rl.storage import checkpoint
from tests.end_to_end.live_jobs import assert_whole, summary
from tests.end_to_end.nodes import ADDRESSES, Nodes, NotPermitted

pytestmark = pytest.mark.full


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    try:
        with Nodes(tmp_path) as made:
            yield made
    except NotPermitted as error:
        pytest.skip(f"no network namespaces here: {error}")


def test_two_nodes_train_to_the_target(nodes, tmp_path):
    run_dir = tmp_path / "run"
    with nodes.start(1, run_dir, "run.steps=12") as second, nodes.start(0, run_dir, "run.steps=12") as first:
        first.wait_for(r"step +2/")
        listeners = [nodes.listeners(index) for index in range(2)]
        assert (first.wait(), second.wait()) == (0, 0), first.output + second.output
    assert "2 ranks on 2 hosts, inference 0 (engine on 0), trainers 1" in first.output
    assert_whole(run_dir, num_steps=12)
    assert set(listeners[1]) == {ADDRESSES[1]}
    assert set(listeners[0]) == {ADDRESSES[0], "*"}
    assert listeners[0].count("*") == 2  # torchrun's stores, which cannot be told an interface


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_comes_back_and_the_run_reaches_its_target(nodes, tmp_path, lost):
    run_dir, settings = tmp_path / "run", ("run.steps=14", "checkpoint.every=3")
    with nodes.start(0, run_dir, *settings) as first, nodes.start(1, run_dir, *settings) as second:
        first.wait_for(r"step +8/")
        nodes.kill(lost)
        stayed = second if lost == 0 else first
        stayed.wait_for(r"run failed: rank \d \(\w+\) failed: ")
        stayed.wait_for("starting again in 5 s")
        with nodes.start(lost, run_dir, *settings) as again:
            assert (stayed.wait(), again.wait()) == (0, 0), stayed.output + again.output
    told = (again if lost == 0 else stayed).output
    assert "start number 2" in told
    assert "resuming from" in told
    assert_whole(run_dir, num_steps=14)


@pytest.mark.parametrize("how", ["drop", "down"])
def test_a_cut_link_ends_the_run_with_an_error_on_both_nodes(nodes, tmp_path, how):
    run_dir, settings = tmp_path / "run", ("run.steps=100000", "run.stall_timeout_s=60", "checkpoint.every=2")
    with (
        nodes.start(0, run_dir, *settings, MAX_RESTARTS="0") as first,
        nodes.start(1, run_dir, *settings, MAX_RESTARTS="0") as second,
    ):
        first.wait_for(r"step +3/")
        nodes.cut(how)
        line = first.wait_for("run failed", limit_s=60.0)
        assert "rank 1 (trainer) failed: no sign of life for 2" in line
        line = second.wait_for("run failed", limit_s=10.0)
        assert "rank 1 (trainer) failed: lost the job's store: no answer for 20 s" in line
        assert first.wait(limit_s=20.0) != 0
        assert second.wait(limit_s=20.0) != 0
    assert summary(run_dir)["status"] == "failed"
    checkpoint.verify(checkpoint.newest(run_dir / "checkpoints")[1])


def test_what_is_refused_is_not_tried_again(nodes, tmp_path):
    with (
        nodes.start(0, tmp_path / "run", "run.resume=must") as first,
        nodes.start(1, tmp_path / "run", "run.resume=must") as second,
    ):
        assert (first.wait(), second.wait()) == (2, 2), first.output + second.output
    assert "error: nothing to resume: no complete checkpoint" in first.output


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_to_one_node_or_all_stops_the_run_with_a_checkpoint(nodes, tmp_path, signals):
    run_dir = tmp_path / "run"
    with (
        nodes.start(0, run_dir, "run.steps=1000") as first,
        nodes.start(1, run_dir, "run.steps=1000") as second,
    ):
        first.wait_for(r"step +3/")
        second.send(signal.SIGTERM)
        first.wait_for("stopping on SIGTERM")  # by word of the other
        if signals == 2:
            first.send(signal.SIGTERM)
        assert first.wait() != 0
        assert second.wait() != 0
    assert "starting again" not in first.output + second.output
    assert "run failed" not in first.output + second.output
    assert summary(run_dir)["status"] == "stopped"
    checkpoint.verify(checkpoint.newest(run_dir / "checkpoints")[1])
