"""The wheel as it is installed: what it carries, used from a folder with nothing else in it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0


def output(*words: object, cwd: Path, site: Path) -> str:
    path = f"{site / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {**os.environ, "PYTHONPATH": str(site), "PATH": path}
    done = subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed into, with its console script in bin/."""
    wheel, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    run = {"cwd": ROOT, "check": True, "capture_output": True, "timeout": LIMIT_S}
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", wheel], **run)
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-index",
        "--no-deps",
        "--target",
        site,
        *wheel.glob("*.whl"),
    ]
    subprocess.run(install, **run)
    return site


def test_a_config_is_printed_edited_and_checked_outside_of_a_checkout(site: Path, tmp_path: Path) -> None:
    listed = output("spmd_rl", "config", cwd=tmp_path, site=site).splitlines()
    assert [line.split()[0] for line in listed] == sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))
    printed = output("spmd_rl", "config", "tiny_cpu", cwd=tmp_path, site=site)
    assert printed == (ROOT / "configs" / "tiny_cpu.toml").read_text()
    (tmp_path / "my.toml").write_text(printed)
    assert "age bound: age ≤ 2" in output("spmd_rl", "check", "my.toml", cwd=tmp_path, site=site)


@pytest.mark.parametrize(
    ("named", "found"), [("my.toml", "{user}/my.toml"), ("configs/tiny_cpu.toml", "{launch}/../configs/tiny_cpu.toml")]
)
def test_a_launch_script_of_the_wheel_starts_a_run_in_the_folder_of_the_user(
    site: Path, tmp_path: Path, named: str, found: str
) -> None:
    launch = Path(output("spmd_rl", "launch", cwd=tmp_path, site=site).rstrip())
    assert launch.is_relative_to(site)
    (tmp_path / "my.toml").write_text((ROOT / "configs" / "tiny_cpu.toml").read_text())
    torchrun = site / "bin" / "torchrun"
    torchrun.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$PWD" "${@: -2}"\n')
    torchrun.chmod(0o755)
    started = output(launch / "cpu.sh", named, "run.steps=1", cwd=tmp_path, site=site).splitlines()
    assert started == [str(tmp_path), found.format(user=tmp_path, launch=launch), "run.steps=1"]
