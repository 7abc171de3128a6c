"""The trainer's forward and backward on several ranks: gloo processes of its own on this machine.

Given folders with small models, rollouts and a way to split them.  The processes are apart from those of a run: they
meet in a file, see no accelerator and end with their answers.  Knows nothing of what the answers are compared with.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from spmd_rl.behavior import compare
from spmd_rl.behavior.samples import Rollouts
from spmd_rl.model.causal_lm import build, packs
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.optimizer import whole

NUM = 2
MESHES = {  # axes, and whether the ranks share the tokens of a micro-batch
    "shards": ((1, NUM), False),
    "tensor_parallel": ((1, 1, NUM), False),
    "context_parallel": ((1, NUM), True),
}
AXES = ("dp_replicate", "dp_shard", "tp")
LIMIT_S = 120.0
_OF_A_JOB = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One model to be computed with on several ranks."""

    folder: Path
    rollouts: Rollouts
    pull: Tensor  # [N] of the sum of log-probs whose gradients are asked for
    way: str  # of MESHES


Answer = tuple[Tensor, dict[str, Tensor]] | str  # [N] log-probs and whole gradients by parameter; or why there are none


class NoAnswer(RuntimeError):
    """Ranks that died or took too long: nothing about the model."""


def answers(tasks: Sequence[Task], limit_s: float = LIMIT_S) -> list[Answer]:
    """Of NUM ranks.  NoAnswer where one dies or does not end in time."""
    with tempfile.TemporaryDirectory(prefix="spmd_rl_") as place:
        torch.save([_packed(task) for task in tasks], Path(place) / "tasks")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_JOB)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "spmd_rl.behavior.ranks", place]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(NUM)
        ]
        try:
            said = [rank.communicate(timeout=limit_s)[1] for rank in ranks]
        except subprocess.TimeoutExpired as error:
            raise NoAnswer(f"{NUM} ranks gave no answer in {limit_s:.0f} s") from error
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if failed := [text for rank, text in zip(ranks, said, strict=True) if rank.returncode]:
            raise NoAnswer(failed[0].strip().rpartition("\n")[2])
        answers: list[tuple[Tensor, dict[str, Tensor]] | str] = torch.load(Path(place) / "answers", weights_only=True)
        return answers


def _packed(task: Task) -> dict[str, object]:
    """As plain tensors and texts."""
    arrays = {part.name: torch.from_numpy(getattr(task.rollouts, part.name)) for part in fields(Rollouts)}
    return {"folder": str(task.folder), "rollouts": arrays, "pull": task.pull, "way": task.way}


def _unpacked(words: dict[str, Any]) -> Task:
    rollouts = Rollouts(**{name: tensor.numpy() for name, tensor in words["rollouts"].items()})
    return Task(folder=Path(words["folder"]), rollouts=rollouts, pull=words["pull"], way=words["way"])


def _answer(task: Task) -> Answer:
    """On one of the ranks, all of which must call it; what fails must fail on all alike."""
    shape, shares_tokens = MESHES[task.way]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[: len(shape)])
    try:
        policy = build(task.folder, device=compare.CPU, dtype=torch.float32, weights=True)
        context = dist.group.WORLD if shares_tokens else None
        models = Models(policy=policy, mesh=mesh, context=context, device=compare.CPU)
        models.last_backward(True)
        logprobs = compare.trained(models, task.rollouts, task.pull, pack=packs(policy), share_prefix=False)
    except (ValueError, TypeError, AttributeError, RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    factor = models.num_averaged if shares_tokens else 1  # FSDP averages; here all have the same, there a part each
    return logprobs, {name: whole(gradient) * factor for name, gradient in compare.gradients(models).items()}


def _main(place: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=NUM)
    found = [_answer(_unpacked(words)) for words in torch.load(place / "tasks", weights_only=True)]
    if rank == 0:
        torch.save(found, place / "answers")
    dist.barrier()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
