"""What it takes to compare the weights of all ranks before a run: one reading of them on each machine.

    python -m benchmarks.start_checks --gb 16 --folder /data/scratch

Writes a folder of random bfloat16 weights, as many GB as asked, and compares it between ranks as a start does: once
with nothing of it in memory, as far as the kernel drops it when asked to, and once more from memory.  Another machine
reads its own copy at the same time, so the seconds are those of the slowest one.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from spmd_rl import config
from spmd_rl.files import fingerprint
from spmd_rl.files.model_files import INDEX
from spmd_rl.ranks.rank_facts import compare_files

SHARD = 2**31  # bytes
ROWS, WIDTH = 14336, 4096  # of a matrix: those of an 8B model


@dataclass
class Rank:
    """A rank in a thread."""

    rank: int
    world_size: int
    host: str
    store: dist.Store


def write(folder: Path, num_bytes: float) -> None:
    """Shards of matrices; the values of all are alike, their bytes are read all the same."""
    matrix = torch.randn(ROWS, WIDTH).bfloat16()
    each, where = max(1, SHARD // matrix.nbytes), {}
    for first in range(0, max(1, round(num_bytes / matrix.nbytes)), each):
        names = [
            f"layers.{n}.weight" for n in range(first, min(first + each, max(1, round(num_bytes / matrix.nbytes))))
        ]
        file = f"model-{first:05}.safetensors"
        save_file({name: matrix.clone() for name in names}, folder / file)
        where |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text("{}")


def forget(folder: Path) -> None:
    """Have no page of the folder's files in memory, where the kernel does as it is asked."""
    for file in folder.iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    fingerprint._read_once.cache_clear()


def compare(folder: Path, num_ranks: int) -> float:
    """Seconds until all ranks, the first of which infers, know that they have the same."""
    loaded = config.from_tree({"model": {"path": str(folder)}, "env": {"e": {"path": "spmd_rl.envs.echo:Echo"}}})
    store = dist.HashStore()

    def live(rank: int) -> None:
        party = Rank(rank, num_ranks, "here", store)
        role = "trainer" if rank else "inference"
        compare_files(party, loaded, role=role, devices={}, timeout_s=3600.0)

    began = time.perf_counter()
    ranks = [threading.Thread(target=live, args=(rank,)) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to write them; a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        write(folder, options.gb * 1e9)
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"{num_bytes / 1e9:.2f} GB, {options.ranks} ranks, {os.cpu_count()} cores")
        for where in ("disk", "memory"):
            if where == "disk":
                forget(folder)
            fingerprint._read_once.cache_clear()
            seconds = compare(folder, options.ranks)
            print(f"from {where:6}  {seconds:6.1f} s  {num_bytes / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
