"""A disk that is full, too small or read-only: a small file system of its own as the place of the run."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spmd_rl.storage import checkpoint
from tests.end_to_end.live_jobs import LiveJob, assert_whole

pytestmark = pytest.mark.full
Disk = Callable[..., None]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Disk]:
    """Puts a file system at the test's folder, or changes its options."""

    def mounted(*options: str) -> None:
        words = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no file systems are mounted here: {done.stderr.strip()}")

    yield mounted
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=False, capture_output=True)


def fill(path: Path) -> None:
    """Leave no byte free."""
    with open(path, "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


def test_a_full_disk_is_named_and_with_room_again_the_run_goes_on(mount, tmp_path):
    mount("size=32m")
    run_dir = tmp_path / "run"
    with LiveJob(run_dir, "run.steps=1000", "checkpoint.every=2") as job:
        job.wait_for(r"step +4/")
        fill(tmp_path / "filler")
        assert "No space left on device" in job.wait_for(r"Error: .*No space left on device")
        assert job.wait() == 1
        assert job.output.count("run failed: rank ") == 1
    version, folder = checkpoint.newest(run_dir / "checkpoints")
    checkpoint.verify(folder)
    os.unlink(tmp_path / "filler")
    with LiveJob(run_dir, f"run.steps={version + 3}", "--resume") as job:
        assert job.wait() == 0, job.output
    assert_whole(run_dir, num_steps=version + 3)


@pytest.mark.parametrize(
    ("options", "text"), [("size=8m", "GB are free, what the run writes takes"), ("ro", "Read-only")]
)
def test_a_disk_that_cannot_do_is_refused_in_a_line(mount, tmp_path, options, text):
    mount(options)
    with LiveJob(tmp_path / "run") as job:
        assert job.wait() == 1
    assert set(job.exit_codes.values()) == {2}, job.output
    errors = [line for line in job.lines if line.startswith("error: ")]
    assert len(errors) == 1 and text in errors[0], job.output
    assert "run failed" not in job.output
