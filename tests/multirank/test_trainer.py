"""The training step on several ranks: real gloo, real FSDP2, against one process without a mesh."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from spmd_rl.demo import tiny_model
from spmd_rl.model.causal_lm import build
from spmd_rl.objective.corrections import Correction
from spmd_rl.objective.losses import LOSSES, Limits, Rows, TokenLosses
from spmd_rl.objective.objective import AGGREGATIONS, Objective
from spmd_rl.packing import packing
from spmd_rl.packing.packing import Packed, pack
from spmd_rl.trainer.critic import Credit
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.optimizer import local
from spmd_rl.trainer.trainer import Trainer
from spmd_rl.types import Rollout
from tests.ranks import run_ranks, run_worlds

CPU = torch.device("cpu")
PROBE = np.arange(3, 60, dtype=np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.make(folder)
    return folder


def alone(folder: Path, **settings: object) -> Trainer:
    return make(folder, None, None, **settings)


MODELS = (
    "reference",
    "critic",
    "shared_critic",
    "activation_checkpointing",
    "reshard_after_forward",
    "cpu_offload",
    "context",
    "lora",
)


def load(folder: Path) -> torch.nn.Module:
    return build(folder, device=CPU, dtype=torch.float32, weights=True)


def make(folder: Path, mesh, group, **settings: object) -> Trainer:
    models = {k: load(folder) if v == "model" else v for k, v in settings.items() if k in MODELS}
    defaults = {
        "objective": Objective(loss=LOSSES["decoupled"]),
        "aggregation": partial(AGGREGATIONS["token_mean"], longest=100),
        "learning_rate": 1e-4,
        "grad_clip": 0.5,
        "micro_batch_tokens": 128,
    }
    rest = {k: v for k, v in settings.items() if k not in MODELS}
    models = Models(policy=load(folder), mesh=mesh, device=CPU, **models)
    trainer = Trainer(models=models, group=group, **(defaults | rest))
    trainer.flops.peak = 1e9  # not measured: `mfu` times seconds is then exact
    return trainer


def on_mesh(folder: Path, num_replicas: int = 1, **settings: object) -> Trainer:
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    return make(folder, mesh, dist.group.WORLD, **settings)


def batch(step: int, part: slice = slice(None)) -> Packed:
    """12 rollouts, 1000 loss tokens: 100 in the first 2, 900 in the other 10; `part` of them.

    Groups of three that begin with 1, 2, 3, 4 tokens alike.
    """
    random = np.random.default_rng(step)
    rollouts = []
    for i, length in enumerate([70, 30, *[90] * 10]):
        group = i // 3
        one = Rollout(env="e", task_id=str(i), ticket=100 * step + i, group_id=group)
        one.append(np.random.default_rng([step, group]).integers(3, 60, 1 + group))
        one.append(random.integers(3, 60, i % 3))
        one.append(random.integers(3, 60, length), random.normal(-4, 0.3, length), np.full(length, step - i % 2))
        rollouts.append(one)
    return pack(rollouts[part], random.normal(size=12)[part].astype(np.float32))


def whole(trainer: Trainer) -> dict[str, np.ndarray]:
    """Weights and, beside them, the first moments: gradients without the division that turns noise into steps."""
    tensors = {}
    for name, parameter in trainer.model.named_parameters():
        tensors |= {name: parameter.detach(), name + " moment": trainer.optimizer.state[parameter]["exp_avg"]}
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.numpy().copy() for name, tensor in full.items()}


CAREFUL = {"learning_rate": 1e-6}  # AdamW turns noise near zero into a step of this size
VARYING = {"num_microbatches", "peak_s", "peak_memory_bytes", "padding_share"}
VARYING |= {"input_tokens", "shared_tokens"}  # their sum does not
UNEQUAL = [slice(0, 2), slice(2, 12)]  # 100 tokens and 900
FOUR = [slice(0, 2), slice(2, 7), slice(7, 12), slice(0, 0)]
HELD = Objective(loss=LOSSES["decoupled"], kl_coefficient=0.1, entropy_coefficient=0.01)
REJECTING = Objective(loss=LOSSES["gspo"], correction=Correction(reject="off_policy_negative", reject_above=0.15))
CASES = {  # name: number of ranks, of replicas, what each rank gets, settings
    "one rank": (1, 1, [slice(0, 12)], {}),
    "100 and 900 tokens": (2, 1, UNEQUAL, {}),
    "everything and nothing": (2, 1, [slice(0, 12), slice(0, 0)], {}),
    "two replicas": (2, 2, UNEQUAL, {}),
    "one micro-batch": (2, 1, UNEQUAL, {"micro_batch_tokens": 100_000}),
    "CPU offload": (2, 1, UNEQUAL, {"cpu_offload": True}),  # its code; where memory lies only a GPU can show
    "resharded after forward": (2, 1, UNEQUAL, {"reshard_after_forward": True}),
    "reference": (2, 1, UNEQUAL, {"reference": "model", "objective": HELD, "num_minibatches": 1, "num_epochs": 2}),
    "own critic": (2, 1, UNEQUAL, {"critic": "model", "credit": Credit()}),
    "shared critic": (2, 1, UNEQUAL, {"shared_critic": True, "credit": Credit()}),
    "sequence mean": (2, 1, UNEQUAL, {"aggregation": partial(AGGREGATIONS["sequence_mean"], longest=100)}),
    "rejection": (2, 1, UNEQUAL, {"objective": REJECTING}),
    "four ranks": (4, 1, FOUR, {}),
    "four ranks, two replicas": (4, 2, FOUR, {}),
    "activation checkpointing": (2, 1, UNEQUAL, {"activation_checkpointing": True}),
    "shared prompts": (2, 1, UNEQUAL, {"share_prefix": True}),
}


CUT = {  # name: minibatches, rollouts of the batch, settings
    "three minibatches": (3, 12, {"num_epochs": 2}),
    "five, not even": (5, 12, {"objective": Objective(loss=LOSSES["gspo"])}),
    "groups whole": (2, 12, {"share_prefix": True, "num_epochs": 2}),
    "fewer rollouts than ranks": (2, 3, {}),
    "own critic": (2, 12, {"critic": "model", "credit": Credit()}),
    "standardized over tokens": (2, 12, {"reference": "model", "penalty": 0.1}),
}


def cut(step: int, num_minibatches: int, num_rollouts: int, num_shares: int, whole_groups: bool) -> list[Packed]:
    """The batch in minibatches, then in shares."""
    packed = batch(step, slice(0, num_rollouts))
    packed.minibatch[:] = packing.minibatches(packed.group_id, num_minibatches, whole_groups=whole_groups)
    return packing.shares(packed, num_shares, width=128, share_prefix=whole_groups)


def replicas_of(case: str, num_ranks: int) -> set[int]:
    return {1, 2} if (case, num_ranks) == ("three minibatches", 4) else {1} if num_ranks > 1 else set()


def step_on_cut(trainer: Trainer, index: int, num_shares: int, case: str) -> tuple[list[Any], Any, Any]:
    """Tickets of this rank in each optimizer step, metrics, and what came of it."""
    num_minibatches, num_rollouts, settings = CUT[case]
    share = cut(0, num_minibatches, num_rollouts, num_shares, "share_prefix" in settings)[index]
    tickets = [[t for micro in m.micro_batches for t in micro.tickets] for m in trainer.cut(share)]
    return tickets, trainer.step(share, 0), whole(trainer)


LAYOUTS = {  # name: number of ranks, of replicas, what each rank gets
    "1": (1, 1, [slice(0, 12)]),
    "2": (2, 1, UNEQUAL),
    "2 replicas": (2, 2, UNEQUAL),
    "4": (4, 1, FOUR),
    "2 replicas of 2": (4, 2, FOUR),
}
RESUMED = [
    ("1", "2"),
    ("2", "1"),
    ("4", "2"),
    ("2", "4"),
    ("1", "2 replicas"),
    ("2 replicas of 2", "2"),
    ("4", "2 replicas of 2"),
    ("2 replicas", "1"),
]


def many(part: slice) -> Packed:
    """Some of 32 rollouts of 12 tokens."""
    random = np.random.default_rng(7)
    rollouts = []
    for i in range(32):
        one = Rollout(env="e", task_id=str(i), ticket=i)
        one.append(random.integers(3, 60, 3))
        one.append(random.integers(3, 60, 10), random.normal(-4, 0.3, 10), np.zeros(10))
        rollouts.append(one)
    return pack(rollouts[part], random.normal(size=32)[part].astype(np.float32))


def assert_equal(found: dict[str, float], expected: dict[str, float], num_ranks: int) -> None:
    """All metrics that do not depend on who computes what; `expected` is of one rank."""
    for name in expected.keys() - VARYING:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
    inputs = [metrics["input_tokens"] + metrics["shared_tokens"] for metrics in (found, expected)]
    assert inputs[0] == inputs[1]
    if not found["shared_tokens"]:  # as many operations were asked for
        assert found["peak_s"] * num_ranks == pytest.approx(expected["peak_s"], rel=1e-9)


def step_on_nan(rank: int, folder: Path) -> str:
    trainer = on_mesh(folder)
    share = batch(1, UNEQUAL[rank])
    if rank == 1:
        share.behavior_logprobs[len(share.token_ids) - 1] = np.nan  # ticket 111
    with pytest.raises(RuntimeError, match="non-finite loss") as caught:
        trainer.step(share, 1)
    return str(caught.value)


def score_between_steps(rank: int, folder: Path, target: Path) -> list[np.ndarray]:
    trainer = on_mesh(folder)
    scores = [trainer.score(PROBE)]
    for n in range(2):
        trainer.step(batch(n, UNEQUAL[rank]), n)
        scores.append(trainer.score(PROBE))
        assert all(isinstance(t, DTensor) for t in trainer.models.named_parameters().values())
    trainer.export(target, folder)
    assert (target / "model.safetensors").exists()
    return scores


def by_advantage(rows: Rows, limits: Limits) -> TokenLosses:
    """A token's loss is its advantage; it counts as clipped where that is above 1."""
    like = LOSSES["reinforce"](rows, limits)
    losses = rows.advantages + 0 * rows.current
    return dataclasses.replace(like, losses=losses, clipped=rows.advantages > 1)


