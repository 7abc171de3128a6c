"""Two torchruns with --nnodes=2 on one machine: what differs between them is refused by name, equal copies run."""

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmd_rl.demo import tiny_model
from tests import forks
from tests.end_to_end.jobs import CONFIGS, LIMIT_S, ROOT, environment

pytestmark = pytest.mark.full

SETTINGS = ("run.steps=2", "eval.every=-1", "staleness.max_staleness=0", "staleness.max_concurrent=64")
QUESTIONS = 'env.q={{path = "spmd_rl.envs.questions:Questions", args = {{path = "{}"}}}}'


def both(
    tmp_path: Path, *there: str, config: Path = CONFIGS / "tiny_cpu.toml", **variables: str
) -> list[tuple[int, str]]:
    """[nodes] exit code of torchrun and what it and its rank wrote; `there`, `config`, `variables`: of node 1."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = subprocess.Popen if "PYTHONPATH" in variables else forks.job  # which has this checkout's code
    jobs = []
    for node in range(2):
        launch = ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={node}", "--max-restarts=1"]
        words = [str(CONFIGS / "tiny_cpu.toml" if node == 0 else config), f"run.dir={tmp_path / 'run'}", *SETTINGS]
        words += [f"model.path={tmp_path / f'model{node}'}", QUESTIONS.format(tmp_path / f"rows{node}.jsonl")]
        launch += ["--master-addr=127.0.0.1", f"--master-port={port}", "-m", "spmd_rl"]
        jobs.append(
            start(
                [sys.executable, "-m", "torch.distributed.run", *launch, *words, *(there if node == 1 else ())],
                cwd=tmp_path,  # where no spmd_rl lies that would be imported first
                env=environment() | (variables if node == 1 else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [job.communicate(timeout=LIMIT_S)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, output) for job, output in zip(jobs, outputs, strict=True)]


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    tiny_model.make(tmp_path / "model0")
    shutil.copytree(tmp_path / "model0", tmp_path / "model1")
    rows = "".join(f'{{"question": "{n} + 1", "answer": "{n + 1}"}}\n' for n in range(9))
    for node in range(2):
        (tmp_path / f"rows{node}.jsonl").write_text(rows)
    return tmp_path


def another_tensor(tmp_path: Path) -> None:
    tensors = load_file(tmp_path / "model1" / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, tmp_path / "model1" / "model.safetensors", {"format": "pt"})


def another_row(tmp_path: Path) -> None:
    (tmp_path / "rows1.jsonl").write_text(
        (tmp_path / "rows0.jsonl").read_text().replace('"answer": "3"', '"answer": "4"')
    )


def another_checkout(tmp_path: Path) -> None:
    there = shutil.copytree(ROOT / "spmd_rl", tmp_path / "checkout" / "spmd_rl")
    changed = there / "rewards" / "text.py"
    changed.write_text(changed.read_text() + "\n# changed\n")


CASES = {
    "folder": (another_tensor, (), {}, "tensor model.norm.weight in model.path differs between ranks: "),
    "setting": (
        None,
        ("trainer.learning_rate=0.1",),
        {},
        "setting trainer.learning_rate differs between ranks: 0.001 on",
    ),
    "topology": (None, ("topology.trainer=2",), {}, "setting topology.trainer differs between ranks: 1 on rank 0"),
    "data": (another_row, (), {}, "content of what setting env.q.args.path names differs between ranks: "),
    "variable": (
        None,
        (),
        {"NVIDIA_TF32_OVERRIDE": "0"},
        "environment variable NVIDIA_TF32_OVERRIDE differs between ranks:",
    ),
    "checkout": (
        another_checkout,
        (),
        {"PYTHONPATH": "checkout"},
        "code spmd_rl/rewards/text.py differs between ranks: ",
    ),
    "a mistake": (None, ("run.step=3",), {}, "rank 1 ("),
}


@pytest.mark.parametrize("case", CASES)
def test_nodes_that_differ_are_refused_by_name_and_not_started_again(nodes, case):
    change, there, variables, line = CASES[case]
    if change:
        change(nodes)
    variables = {name: str(nodes / value) if name == "PYTHONPATH" else value for name, value in variables.items()}
    first, second = both(nodes, *there, **variables)
    assert (first[0], second[0]) == (1, 1)  # torchrun's own
    said = [line for line in (first[1] + second[1]).splitlines() if line.startswith("error")]
    assert len(said) == 1 and said[0].startswith(f"error: {line}") and said[0] in first[1]
    for _, output in (first, second):
        assert "exitcode  : 2" in output and "this job was refused or stopped, and is not started again" in output
    assert not (nodes / "run" / "config.toml").exists()


def test_equal_copies_on_two_nodes_run(nodes):
    assert [code for code, _ in both(nodes)] == [0, 0]
    trained = load_file(nodes / "run" / "model" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in trained.values())
