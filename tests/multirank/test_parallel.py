"""Tensor and context parallelism on 2 and 4 ranks against one process without a mesh; real gloo, real FSDP2."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from spmd_rl.demo import tiny_model
from spmd_rl.objective.corrections import Correction
from spmd_rl.objective.losses import LOSSES
from spmd_rl.objective.objective import Objective
from spmd_rl.packing.packing import Packed
from spmd_rl.storage import checkpoint
from spmd_rl.trainer.critic import Credit
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.optimizer import local, whole
from spmd_rl.weights.low_rank import Lora
from tests.multirank.test_trainer import CPU, PROBE, alone, assert_equal, batch, load, make
from tests.ranks import run_ranks, run_worlds
from tests.unit import families

FOUR = [slice(0, 1), slice(1, 3), slice(3, 8), slice(8, 12)]
TWO = [slice(0, 2), slice(2, 12)]
ONE = [slice(0, 12)]
SEQUENCES = Objective(
    loss=LOSSES["gspo"],
    correction=Correction(level="geometric", reject="off_policy_negative"),
    entropy_coefficient=0.01,
)
LORA = Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))  # both ways of cutting
CASES: dict[str, tuple[str, tuple[int, int, int], int, dict[str, Any]]] = {
    # model, (dp_replicate, dp_shard, tp), ranks that share tokens, settings
    "tp": ("tiny", (1, 1, 2), 1, {}),
    "tp, shared prompts": ("tiny", (1, 1, 2), 1, {"share_prefix": True}),
    "tp, untied": ("llama", (1, 1, 2), 1, {}),
    "tp, biases": ("qwen2", (1, 1, 2), 1, {"shared_critic": True, "credit": Credit()}),
    "tp, lora": ("tiny", (1, 1, 2), 1, {"lora": LORA}),
    "tp, lora, biases": ("qwen2", (1, 1, 2), 1, {"lora": LORA, "activation_checkpointing": True}),
    "tp, lora and shards": ("llama", (1, 2, 2), 1, {"lora": LORA}),
    "cp": ("tiny", (1, 2, 1), 2, {}),
    "cp, window": ("mistral", (1, 2, 1), 2, {"objective": SEQUENCES}),
    "cp, small micro-batches": (
        "tiny",
        (1, 2, 1),
        2,
        {"micro_batch_tokens": 64, "shared_critic": True, "credit": Credit()},
    ),
    "cp, own critic": ("tiny", (1, 2, 1), 2, {"critic": "model", "credit": Credit()}),
    "cp, shared prompts": ("mistral", (1, 2, 1), 2, {"share_prefix": True}),
    "cp of four, shared prompts": ("tiny", (1, 4, 1), 4, {"share_prefix": True}),
    "cp, recomputed": ("tiny", (1, 2, 1), 2, {"activation_checkpointing": True, "reshard_after_forward": True}),
    "tp and shards": ("tiny", (1, 2, 2), 1, {"objective": SEQUENCES}),
    "tp and shards, minibatches": ("tiny", (1, 2, 2), 1, {"num_minibatches": 3, "objective": SEQUENCES}),
    "tp and replicas": ("llama", (2, 1, 2), 1, {}),
    "cp and shards": ("tiny", (1, 4, 1), 2, {"num_minibatches": 2}),
    "cp of four": ("llama", (1, 4, 1), 4, {}),
    "tp and cp": ("tiny", (1, 2, 2), 2, {}),
}
SAVED = ("tp", "tp, lora", "tp and shards", "tp, biases")
LAYOUT = ("activation_checkpointing", "reshard_after_forward", "share_prefix")


pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    tiny_model.make(root / "tiny")
    return {"tiny": root / "tiny"} | {name: families.save(name, root / name) for name in ("llama", "qwen2", "mistral")}


def run_cases(rank: int, folders: dict[str, Path], saved: Path) -> dict[str, Any]:
    found, num = {}, dist.get_world_size()
    for case, (name, shape, together, settings) in CASES.items():
        if np.prod(shape) != num:
            continue
        axes = 3 if shape[2] > 1 else 2
        names = ("dp_replicate", "dp_shard", "tp")
        mesh = init_device_mesh("cpu", shape[:axes], mesh_dim_names=names[:axes])
        context = None
        if together > 1:
            tp = shape[2]  # ranks with one tp index that are neighbours on the shard axis
            for start in range(0, num, tp * together):
                for i in range(tp):
                    members = list(range(start + i, start + i + tp * together, tp))
                    made = dist.new_group(members)
                    context = made if rank in members else context
        trainer = make(folders[name], mesh, dist.group.WORLD, context=context, **settings)
        shares = {1: ONE, 2: TWO, 4: FOUR}[num // shape[2] // together]
        mine = shares[rank // shape[2] // together]
        metrics = [trainer.step(part_of(n, mine, trainer), n) for n in range(2)]
        trainer.models.refresh()
        sent = {n: whole(p).numpy().copy() for n, p in trainer.models.named_parameters().items()}
        found[case] = metrics, sent, moments(trainer), trainer.score(PROBE)
        if case in SAVED:
            dcp.save(trainer.state_dict(), checkpoint_id=saved / case)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def ran(folders: dict[str, Path], saved: Path) -> dict[int, list[dict[str, Any]]]:
    return {num: run_ranks(run_cases, num, folders, saved, timeout_s=240) for num in (2, 4)}


def moments(trainer: Any) -> dict[str, np.ndarray]:
    """First moments: gradients without the division that turns noise into steps."""
    state = trainer.optimizer.state
    return {name: whole(state[p]["exp_avg"]).numpy().copy() for name, p in trainer.models.named_trained()}


def reference(folders: dict[str, Path], case: str) -> Any:
    name, shape, together, settings = CASES[case]
    num_shares = np.prod(shape) // shape[2] // together
    settings = {k: v for k, v in settings.items() if k not in LAYOUT}
    trainer = alone(folders[name], **({"micro_batch_tokens": 100_000} | settings))
    parts = {1: ONE, 2: TWO, 4: FOUR}[num_shares]
    return trainer, parts


@pytest.mark.parametrize("case", CASES)
def test_parallel_equals_alone(folders: dict[str, Path], ran: dict, case: str) -> None:
    trainer, parts = reference(folders, case)
    expected = [trainer.train(merge(trainer, n, parts), n) for n in range(2)]
    trainer.models.refresh()
    tensors, scores, gradients = trainer.models.named_parameters(), trainer.score(PROBE), moments(trainer)
    for metrics, sent, moved, scored in (rank[case] for rank in ran[int(np.prod(CASES[case][1]))]):
        for mine, theirs in zip(metrics, expected, strict=True):
            assert_equal(mine, theirs, np.prod(CASES[case][1]))
            assert (mine["shared_tokens"] > 0) == ("share_prefix" in CASES[case][3])
        assert (list(sent), list(moved)) == (list(tensors), list(gradients))
        for name, gradient in gradients.items():
            np.testing.assert_allclose(moved[name], gradient, rtol=1e-5, atol=1e-7, err_msg=name)
        for name, tensor in tensors.items():
            np.testing.assert_allclose(sent[name], tensor.numpy(), rtol=1e-5, atol=2e-5, err_msg=name)
        np.testing.assert_allclose(scored, scores, rtol=0, atol=2e-4)


def test_padding_counts_once_for_the_ranks_that_hold_the_same_rollouts(ran: dict) -> None:
    """2 of 12 rollouts are one micro-batch, the others one each: the ranks with the 2 compute 9 tokens of padding."""
    for metrics, *_ in (rank["tp and shards"] for rank in ran[4]):
        assert [m["num_microbatches"] for m in metrics] == [10, 10]
        assert [m["padding_share"] for m in metrics] == [9 / (m["input_tokens"] + 9) for m in metrics]


def merge(trainer: Any, n: int, parts: list[slice]) -> list[Any]:
    from spmd_rl.trainer.microbatch import merged

    return [merged(p) for p in zip(*(trainer.cut(part_of(n, part, trainer)) for part in parts), strict=True)]


def part_of(n: int, part: slice, trainer: Any) -> Packed:
    """Some of the 12 rollouts, whose place in the batch says their minibatch."""
    packed = batch(n, part)
    packed.minibatch[:] = packed.ticket % 100 * trainer.num_minibatches // 12
    return packed


@pytest.mark.parametrize("case", SAVED)
def test_checkpoint_of_split_weights_goes_on_alone(folders: dict[str, Path], saved: Path, ran: dict, case: str) -> None:
    trainer, parts = reference(folders, case)
    state = trainer.state_dict()
    checkpoint.load_trainer(state, saved / case, None)
    trainer.load_state_dict(state)
    assert trainer.num_steps == 2
    straight, _ = reference(folders, case)
    expected = [straight.train(merge(straight, n, parts), n) for n in range(3)][2]
    found = trainer.train(merge(trainer, 2, parts), 2)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_what_cannot_be_split_is_refused(folders: dict[str, Path]) -> None:
    def split_in_three(folder: Path) -> None:
        from spmd_rl.trainer.tensor_parallel import parallelize

        class Mesh:
            def size(self) -> int:
                return 3

        parallelize(load(folder), Mesh())

    with pytest.raises(ValueError, match="does not divide num_attention_heads = 4"):
        split_in_three(folders["tiny"])


def test_the_models_of_one_process_need_no_mesh(folders: dict[str, Path]) -> None:
    models = Models(policy=load(folders["tiny"]), mesh=None, device=CPU)
    models.refresh()
    assert models.counts and models.num_averaged == 1
    assert isinstance(models.score(torch.arange(5), 1.0), torch.Tensor)


def train_in_a_world(world: Any, folder: Path) -> Any:
    if world.mesh is None:
        return world.describe()
    share = batch(0, TWO[world.topology.share_of(world.rank)] if world.topology.num_shares == 2 else ONE[0])
    trainer = make(folder, world.mesh, world.train, context=world.context)
    trainer.step(share, 0)
    trainer.models.refresh()
    shards = {name: local(p).numpy().copy() for name, p in trainer.models.named_parameters().items()}
    return world.rank in world.sender_ranks, shards


def test_senders_of_a_world_with_every_axis_hold_the_whole_model(folders: dict[str, Path]) -> None:
    line, *found = run_worlds(
        train_in_a_world, 1, 4, folders["llama"], tensor_parallel=2, context_parallel=2, timeout_s=120
    )
    assert "dp_replicate 1 x dp_shard 2 x tp 2 x cp (of dp_shard) 2" in line
    senders = [shards for sends, shards in found if sends]
    assert [sends for sends, _ in found] == [True, False, True, False]
    trainer = alone(folders["llama"])
    trainer.step(batch(0), 0)
    for name, tensor in trainer.models.named_parameters().items():
        rows = np.concatenate([shards[name] for shards in senders])
        np.testing.assert_allclose(rows, tensor.numpy(), rtol=0, atol=2e-5, err_msg=name)
