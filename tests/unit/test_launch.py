"""The scripts in launch/, with stand-ins for torchrun and Slurm."""

import os
import runpy
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LIMIT_S = 60.0
NO_MODEL = "model.path=not/yet/made"  # so that check, which the scripts call, has none to load


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def environment(tmp_path: Path, torchrun: str = "", **variables: str) -> dict[str, str]:
    """With an installed environment whose torchrun is `torchrun`."""
    venv = tmp_path / "an environment"
    program(venv / "bin" / "python", f'exec "{sys.executable}" "$@"')
    program(venv / "bin" / "torchrun", torchrun)
    shutil.copy(ROOT / "pyproject.toml", venv / ".installed")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "SPMD_RL_VENV": str(venv), **variables}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_nodes_are_awaited_ends_the_script(tmp_path, number):
    waits = "trap 'echo told; exit 1' TERM; echo waiting; sleep 25 & wait"
    variables = environment(tmp_path, waits, NNODES="2", MASTER="127.0.0.1:29500", IFACE="lo")
    with subprocess.Popen(
        [ROOT / "launch/multi_node.sh", "configs/tiny_cpu.toml", NO_MODEL, f"run.dir={tmp_path}"],
        cwd=ROOT,
        env=variables,
        stdout=-1,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # ignored where the tests run in the background
    ) as script:
        assert script.stdout.readline() == "waiting\n"
        os.killpg(script.pid, number)  # as a terminal does
        told = script.stdout.readline()
        assert (told, script.wait(LIMIT_S)) == ("told\n", 143)


def test_several_nodes_are_given_a_folder_that_every_start_finds(tmp_path):
    variables = environment(tmp_path, "echo started", NNODES="2", MASTER="127.0.0.1:29500", IFACE="lo")
    words = [ROOT / "launch/multi_node.sh", "configs/tiny_cpu.toml", NO_MODEL]
    refused = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "run.dir is not set" in refused.stderr
    words += [f"run.dir={tmp_path}"]
    assert subprocess.run(words, env=variables, capture_output=True, text=True, check=True).stdout == "started\n"


@pytest.mark.parametrize(
    ("happens", "code", "again"),
    [
        ("say stopped", 143, True),
        ("say stopped", 1, True),
        ("say done", 143, False),
        ("say failed", 1, False),  # on all its restarts
        ("", 2, False),  # refused
        ("", 143, True),  # before anything was trained
        ("train; say failed", 143, False),  # each start would lose the same
        ("train; save; say failed", 143, True),  # the window was too short, an older checkpoint is there
    ],
)
def test_slurm_queues_a_stopped_job_again_if_that_gets_it_further(tmp_path, happens, code, again):
    run_dir, queued = tmp_path / "a run", tmp_path / "queued"
    (run_dir / "batches").mkdir(parents=True)
    (run_dir / "batches" / "step_0.json").touch()  # of an earlier start
    os.utime(run_dir / "batches" / "step_0.json", (0, 0))
    say = 'say() { printf \'{\\n "status": "%s"\\n}\' "$1" >"$RUN/summary.json"; }\n'
    train = 'train() { touch "$RUN/batches/step_1.json"; }\n'
    save = 'save() { mkdir -p "$RUN/checkpoints/step_1"; touch "$RUN/checkpoints/step_1/COMPLETE"; }\n'
    program(tmp_path / "bin" / "srun", f"{say}{train}{save}sleep 0.02\n{happens}\nexit {code}")
    program(tmp_path / "bin" / "scontrol", f'[ "$1" = show ] && echo node0 || echo "$@" >"{queued}"')
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node0", "SLURM_JOB_NUM_NODES": "1", "RUN": str(run_dir)}
    variables = environment(tmp_path, **slurm, SLURM_SUBMIT_DIR=str(ROOT))
    words = [ROOT / "launch/slurm.sh", "configs/tiny_cpu.toml", NO_MODEL, f"run.dir={run_dir}"]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert queued.exists() is again, done.stdout + done.stderr
    assert done.returncode == (0 if again else code)