def uniform(rank: int, parts: list[list[tuple[int, float]]]) -> Packed:
    """This rank's rollouts as (loss tokens, advantage)."""
    rollouts = []
    for i, (length, _) in enumerate(parts[rank]):
        one = Rollout(env="e", task_id=str(i), ticket=10 * rank + i)
        one.append(np.array([3, 4]))
        one.append(np.full(length, 5), np.full(length, -4.0), np.zeros(length))
        rollouts.append(one)
    return pack(rollouts, np.array([advantage for _, advantage in parts[rank]]))


def run_all(rank: int, folder: Path, target: Path, saved: Path) -> dict[Any, Any]:
    """All that one start of the ranks can show, by name; each test below reads its part."""
    found: dict[Any, Any] = {}
    num_ranks = dist.get_world_size()
    for name, (ranks, num_replicas, parts) in LAYOUTS.items():
        if ranks == num_ranks:
            trainer = on_mesh(folder, num_replicas, warmup_steps=4)
            trainer.step(batch(0, parts[rank]), 0)
            dcp.save(trainer.state_dict(), checkpoint_id=saved / name)
            found["saved", name] = whole(trainer), trainer.step(batch(1, parts[rank]), 1), whole(trainer)
    for case, (ranks, num_replicas, parts, settings) in CASES.items():
        if ranks == num_ranks:
            trainer = on_mesh(folder, num_replicas, **settings)
            found[case] = [trainer.step(batch(n, parts[rank]), n) for n in range(2)], whole(trainer)
    for case, (num_minibatches, _, settings) in CUT.items():
        for num_replicas in replicas_of(case, num_ranks):
            trainer = on_mesh(folder, num_replicas, **CAREFUL, num_minibatches=num_minibatches, **settings)
            found["cut", case, num_replicas] = step_on_cut(trainer, rank, num_ranks, case)
    found["micro-batches"] = {
        num: on_mesh(folder, micro_batch_tokens=12 * 32 // num).step(many(slice(rank, None, num_ranks)), 0)
        for num in (1, 4, 32)
    }
    if num_ranks == 2:
        trainer = on_mesh(folder, num_minibatches=3, num_epochs=2)
        thirds = batch(0, UNEQUAL[rank])
        thirds.minibatch[:] = np.arange(len(thirds)) % 3  # of the rank with two rollouts none is in the last
        found["minibatches"] = trainer.step(thirds, 0)
        found["one rollout"] = trainer.step(batch(1, [slice(0, 1), slice(0, 0)][rank]), 1)
        found["nothing"] = trainer.step(batch(0, slice(0, 0)), 2)
        plain = on_mesh(folder, objective=Objective(loss=by_advantage, correction=Correction(kind="none")))
        found["0.32"] = plain.step(uniform(rank, [[(100, 0.5)], [(90, 0.3)] * 10]), 0)
        found["0.375"] = plain.step(uniform(rank, [[(3, 2.0), (9, 1.0)], [(3, 2.0), (1, 1.0)]]), 1)
        found["nan"] = step_on_nan(rank, folder)
        found["scores"] = score_between_steps(rank, folder, target)
    return found


@pytest.fixture(scope="module")
def exported(folder: Path) -> Path:
    return folder.parent / "exported"


@pytest.fixture(scope="module")
def saved(folder: Path) -> Path:
    return folder.parent / "saved"


@pytest.fixture(scope="module")
def ran(folder: Path, exported: Path, saved: Path) -> dict[int, list[dict[Any, Any]]]:
    """By number of ranks, what each rank found."""
    return {num: run_ranks(run_all, num, folder, exported, saved, timeout_s=120) for num in (1, 2, 4)}


@pytest.mark.parametrize("case", CASES)
def test_sharded_equals_unsharded(folder: Path, ran: dict, case: str) -> None:
    layout = ("reshard_after_forward", "activation_checkpointing", "cpu_offload", "share_prefix")
    settings = {k: v for k, v in CASES[case][3].items() if k not in layout}
    reference = alone(folder, **(settings | {"micro_batch_tokens": 100_000}))
    expected, tensors = [reference.step(batch(n), n) for n in range(2)], whole(reference)
    found = [rank[case] for rank in ran[CASES[case][0]]]
    if case == "rejection":
        assert all(0 < metrics["rejected_share"] < 1 for metrics in expected)
    for steps, after in found:
        assert steps == found[0][0]
        for mine, theirs in zip(steps, expected, strict=True):
            assert_equal(mine, theirs, CASES[case][0])
            assert (mine["shared_tokens"] > 0) == ("share_prefix" in CASES[case][3])
        for name, tensor in tensors.items():
            atol = 1e-7 if name.endswith("moment") else 1e-5
            np.testing.assert_allclose(after[name], tensor, rtol=1e-5, atol=atol, err_msg=name)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("case", CUT)
def test_an_optimizer_step_is_the_same_on_one_rank_and_on_several(
    folder: Path, ran: dict, case: str, num_ranks: int
) -> None:
    num_minibatches, _, settings = CUT[case]
    reference = alone(folder, **CAREFUL, num_minibatches=num_minibatches, **settings)
    expected, metrics, tensors = step_on_cut(reference, 0, 1, case)
    for num_replicas in replicas_of(case, num_ranks):
        found = [rank["cut", case, num_replicas] for rank in ran[num_ranks]]
        for m, tickets in enumerate(expected):
            assert sorted(t for mine, *_ in found for t in mine[m]) == sorted(tickets)
        for _, mine, after in found:
            assert mine["optimizer_steps"] == metrics["optimizer_steps"]
            assert mine["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-6)
            for name in filter(lambda name: name.endswith("moment"), tensors):
                np.testing.assert_allclose(after[name], tensors[name], rtol=0, atol=1e-7, err_msg=name)


def test_minibatches_with_unequal_and_empty_shares_do_not_deadlock(ran: dict) -> None:
    first, second = ran[2]
    assert (first["minibatches"], first["one rollout"]) == (second["minibatches"], second["one rollout"])
    assert (first["minibatches"]["optimizer_steps"], first["minibatches"]["tokens"]) == (6, 1000)  # of both epochs once
    assert (first["one rollout"]["optimizer_steps"], first["one rollout"]["tokens"]) == (2, 70)  # 1 of 3


def test_100_tokens_at_half_and_900_at_three_tenths_on_two_ranks_are_0_32(ran: dict) -> None:
    for rank in ran[2]:
        assert rank["0.32"]["tokens"] == 1000
        assert rank["0.32"]["loss"] == pytest.approx(0.32, rel=1e-6)


def test_means_are_over_all_tokens_and_not_over_ranks(ran: dict) -> None:
    """3 of 12 on one rank and 3 of 4 on the other are 6 of 16."""
    assert [rank["0.375"]["clip_share"] for rank in ran[2]] == [0.375, 0.375]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 4, 32])
