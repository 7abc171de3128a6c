"""What is forked is what `python -m` would have started."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests import forks
from tests.end_to_end.jobs import ROOT, environment

WORDS = [sys.executable, "-m", "tests.end_to_end.tells", "a", "b c", "ß"]


def told(start: Any, tmp_path: Any, end: int, new_session: bool) -> tuple[dict[str, Any], str, int]:
    """What the program says of its start, what it writes at its end, and its exit code."""
    variables = environment() | {"ONE": "1=ü", "EMPTY": ""}
    variables.pop("PYTEST_CURRENT_TEST")  # setup or call
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with start(
        [*WORDS, str(end)], cwd=tmp_path, env=variables, text=True, start_new_session=new_session, **pipes
    ) as process:
        output, errors = process.communicate("a line\n", timeout=60.0)
    return json.loads(output), errors, process.returncode


@pytest.mark.parametrize(("end", "new_session"), [(0, False), (7, True), (-9, True), (-15, False)])
def test_a_forked_process_has_the_start_and_the_end_of_a_started_one(tmp_path, end, new_session):
    started, forked = (told(start, tmp_path, end, new_session) for start in (subprocess.Popen, forks.job))
    assert forked == started
    place, errors, code = forked
    assert (code, errors) == (end, "" if end < 0 else "the end\n")
    assert place["parent"] == os.getpid() and place["leads its session"] == new_session
    assert place["environment"]["ONE"] == "1=ü" and place["path"][:2] == [str(tmp_path), str(ROOT)]


def test_a_job_is_torchruns_own_agent_and_its_ranks_are_its_children(tmp_path):
    words = [sys.executable, "-m", forks.AGENT, "--standalone", "--nproc-per-node=2", "-m", *WORDS[2:], "7"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with forks.job(words, cwd=tmp_path, env=environment(), text=True, stdin=subprocess.DEVNULL, **pipes) as job:
        output, errors = job.communicate(timeout=60.0)
    ranks = [json.loads(line) for line in output.splitlines()]
    assert sorted(rank["environment"]["RANK"] for rank in ranks) == ["0", "1"]
    assert all(rank["parent"] == job.pid and rank["leads its session"] for rank in ranks)
    assert all(f"RANK={rank['environment']['RANK']}" in rank["shown"] for rank in ranks)
    assert job.returncode == 1 and "exitcode  : 7" in errors