@pytest.mark.parametrize("script", ["cpu.sh", "node.sh"])
def test_a_config_is_found_from_where_the_user_is(tmp_path, script):
    config = tmp_path / "a folder" / "mine.toml"
    config.parent.mkdir()
    shutil.copy(ROOT / "configs" / "tiny_cpu.toml", config)
    tells = 'printf "%s\\n" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "${@: -2}"'
    variables = environment(tmp_path, tells)
    for folder, named in (
        (tmp_path, "a folder/mine.toml"),
        (tmp_path, str(config)),
        (tmp_path, "configs/tiny_cpu.toml"),
    ):
        done = subprocess.run(
            [ROOT / "launch" / script, named, NO_MODEL],
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        found = named if named.startswith("configs") else str(config)
        assert done.stdout.splitlines() == ["600", found, NO_MODEL], done.stderr


def test_an_environment_that_could_not_be_made_is_not_in_the_way_of_the_next_try(tmp_path):
    python = tmp_path / "bin" / "python3"
    fails = 'if [ "$1" = -m ]; then mkdir -p "$3/bin"; touch "$3/bin/python"; echo "no ensurepip"; exit 1; fi'
    program(python, f'{fails}; exec "{sys.executable}" "$@"')
    venv = tmp_path / "a folder" / "venv"
    variables = {**os.environ, "PYTHON": str(python), "SPMD_RL_VENV": str(venv)}
    done = subprocess.run([ROOT / "scripts/setup"], env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no ensurepip" in done.stderr and not venv.exists()


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock here")
def test_two_nodes_that_look_at_one_checkout_install_once(tmp_path):
    installs = 'case "$*" in *install*) sleep 0.5; echo installed >>"$LOG" ;; esac'
    program(tmp_path / "stand-in", installs)
    makes = 'if [ "$1" = -m ]; then mkdir -p "$3/bin"; cp "$STAND_IN" "$3/bin/python"; exit; fi'
    program(tmp_path / "bin" / "python3", f'{makes}; exec "{sys.executable}" "$@"')
    log, venv = tmp_path / "log", tmp_path / "venv"
    variables = {
        **os.environ,
        "PYTHON": str(tmp_path / "bin" / "python3"),
        "STAND_IN": str(tmp_path / "stand-in"),
        "LOG": str(log),
        "SPMD_RL_VENV": str(venv),
    }
    setups = [subprocess.Popen([ROOT / "scripts/setup"], env=variables, stdout=-1, text=True) for _ in range(2)]
    assert [setup.communicate(timeout=LIMIT_S)[0] for setup in setups] == [f"{venv}\n"] * 2
    assert log.read_text() == "installed\n"


@pytest.mark.parametrize("script", ["cpu.sh", "node.sh"])
@pytest.mark.parametrize("chosen", ["", "eth7"])
def test_gloo_of_one_node_listens_where_no_other_machine_reaches_it(tmp_path, script, chosen):
    variables = environment(tmp_path, 'echo "$GLOO_SOCKET_IFNAME"')
    variables.pop("GLOO_SOCKET_IFNAME", None)
    words = [ROOT / "launch" / script, "configs/tiny_cpu.toml", NO_MODEL]
    kept = {"GLOO_SOCKET_IFNAME": chosen} if chosen else {}
    said = subprocess.run(words, env=variables | kept, capture_output=True, text=True, check=True).stdout
    assert said.strip() == (chosen or {"linux": "lo", "darwin": "lo0"}[sys.platform])


def audited(*packages: tuple[str, list[str]]) -> tuple[int, list[str]]:
    """What scripts/vulnerabilities says of packages with these advisories; None: the index has no answer."""
    told = runpy.run_path(str(ROOT / "scripts" / "vulnerabilities"))["told"]
    answers = [
        {"name": name, "skip_reason": "not found"}
        if advisories is None
        else {"name": name, "version": "1", "vulns": [{"id": a, "fix_versions": ["2"]} for a in advisories]}
        for name, advisories in packages
    ]
    return told({"dependencies": answers})


def test_what_is_not_known_to_be_safe_is_not_called_safe():
    unknown = "not known of 1 of 2 packages, such as b: the index has no answer"
    assert audited(("a", []), ("b", [])) == (0, [])
    assert audited(("a", []), ("b", None)) == (3, [unknown])
    assert audited(("a", ["CVE-1"]), ("b", None)) == (1, ["a 1: CVE-1, fixed in 2", unknown])


def test_what_is_locked_is_all_that_pyproject_asks_for():
    """But torch, of which an index may serve a build of its own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    pins = [
        line.split()[0].split("==") for line in (ROOT / "scripts/locked.txt").read_text().splitlines() if "==" in line
    ]
    locked = {canonicalize_name(name): version for name, version in pins}
    for one in wanted:
        if one.name != "torch":
            assert one.specifier.contains(locked[canonicalize_name(one.name)]), one
