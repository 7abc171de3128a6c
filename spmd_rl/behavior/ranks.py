"""The trainer's forward and backward on several ranks: gloo processes of its own on this machine.

Given a folder with a small model, rollouts and a way to split them.  The processes are apart from those of a run: they
meet in a file, see no accelerator and end with their answer.  Knows nothing of what the answer is compared with.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from spmd_rl.behavior import compare
from spmd_rl.behavior.samples import Rollouts
from spmd_rl.model import build, packs
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


def trained(folder: Path, rollouts: Rollouts, pull: Tensor, way: str) -> tuple[Tensor, dict[str, Tensor]]:
    """[N] log-probs and whole gradients by parameter, computed by NUM ranks.  RuntimeError where one fails."""
    with tempfile.TemporaryDirectory(prefix="spmd_rl_") as place:
        asked, answer = Path(place) / "asked", Path(place) / "answer"
        asked.write_bytes(pickle.dumps((folder, rollouts, pull, way)))
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_JOB)}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "spmd_rl.behavior.ranks", place]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(NUM)
        ]
        errors = []
        for rank in ranks:
            try:
                _, said = rank.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                said = f"no answer in {LIMIT_S:.0f} s"
            if rank.poll() != 0:
                rank.kill()
                rank.wait()
                errors.append(said.strip().rpartition("\n")[2])
        if errors:
            raise RuntimeError(errors[0])
        return torch.load(answer, weights_only=True)


def compute(rank: int, folder: Path, rollouts: Rollouts, pull: Tensor, way: str) -> tuple[Tensor, dict[str, Tensor]]:
    """On one of the ranks, all of which must call it."""
    shape, shares_tokens = MESHES[way]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[: len(shape)])
    policy = build(folder, device=compare.CPU, dtype=torch.float32, weights=True)
    models = Models(policy=policy, mesh=mesh, context=dist.group.WORLD if shares_tokens else None, device=compare.CPU)
    models.last_backward(True)
    logprobs = compare.trained(models, rollouts, pull, pack=packs(policy), share_prefix=False)
    copies = 1 if shares_tokens else models.num_averaged  # all ranks have the same rollouts, and FSDP averages
    found = compare.gradients(models)
    return logprobs, {name: whole(grad) * (models.num_averaged / copies) for name, grad in found.items()}


def _main(place: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=NUM)
    answer = compute(rank, *pickle.loads((place / "asked").read_bytes()))
    if rank == 0:
        torch.save(answer, place / "answer")
    dist.barrier()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
