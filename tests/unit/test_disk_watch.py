"""A slow disk moves, a dead one does not, and who is stuck at it is named with the place."""

import json
import threading
import time

import pytest
from torch.distributed import HashStore

from spmd_rl.distributed.liveness import Judge, Liveness, Mark
from spmd_rl.files.disk_watch import DiskWatch, _sizes

LIMIT_S = 30.0


def until(true) -> None:
    end = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


@pytest.mark.parametrize(
    "place", ["step_5/trainer/__0_0.distcp", ".step_5.abc/model.safetensors", ".step_5.9.tmp", "step_5"]
)
def test_what_grows_at_a_place_or_beside_it_moves(tmp_path, place):
    watch = DiskWatch()
    assert watch.moved("main") == float("-inf")
    watch.begin("main", tmp_path / "step_5")
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    with open(tmp_path / place, "wb", buffering=0) as file:
        until(lambda: file.write(b"x") and watch.moved("main") > 0)
        first = watch.moved("main")
        until(lambda: file.write(b"x") and watch.moved("main") > first)
    watch.end("main")
    assert watch.moved("main") == float("-inf")


def test_what_lies_still_or_elsewhere_does_not_move(tmp_path):
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_5" / "file").write_text("x")
    before = _sizes(tmp_path / "step_5")
    (tmp_path / "step_50").write_text("x")
    (tmp_path / ".step_50.tmp").write_text("x")
    assert _sizes(tmp_path / "step_5") == before and list(before) == [
        str(tmp_path / "step_5" / "file"),
        str(tmp_path / "step_5"),
    ]


def test_what_cannot_be_looked_at_does_not_end_the_watch(tmp_path):
    (tmp_path / "file").write_text("x")
    assert _sizes(tmp_path / "file" / "step_5") == {}


def test_what_is_read_back_moves_while_it_is_being_written(tmp_path):
    watch = DiskWatch()
    watch.tick("main")
    assert watch.moved("main") == float("-inf")
    watch.begin("main", tmp_path)
    watch.tick("main")
    assert watch.moved("main") > 0


def test_a_dead_disk_is_named_with_its_place_and_the_setting(tmp_path):
    judge = Judge(roles=["inference", "trainer"], heartbeat_timeout_s=20.0, stall_timeout_s=60.0, now=0.0)
    waits = Mark(beat=1, doing={"main": ("waiting for rollouts", 100.0)})
    saving = "saving version 5, no byte more in /run/checkpoints/step_5.tmp/trainer"
    marks = {0: waits, 1: Mark(beat=1, doing={"main": (saving, 59.0)})}
    assert judge.verdict(marks, 1.0) is None
    rank, text = judge.verdict(marks | {1: Mark(beat=2, doing={"main": (saving, 61.0)})}, 2.0)
    assert rank == 1
    assert text.startswith(f"stuck at '{saving}' for 61 s; ") and text.endswith("; run.stall_timeout_s = 60")


def test_a_rank_marks_what_it_writes_and_a_growing_file_is_progress(tmp_path):
    store = HashStore()
    live = Liveness(store=store, rank=0, roles=["inference"], on_failure=lambda failure: None, stall_timeout_s=600.0)
    live.progress("saving version 5", writes=tmp_path / "step_5")

    def doing() -> dict:
        live._write_mark(left=False)
        return json.loads(store.get("liveness/0"))["doing"]

    with live.writing(tmp_path / "batches"):
        what, since_s = doing()["main"]
        assert what == f"saving version 5, no byte more in {tmp_path / 'step_5'}" and since_s >= 0.0
        live._doing["main"] = (what, time.monotonic() - 1000.0)
        assert doing()["main"][1] >= 1000.0
        live.reads_back()
        assert doing()["main"][1] < 500.0
        assert len(doing()) == 2
    assert list(doing()) == ["main"]
    live.progress("waiting for a batch")
    assert doing()["main"][0] == "waiting for a batch"
