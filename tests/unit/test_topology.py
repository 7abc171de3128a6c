"""The split of the ranks, and what is refused before torch is imported."""

import subprocess
import sys

import pytest

from spmd_rl.config.topology import Topology, check_world_size

TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0"}


def test_inference_ranks_come_first():
    topology = Topology(num_inference=2, num_trainers=3)
    assert topology.inference_ranks == (0, 1)
    assert topology.trainer_ranks == (2, 3, 4)
    assert [topology.role(rank) for rank in range(5)] == ["inference"] * 2 + ["trainer"] * 3


def test_the_first_replica_sends_the_weights():
    topology = Topology(num_inference=1, num_trainers=4, dp_replicate=2)
    assert topology.mesh == (((1,), (2,)), ((3,), (4,)))
    assert topology.sender_ranks == (1, 2)


def test_an_orchestrator_without_engine_takes_no_device():
    topology = Topology(num_inference=3, num_trainers=2, engine_on_rank0=False)
    assert topology.engine_ranks == (1, 2)
    assert not topology.takes_device(0)
    assert topology.device_slot(1, 1) == 0  # its node runs one rank more than it has devices
    assert topology.device_slot(4, 1) == 1  # a later node does not


def test_engines_of_several_ranks():
    assert Topology(num_inference=4, num_trainers=1, engine_ranks_each=2).engines == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_inference": 0, "num_trainers": 1}, "0 inference and 1 trainer"),
        ({"num_inference": 1, "num_trainers": 3, "dp_replicate": 2}, "3 trainer ranks cannot hold dp_replicate = 2"),
        ({"num_inference": 1, "num_trainers": 1, "engine_on_rank0": False}, "leaves no engine"),
        ({"num_inference": 3, "num_trainers": 1, "engine_ranks_each": 2}, "3 ranks with an engine"),
    ],
)
def test_impossible_splits_are_refused_in_one_line(settings, words):
    with pytest.raises(ValueError, match=words) as refused:
        Topology(**settings)
    assert "\n" not in str(refused.value)


def test_a_wrong_world_size_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match=r"WORLD_SIZE is 3.*1 inference \+ 1 trainer = 2 ranks"):
        check_world_size({**TORCHRUN, "WORLD_SIZE": "3"}, Topology(num_inference=1, num_trainers=1))


def test_a_launch_without_torchrun_is_told_the_command():
    with pytest.raises(ValueError, match=r"RANK, WORLD_SIZE, LOCAL_RANK not set: start with `torchrun --nproc-per-n"):
        check_world_size({}, Topology(num_inference=1, num_trainers=1))


def test_the_checks_need_no_torch():
    script = "import sys, spmd_rl.config.topology; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_tensor_and_context_parallel_ranks_share_a_part_of_the_batch():
    """[replica][shard][tp]: two copies of two shards of two ranks, and the two shards share their tokens."""
    topology = Topology(num_inference=1, num_trainers=8, dp_replicate=2, tensor_parallel=2, context_parallel=2)
    assert topology.mesh == (((1, 2), (3, 4)), ((5, 6), (7, 8)))
    assert topology.sender_ranks == (1, 3)
    assert topology.context_groups == ((1, 3), (2, 4), (5, 7), (6, 8))
    assert topology.num_shares == 2
    assert [topology.share_of(rank) for rank in topology.trainer_ranks] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_parallel_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="tensor_parallel = 2 times context_parallel = 2"):
        Topology(num_inference=1, num_trainers=6, tensor_parallel=2, context_parallel=2)


def test_ranks_of_an_engine_have_one_leader():
    topology = Topology(num_inference=5, num_trainers=1, engine_on_rank0=False, engine_ranks_each=2)
    assert topology.engines == ((1, 2), (3, 4)) and topology.engine_leaders == (1, 3)
    roles = [topology.role(rank) for rank in range(6)]
    assert roles == ["inference", "inference", "member", "inference", "member", "trainer"]
