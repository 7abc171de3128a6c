"""Models of experts on two ranks against one process without a mesh: real gloo, real FSDP2."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from spmd_rl.trainer.trainer import Trainer
from tests.multirank.test_trainer import CAREFUL, alone, batch, make, whole
from tests.ranks import run_ranks
from tests.unit import moe_models

UNEQUAL = [slice(0, 2), slice(2, 12)]
BALANCED = {"router_aux_coef": 0.5, "grad_clip": 1e9, **CAREFUL}
CASES = {  # name: what each rank gets, whether they share the tokens of each micro-batch, settings
    "sharded": (UNEQUAL, False, BALANCED),
    "everything and nothing": ([slice(0, 12), slice(0, 0)], False, BALANCED),
    "layers computed again": (UNEQUAL, False, BALANCED | {"activation_checkpointing": True}),
    "tokens of a micro-batch on both": ([slice(0, 12)] * 2, True, BALANCED),
    "without the routers' loss": (UNEQUAL, False, CAREFUL),
}
COMPARED = ("loss", "grad_norm", "weight_norm", "expert_load_max", "expert_dead_share", "input_tokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe_models.save("qwen3_moe", tmp_path_factory.mktemp("models") / "tiny")


def one_way(trainer: Trainer) -> Trainer:
    """Experts 0 and 1 alone are chosen in the first layer: 2 and 3, which are another rank's rows, have no token."""
    trainer.model.model.layers[0].mlp.experts.register_forward_pre_hook(
        lambda _, args: (args[0], torch.arange(2).expand_as(args[1]), args[2]), prepend=True
    )
    return trainer


def train(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    for case, (parts, together, settings) in CASES.items():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        context = dist.new_group([0, 1]) if together else None
        trainer = one_way(make(folder, mesh, dist.group.WORLD, context=context, **settings))
        metrics = [trainer.step(batch(n, parts[rank]), n) for n in range(2)]
        assert any(isinstance(p, DTensor) and p.ndim == 3 for p in trainer.model.parameters())
        found[case] = metrics, whole(trainer)
    return found


@pytest.fixture(scope="module")
def ran(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(train, 2, folder, timeout_s=120)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_one(folder: Path, ran: list[dict[str, Any]], case: str) -> None:
    trainer = one_way(alone(folder, **CASES[case][2]))
    for n, found in enumerate(ran[0][case][0]):
        expected = trainer.step(batch(n), n)
        assert found == pytest.approx(ran[1][case][0][n])
        for name in (*COMPARED, *(("router_loss",) if "router_aux_coef" in CASES[case][2] else ())):
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name
        assert expected["expert_dead_share"] >= 2 / 8 and expected["expert_load_max"] == 2
    for name, expected in whole(trainer).items():
        np.testing.assert_allclose(ran[0][case][1][name], expected, rtol=0, atol=5e-7, err_msg=name)
    moment = ran[0][case][1]["model.layers.0.mlp.experts.down_proj moment"]
    assert moment[:2].any() and not moment[2:].any()  # experts without a token have a gradient, of zeros
