"""Who does what: ranks 0 … I-1 infer, ranks I … W-1 train.

Pure arithmetic on rank numbers; refuses what cannot work before torch is imported.
Knows nothing of processes, devices or groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The split of one torchrun's ranks.

    Example: 1 inference and 4 trainer ranks with dp_replicate = 2 give the trainer mesh [[[1], [2]], [[3], [4]]]
    (replicas, shards, tensor-parallel ranks); ranks 1 and 2 hold one whole copy together and send its weights.
    """

    num_inference: int  # I
    num_trainers: int  # T
    dp_replicate: int = 1  # copies of the model among the trainers; each is on T / dp_replicate ranks
    tensor_parallel: int = 1  # neighbouring trainer ranks that split every layer
    context_parallel: int = 1  # neighbours on the shard axis that split the tokens of their rollouts
    engine_on_rank0: bool = True  # False = rank 0 only orchestrates and takes no device
    engine_ranks_each: int = 1  # inference ranks that make one (tensor-parallel) engine

    def __post_init__(self) -> None:
        if self.num_inference < 1 or self.num_trainers < 1:
            raise ValueError(
                f"{self.num_inference} inference and {self.num_trainers} trainer ranks; each side needs at least 1"
            )
        if self.dp_replicate < 1 or self.num_trainers % self.dp_replicate:
            raise ValueError(
                f"{self.num_trainers} trainer ranks cannot hold dp_replicate = {self.dp_replicate} equal "
                "copies; choose a divisor of the number of trainer ranks"
            )
        if min(self.tensor_parallel, self.context_parallel) < 1 or (
            self.num_trainers // self.dp_replicate % (self.tensor_parallel * self.context_parallel)
        ):
            raise ValueError(
                f"{self.num_trainers // self.dp_replicate} trainer ranks for one copy cannot be "
                f"tensor_parallel = {self.tensor_parallel} times context_parallel = {self.context_parallel}: "
                "choose divisors"
            )
        if not self.engine_ranks:
            raise ValueError("engine_on_rank0 = false leaves no engine with 1 inference rank; use 2 or more")
        if self.engine_ranks_each < 1 or len(self.engine_ranks) % self.engine_ranks_each:
            raise ValueError(
                f"{len(self.engine_ranks)} ranks with an engine cannot be split into engines of "
                f"{self.engine_ranks_each} (inference.tensor_parallel); choose a divisor"
            )

    @property
    def world_size(self) -> int:
        """W = I + T."""
        return self.num_inference + self.num_trainers

    @property
    def inference_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.num_inference))

    @property
    def trainer_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.num_inference, self.world_size))

    @property
    def engine_ranks(self) -> tuple[int, ...]:
        """Inference ranks that hold (a part of) an engine."""
        return self.inference_ranks[0 if self.engine_on_rank0 else 1 :]

    @property
    def engines(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each engine; the first of a row leads it."""
        each = self.engine_ranks_each
        return tuple(self.engine_ranks[start : start + each] for start in range(0, len(self.engine_ranks), each))

    @property
    def mesh(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Trainer ranks as [dp_replicate][dp_shard][tp]."""
        each, ranks = self.tensor_parallel, self.trainer_ranks
        blocks = tuple(ranks[start : start + each] for start in range(0, len(ranks), each))
        shards = len(blocks) // self.dp_replicate
        return tuple(blocks[row * shards : (row + 1) * shards] for row in range(self.dp_replicate))

    @property
    def context_groups(self) -> tuple[tuple[int, ...], ...]:
        """Trainer ranks that share the tokens of their rollouts."""
        each = self.context_parallel
        return tuple(
            tuple(block[i] for block in row[start : start + each])
            for row in self.mesh
            for start in range(0, len(row), each)
            for i in range(self.tensor_parallel)
        )

    @property
    def num_shares(self) -> int:
        """Parts that a batch is split into among the trainer ranks."""
        return self.num_trainers // self.tensor_parallel // self.context_parallel

    def share_of(self, rank: int) -> int:
        """Which part of a batch a trainer rank trains."""
        return (rank - self.num_inference) // self.tensor_parallel // self.context_parallel

    @property
    def sender_ranks(self) -> tuple[int, ...]:
        """Trainer ranks that together send one copy of the weights: dp_replicate index 0, tp index 0."""
        return tuple(block[0] for block in self.mesh[0])

    @property
    def engine_leaders(self) -> tuple[int, ...]:
        """The rank of each engine that is asked for completions."""
        return tuple(members[0] for members in self.engines)

    def role(self, rank: int) -> str:
        """inference | member (computes its part of an engine that another rank leads) | trainer."""
        if rank in self.trainer_ranks:
            return "trainer"
        return "member" if rank in self.engine_ranks and rank not in self.engine_leaders else "inference"

    def takes_device(self, rank: int) -> bool:
        """False only for an orchestrator without an engine."""
        return rank in self.engine_ranks or rank in self.trainer_ranks

    def device_slot(self, rank: int, local_rank: int) -> int:
        """Index among the devices of its node: LOCAL_RANK, one less on rank 0's node where rank 0 takes none."""
        on_first_node = rank == local_rank  # torchrun numbers the ranks of the first node first
        return local_rank - (1 if on_first_node and not self.engine_on_rank0 else 0)


def check_world_size(environment: Mapping[str, str], topology: Topology) -> None:
    """Refuse a launch whose WORLD_SIZE is not I + T; for use before torch is imported."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in environment]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} not set: start with `torchrun --nproc-per-node={topology.world_size} -m spmd_rl …`"
        )
    world_size = int(environment["WORLD_SIZE"])
    if world_size != topology.world_size:
        raise ValueError(
            f"WORLD_SIZE is {world_size}, but topology asks for {topology.num_inference} inference + "
            f"{topology.num_trainers} trainer = {topology.world_size} ranks: "
            f"start {topology.world_size} processes or change [topology]"
        )
