"""Joining and leaving the world, over gloo."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from spmd_rl.config.topology import Topology
from spmd_rl.distributed.world import Place, World, agreed_code, check_shared_folder, join, leave, meet
from tests.ranks import RankFailed, run_processes, run_worlds


def uses_every_group(world: World) -> tuple[str, str]:
    for group in [world.ctl, world.ckpt, world.train, *world.wts_meta.values(), *world.wts.values()]:
        if group is not None:
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total == dist.get_world_size(group)
    if world.rank in world.engine_ranks:
        assert tuple(world.wts) == world.sender_ranks
        assert dist.get_process_group_ranks(world.engine_group) == [world.rank]
    elif world.role == "trainer":
        assert tuple(world.wts) == ((world.rank,) if world.rank in world.sender_ranks else ())
        assert tuple(world.mesh.mesh.flatten().tolist()) == world.trainer_ranks
    else:
        assert not world.wts
    there = Place(host="a", device="b", name="cuda:1")
    places = [there if rank == world.engine_ranks[0] else place for rank, place in enumerate(world.places)]
    assert replace(world, places=tuple(places)).engine_device == torch.device("cuda", 1)
    leave(world)
    return world.role, world.describe()


@pytest.mark.parametrize(("num_inference", "num_trainers"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_rank_joins_and_leaves(num_inference, num_trainers):
    answers = run_worlds(uses_every_group, num_inference, num_trainers)
    assert [role for role, _ in answers] == ["inference"] * num_inference + ["trainer"] * num_trainers
    assert len({line for _, line in answers}) == 1
    assert "trainer mesh gloo, weights gloo, control gloo" in answers[0][1]


def test_only_the_first_replica_is_in_the_weights_groups():
    assert "dp_replicate 2 x dp_shard 1" in run_worlds(uses_every_group, 1, 2, dp_replicate=2)[0][1]


def test_an_orchestrator_without_engine_is_in_no_weights_group():
    assert "inference 0-1 (engine on 1)" in run_worlds(uses_every_group, 2, 1, engine_on_rank0=False)[0][1]


def shards_a_model(world: World) -> list[float]:
    if world.mesh is None:
        return []
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    fully_shard(model, mesh=world.mesh if world.mesh.size(0) > 1 else world.mesh["dp_shard"])
    inputs = torch.ones(3, 4) * (1 + world.trainer_ranks.index(world.rank))
    model(inputs).sum().backward()
    return model[0].weight.grad.full_tensor().flatten().tolist()


@pytest.mark.parametrize("dp_replicate", [1, 2])
def test_fsdp_shards_over_the_mesh_replicated_or_not(dp_replicate):
    _, first, second = run_worlds(shards_a_model, 1, 2, dp_replicate=dp_replicate)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    (model(torch.ones(3, 4) * 1.5).sum()).backward()  # mean of the two ranks' inputs: everything is linear
    torch.testing.assert_close(torch.tensor(first), model[0].weight.grad.flatten())
    assert first == second


def joins_a_restarted_world(began: bool) -> tuple[int, bool]:
    """The first start is played by keys that dead ranks left behind, under the same numbers and with old addresses."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "1":
        store.compare_set("spmd_rl/start/1/1", "", "nonce of the dead rank 1")
        store.add("spmd_rl/start", 1)
        if began:
            store.set("spmd_rl/job/started", "1")
        store.set("left behind", "1")
    store.wait(["left behind"], timedelta(seconds=20))
    world = join(meet(), Topology(num_inference=1, num_trainers=1))
    dist.barrier(group=world.ctl)
    return world.generation, world.restarted


@pytest.mark.parametrize("began", [False, True])
def test_a_restarted_world_does_not_meet_its_dead_and_knows_whether_they_began(began):
    assert run_processes(joins_a_restarted_world, 2, began) == [(2, began), (2, began)]


def waits_longer_than_the_store_does() -> int:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set_timeout(timedelta(seconds=0.2))
    if os.environ["RANK"] == "1":
        store.set("rank 1 waits", "1")
        return agreed_code(store)
    store.wait(["rank 1 waits"], timedelta(seconds=20))
    for _ in range(5):
        with pytest.raises(dist.DistStoreError):
            store.get("what nobody writes")  # until the store's timeout
    store.set("exit code", "143")
    return 143


def test_the_exit_code_is_waited_for_longer_than_the_store_would():
    assert run_processes(waits_longer_than_the_store_does, 2) == [143, 143]


@pytest.mark.parametrize("started_by", ["torchrun", "somebody"])
def test_only_torchrun_is_ended_by_its_rank(started_by):
    child = [sys.executable, "-c", "from spmd_rl.distributed.world import end_torchrun; end_torchrun()"]
    parent = [sys.executable, "-c", f"import subprocess; subprocess.run({child!r})"]
    marks = {"TORCHELASTIC_RUN_ID": "a job"} if started_by == "torchrun" else {}
    others = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    assert subprocess.run(parent, env=others | marks, check=False).returncode == (-9 if marks else 0)


def comes_late(world: World) -> str:
    if world.role == "trainer":
        world.store.wait(["rank 0 has seen it"], timedelta(seconds=30))
        return ""
    try:
        leave(world, timeout_s=2.0)
    except RuntimeError as error:
        return str(error)
    finally:
        world.store.set("rank 0 has seen it", "1")
    return "nobody missed"


def test_leaving_names_the_rank_that_did_not_come():
    assert "1 failed to pass monitoredBarrier" in run_worlds(comes_late, 1, 1)[0]


def checks_a_folder(world: World, folder: str) -> str:
    try:
        check_shared_folder(world, Path(folder) / ("shared" if folder.endswith("one") else str(world.rank)))
    except ValueError as error:
        return str(error)
    return ""


def test_a_run_directory_that_is_not_shared_is_refused_on_every_rank(tmp_path):
    assert run_worlds(checks_a_folder, 1, 1, str(tmp_path / "one")) == ["", ""]
    first, second = run_worlds(checks_a_folder, 1, 1, str(tmp_path / "two"))
    assert first == second
    assert "(rank 1) is not the one that rank 0" in first


def test_a_run_directory_that_rank_0_cannot_write_is_refused_on_every_rank(tmp_path):
    (tmp_path / "file-one").touch()
    first, second = run_worlds(checks_a_folder, 1, 1, str(tmp_path / "file-one"))
    assert first == second
    assert re.search(r"run directory \S+ on \S+ \(rank 0\): .*Not a directory", first)


def joins_the_wrong_world() -> None:
    join(meet(), Topology(num_inference=2, num_trainers=1))


def test_a_world_of_the_wrong_size_is_refused():
    with pytest.raises(RankFailed, match=r"WORLD_SIZE is 2, but topology asks for 2 inference \+ 1 trainer = 3"):
        run_processes(joins_the_wrong_world, 2)
