import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "configs" / "tiny_cpu.toml")
PROBE = """
import json, sys
from spmd_rl.cli import main
code = main(sys.argv[1:])
print(json.dumps({"code": code, "torch": "torch" in sys.modules}))
"""


def _cli(*args: str) -> tuple[dict[str, object], str, str]:
    done = subprocess.run([sys.executable, "-c", PROBE, *args], capture_output=True, text=True, cwd=ROOT, check=True)
    out, _, last = done.stdout.rstrip().rpartition("\n")
    return json.loads(last), out, done.stderr


def test_help_imports_no_torch_and_lists_every_section() -> None:
    end, out, _ = _cli("--help")
    assert end == {"code": 0, "torch": False}
    assert "[staleness]" in out
    assert "max_staleness = 2" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((TINY, "staleness.max_stalness=1"), "did you mean 'max_staleness'"),
        ((TINY,), "torchrun --nproc-per-node=2"),
        (("nowhere.toml",), "nowhere.toml: no such file"),
        (("config", "tiny_cp"), "did you mean 'tiny_cpu'"),
        (("simulat", TINY), "did you mean the command 'simulate'"),
        ((TINY, "--resum=never"), "--help"),
        (("check", TINY, "rollout.group_size=7"), "not a multiple"),
        (("check", TINY, "topology.dp_replicate=2"), "1 trainer ranks cannot hold dp_replicate = 2"),
        (("check", TINY, "inference.engine_on_rank0=false"), "leaves no engine with 1 inference rank"),
        (
            ("check", TINY, "inference.engine=vllm", "inference.tensor_parallel=2", "topology.inference=3"),
            "3 ranks with an engine cannot be split into engines of 2 (inference.tensor_parallel)",
        ),
        (("check", TINY, "model.path=nowhere", "model.make="), "model.path = 'nowhere': no such folder"),
        ((TINY, "--resume=newest"), "invalid choice: 'newest'"),
    ],
)
def test_mistakes_exit_with_2_and_one_line_before_torch_is_imported(args: tuple[str, ...], message: str) -> None:
    end, _, err = _cli(*args)
    assert end == {"code": 2, "torch": False}
    assert message in err
    assert err.count("\n") == 1


def test_check_prints_the_bound_and_a_config_that_reads_back() -> None:
    end, out, _ = _cli("check", TINY, "model.path=not/yet/made")
    assert end == {"code": 0, "torch": False}
    assert "max_staleness = 2" in out
    assert "age <= 2" in out.replace("≤", "<=")


@pytest.mark.parametrize(
    ("args", "resume"),
    [
        ((TINY, "--resume", "run.dir=x"), "must"),
        (("--resume", TINY, "run.dir=x"), "must"),
        ((TINY, "run.dir=x", "--resume"), "must"),
        ((TINY, "--resume=never", "run.dir=x"), "never"),
        ((TINY, "run.dir=x"), "auto"),
    ],
)
def test_resume_may_stand_anywhere(args: tuple[str, ...], resume: str) -> None:
    end, out, _ = _cli("check", *args, "model.path=not/yet/made")
    assert end["code"] == 0
    assert f'resume = "{resume}"' in out and 'dir = "x"' in out


def test_what_only_another_rank_finds_wrong_is_said_by_that_rank() -> None:
    code = "from spmd_rl.cli import refuse; print(refuse(ValueError('no such file'), wait_s=0.0))"
    environment = {**os.environ, "RANK": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (done.stdout, done.stderr) == ("2\n", "error on rank 3: no such file\n")


def test_other_ranks_leave_it_to_rank_0_to_say_what_is_wrong_with_the_config() -> None:
    command = [sys.executable, "-m", "spmd_rl", "nowhere.toml"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=os.environ | {"RANK": "1"}) as rank:
        with pytest.raises(subprocess.TimeoutExpired):
            rank.wait(3.0)
        rank.terminate()  # as torchrun does once rank 0 has ended
        assert (rank.stderr.read(), rank.wait()) == ("", 2)


def test_the_first_rank_of_another_node_says_it_there_at_once() -> None:
    environment = {**os.environ, "RANK": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-m", "spmd_rl", "nowhere.toml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=20)
    assert (done.returncode, done.stderr) == (2, "error on rank 8: nowhere.toml: no such file\n")


def test_shipped_configs_are_listed_with_a_sentence_each_and_printed_as_they_are() -> None:
    end, out, _ = _cli("config")
    assert end == {"code": 0, "torch": False}
    assert all(line.endswith(".") for line in out.splitlines()) and "\ntiny_cpu  " in out
    end, out, _ = _cli("config", "tiny_cpu")
    assert end == {"code": 0, "torch": False}
    assert f"{out}\n" == Path(TINY).read_text()


def test_output_that_nobody_reads_any_more_is_no_traceback():
    reads, writes = os.pipe()
    os.close(reads)
    words = [sys.executable, "-m", "spmd_rl", "--help"]
    ended = subprocess.run(words, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (128 + 13, "")
