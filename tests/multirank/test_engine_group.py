"""An engine's ranks among the ranks of a job: the lent default group, and lock-step behind a leader."""

import os
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from spmd_rl.demo.tiny_model import random_model, write_model
from spmd_rl.engine.default_group import as_default_group
from spmd_rl.engine.lockstep import Leader, follow
from spmd_rl.engine.native import NativeEngine
from spmd_rl.engine.update import DISTURBED, disturbed
from spmd_rl.engine.vllm import _common_name
from spmd_rl.model.causal_lm import build
from spmd_rl.types import Sampling
from tests.ranks import RankFailed, run_ranks


def lends_the_group(rank: int) -> tuple[int, int, str, int]:
    group = dist.new_group([1, 2])
    inside = (-1, -1, "")
    if rank in (1, 2):
        with as_default_group(group, local_rank=7):
            total = torch.tensor([rank])
            dist.all_reduce(total)  # over the default group
            dist.all_reduce(total, group=dist.new_group([0, 1]))  # made by these two ranks alone, in their numbers
            inside = (dist.get_rank(), int(total), os.environ["RANK"] + os.environ["LOCAL_RANK"])
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    dist.broadcast(total, 1, group=group) if rank in (1, 2) else None  # ranks of the job again
    if rank == 1:
        dist.send(total, 0)
    if rank == 0:
        dist.recv(total, 1)
    return *inside, int(total)


def test_a_lent_group_is_the_whole_world_until_it_is_given_back():
    assert run_ranks(lends_the_group, 3) == [(-1, -1, "", 6), (0, 6, "07", 6), (1, 6, "17", 6)]


def names_of_two_engines(rank: int) -> str:
    first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
    return _common_name(first if rank < 2 else second)


def test_engines_share_memory_under_names_of_their_own():
    names = run_ranks(names_of_two_engines, 4)
    assert names[0] == names[1] != names[2] == names[3]


def engine_of_version(folder: str, version: int) -> tuple[NativeEngine, dict[str, torch.Tensor]]:
    model = build(folder, device="cpu", dtype=torch.float32, weights=False)
    engine = NativeEngine(model=model, device=torch.device("cpu"), max_slots=3, max_seq_len=64)
    return engine, dict(random_model(version).named_parameters())


def lead_or_follow(rank: int, folder: str) -> list:
    """Rank 0 leads; what it submits, cancels, swaps and scores happens on rank 1 too."""
    group = dist.new_group([0, 1])
    engine, weights = engine_of_version(folder, 0)
    if rank == 1:
        seen: list = []

        def load(version: int) -> None:
            engine.load_weights(dict(random_model(version).named_parameters()), version)
            seen.append((version, engine.num_running))

        def reload(version: int) -> None:
            held = dict(random_model(1).named_parameters())
            engine.load_weights(disturbed(held) if version == DISTURBED else held, version)
            seen.append((-version, engine.num_running))

        follow(engine=engine, group=group, load=load, reload=reload)
        return seen
    leader = Leader(engine=engine, group=group)
    leader.load_weights(weights, 0)
    for request in range(5):
        prompt = np.arange(request + 4, dtype=np.int32)
        leader.submit(request, prompt, Sampling(max_tokens=6 + request, seed=request, stop_ids=(70, 71)))
    with pytest.raises(ValueError, match="outside"):
        leader.submit(9, np.array([99], np.int32), Sampling(max_tokens=1))  # the member never hears of it
    done = dict(leader.step())
    leader.cancel(1)
    done |= dict(leader.step())
    leader.score(np.arange(8, dtype=np.int32))
    held = dict(random_model(1).named_parameters())
    leader.load_weights(held, 1)
    leader.load_weights(disturbed(held), DISTURBED)  # as a probe does it
    done |= dict(leader.step())
    leader.load_weights(held, 1)
    while len(done) < 5:
        done |= dict(leader.step())
    leader.close()
    return [(request, done[request].finish_reason, len(done[request].token_ids)) for request in sorted(done)]


def test_members_do_what_the_leader_does(tmp_path):
    write_model(tmp_path, random_model(0))
    leader, member = run_ranks(lead_or_follow, 2, str(tmp_path))
    assert [reason for _, reason, _ in leader] == ["length", "cancelled", "length", "length", "length"]
    assert [num for _, _, num in leader] == [6, 1, 8, 9, 10]
    assert member == [(0, 0), (1, 3), (-DISTURBED, 3), (-1, 3)]


def diverges(rank: int, folder: str, then: str) -> None:
    """Rank 1 has other weights; after its only request has ended, the leader does one thing more."""
    group = dist.new_group([0, 1])
    engine, _ = engine_of_version(folder, 0)
    weights = dict(random_model(rank).named_parameters())
    if rank == 1:
        load = partial(engine.load_weights, weights)
        follow(engine=engine, group=group, load=load, reload=load)
        return
    leader = Leader(engine=engine, group=group)
    leader.load_weights(weights, 0)
    leader.submit(0, np.arange(4, dtype=np.int32), Sampling(max_tokens=6))
    while not leader.step():
        pass
    calls = {"step": (), "load_weights": (weights, 1), "score": (np.arange(8, dtype=np.int32),), "close": ()}
    getattr(leader, then)(*calls[then])


@pytest.mark.parametrize("then", ["step", "load_weights", "score", "close"])
def test_a_member_that_samples_other_tokens_is_found_with_the_next_call(tmp_path, then):
    write_model(tmp_path, random_model(0))
    with pytest.raises(RankFailed, match="rank 1 sampled other tokens than the leader of its engine, rank 0"):
        run_ranks(diverges, 2, str(tmp_path), then)
