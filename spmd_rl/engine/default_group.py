"""Lends a process group of this job to a library that takes the default group for its own world.

torch derives ranks, sizes, stores and new groups from the default group, and which group that is can be changed.  While
lent, this process sees only the members of the group, numbered from 0; what the library builds hangs below it.  The
group must have been made by all ranks of the job before, so must every group that is needed later: the library
advances torch's count of groups on its own ranks only.  No other thread may use torch.distributed meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d


@contextmanager
def as_default_group(group: ProcessGroup, *, local_rank: int) -> Iterator[None]:
    """While in the block `group` is the default group, in torch and in torchrun's variables."""
    own, ranks = c10d._get_default_group(), c10d._world.pg_group_ranks[group]
    lent = {
        "RANK": group.rank(),
        "WORLD_SIZE": group.size(),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": group.size(),
    }
    before = {name: os.environ.get(name) for name in lent}
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
    c10d._update_default_pg(group)
    os.environ.update({name: str(value) for name, value in lent.items()})
    try:
        yield
    finally:
        c10d._world.pg_group_ranks[group] = ranks
        c10d._update_default_pg(own)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
