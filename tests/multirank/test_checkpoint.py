"""The trainers' half of a checkpoint on several ranks."""

import torch
import torch.distributed as dist

from spmd_rl.storage import checkpoint
from tests.ranks import run_ranks


def save(rank, folder):
    checkpoint.save_trainer({f"weight{rank}": torch.full((4, 4), rank)}, folder / "trainer", dist.group.WORLD).result()
    return checkpoint.sums(folder / "trainer", rank)


def test_every_rank_sums_up_what_it_wrote_itself(tmp_path):
    by_rank = run_ranks(save, 2, checkpoint.aside(tmp_path, 2))
    assert [list(files) for files in by_rank] == [["__0_0.distcp"], ["__1_0.distcp"]]
    checkpoint.save_orchestrator({}, [], checkpoint.aside(tmp_path, 2))
    folder = checkpoint.complete(tmp_path, 2, by_rank[0] | by_rank[1])
    checkpoint.verify(folder)
