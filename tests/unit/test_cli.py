import json
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
        (("simulat", TINY), "did you mean the command 'simulate'"),
        ((TINY, "--resum=never"), "--help"),
        (("check", TINY, "rollout.group_size=7"), "not a multiple"),
    ],
)
def test_mistakes_exit_with_2_and_one_line_before_torch_is_imported(args: tuple[str, ...], message: str) -> None:
    end, _, err = _cli(*args)
    assert end == {"code": 2, "torch": False}
    assert message in err
    assert err.count("\n") == 1


def test_check_prints_the_bound_and_a_config_that_reads_back() -> None:
    end, out, _ = _cli("check", TINY)
    assert end == {"code": 0, "torch": False}
    assert "max_staleness = 2" in out
    assert "age <= 2" in out.replace("≤", "<=")