def test_gradient_norms_agree_over_ranks_and_micro_batches(
    folder: Path, ran: dict, num_ranks: int, num_micro_batches: int
) -> None:
    """32 rollouts of 12 tokens on one process against the same on ranks, each with this many micro-batches at most."""
    expected = alone(folder, micro_batch_tokens=100_000).step(many(slice(None)), 0)
    for rank in ran[num_ranks]:
        found = rank["micro-batches"][num_micro_batches]
        assert found["num_microbatches"] == max(1, num_micro_batches // num_ranks)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_one_token_is_padding_for_each_micro_batch_of_a_rank_without_work(ran: dict) -> None:
    for rank in ran[2]:
        metrics, _ = rank["everything and nothing"][0]
        num = metrics["num_microbatches"]
        assert metrics["padding_share"] == num / (metrics["input_tokens"] + num)


def test_nothing_anywhere_is_an_empty_step(ran: dict) -> None:
    for rank in ran[2]:
        metrics = rank["nothing"]
        assert (metrics["empty_steps"], metrics["loss"], metrics["tokens"]) == (1, 0, 0)


def test_every_rank_names_the_tickets_of_the_rank_with_the_nan(ran: dict) -> None:
    first, second = (rank["nan"] for rank in ran[2])
    assert first == second
    assert first.endswith("tickets [111]")


def test_scores_follow_the_steps_and_the_export_has_the_last_weights(folder: Path, exported: Path, ran: dict) -> None:
    reference = alone(folder)
    expected = [reference.score(PROBE)]
    for n in range(2):
        reference.step(batch(n), n)
        expected.append(reference.score(PROBE))
    for rank in ran[2]:
        np.testing.assert_allclose(rank["scores"], expected, rtol=0, atol=1e-4)
    assert np.abs(expected[2] - expected[0]).max() > 1e-2
    assert (alone(exported).score(PROBE) == ran[2][0]["scores"][2]).all()
    assert AutoModelForCausalLM.from_pretrained(exported).config.tie_word_embeddings


def resume(rank: int, folder: Path, saved: Path) -> dict[tuple[str, str], Any]:
    """By pair of layouts, what the second loads of the first's checkpoint, and its next step."""
    found = {}
    for before, after in RESUMED:
        num_ranks, num_replicas, parts = LAYOUTS[after]
        if num_ranks == dist.get_world_size():
            trainer = on_mesh(folder, num_replicas, warmup_steps=4)
            state = trainer.state_dict()
            dcp.load(dict(state), checkpoint_id=saved / before)  # tensors are filled in place
            trainer.load_state_dict(state)
            found[before, after] = whole(trainer), trainer.step(batch(1, parts[rank]), 1), whole(trainer)
    return found


@pytest.fixture(scope="module")
def resumed(folder: Path, saved: Path, ran: dict) -> list[dict[tuple[str, str], Any]]:
    return [rank for num in (1, 2, 4) for rank in run_ranks(resume, num, folder, saved, timeout_s=120)]


@pytest.mark.parametrize("pair", RESUMED, ids=" to ".join)
def test_checkpoint_goes_on_with_other_numbers_of_trainers(ran: dict, resumed: list, pair: tuple[str, str]) -> None:
    at_save, expected, after = ran[LAYOUTS[pair[0]][0]][0]["saved", pair[0]]
    found = [rank[pair] for rank in resumed if pair in rank]
    assert len(found) == LAYOUTS[pair[1]][0]
    for loaded, metrics, stepped in found:
        for name, tensor in at_save.items():  # weights and first moments, bit for bit
            np.testing.assert_array_equal(loaded[name], tensor, err_msg=name)
        assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
        assert metrics["learning_rate"] == expected["learning_rate"] == pytest.approx(1e-4 * 2 / 4)
        for name, tensor in after.items():
            atol = 1e-7 if name.endswith("moment") else 1e-5
            np.testing.assert_allclose(stepped[name], tensor, rtol=1e-5, atol=atol, err_msg=name)


def train_in_a_world(world, folder: Path) -> float | None:
    if world.mesh is None:
        return None
    trainer = make(folder, world.mesh, world.train)
    shards = {name: local(p) for name, p in trainer.models.named_parameters().items()}
    metrics = trainer.step(batch(0, UNEQUAL[world.trainer_ranks.index(world.rank)]), 0)
    now = {name: local(p) for name, p in trainer.models.named_parameters().items()}
    assert all(now[name].data_ptr() == shard.data_ptr() for name, shard in shards.items())
    return metrics["grad_norm"]


def test_trains_on_the_mesh_of_the_world_with_shards_that_stay_in_place(folder: Path) -> None:
    expected = alone(folder).step(batch(0), 0)["grad_norm"]
    _, *norms = run_worlds(train_in_a_world, 1, 2, folder)
    assert norms == pytest.approx([expected] * 2, rel=1e-5)
