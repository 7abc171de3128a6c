"""Models of experts in training: the loss that spreads tokens over them, their load, what a step costs, LoRA."""

import dataclasses
import importlib
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmd_rl.config.settings import Lora as Settings
from spmd_rl.objective.objective import Objective
from spmd_rl.packing.packing import Packed
from spmd_rl.trainer.experts import check_router_loss
from spmd_rl.trainer.flops import Flops
from spmd_rl.trainer.lora import check_targets
from spmd_rl.weights.low_rank import Lora
from tests.unit import moe_models
from tests.unit.test_trainer import CPU, load, made_up, on_policy, shares, trainer

COEFFICIENT = 0.3
LENGTHS = ((4, 20), (9, 31), (3, 12), (6, 40), (5, 5))
NO_LOSS = made_up(lambda rows: 0 * rows.current)  # gradients are those of the routers' loss alone


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("qwen3_moe", "mixtral", "olmoe", "granitemoe", "deepseek_v3")
    return {name: moe_models.save(name, tmp_path_factory.mktemp(name)) for name in names}


def plain(folder: Path, batch: Packed) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
    """Transformers' model, and the logits of each layer's router over each sequence by itself, without its last token,
    which no loss token depends on."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    seen = []
    for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        ids = torch.from_numpy(batch.token_ids[a : b - 1]).long()[None]
        said = model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits
        if said is None:
            pytest.skip(f"this transformers does not give the router's logits of {model.config.model_type}")
        seen.append(said)
    return model, tuple(torch.cat(layer) for layer in zip(*seen, strict=True))


def balancing_loss(model: torch.nn.Module, logits: tuple[Tensor, ...]) -> Tensor:
    """By transformers' own function for the architecture."""
    module = importlib.import_module(type(model).__module__)
    return module.load_balancing_loss_func(logits, logits[0].shape[-1], model.config.num_experts_per_tok)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe", "granitemoe"])
def test_the_routers_loss_and_its_gradients_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    """Over all tokens of a step, cut into several forwards, whose layers are computed again for the backward."""
    batch = shares(*LENGTHS)
    model, logits = plain(folders[name], batch)
    expected = balancing_loss(model, logits)
    expected.backward()
    ours = trainer(
        folders[name],
        objective=NO_LOSS,
        router_aux_coef=COEFFICIENT,
        micro_batch_tokens=50,
        activation_checkpointing=True,
    )
    metrics = ours.step(batch, 0)
    assert metrics["num_microbatches"] >= 3
    assert metrics["router_loss"] == pytest.approx(expected.item(), rel=1e-6)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any("gate" in name or "router" in name for name in gradients)
    for key, parameter in ours.model.named_parameters():
        found = ours.optimizer.state[parameter]["exp_avg"] / (1 - 0.9)
        wanted = COEFFICIENT * gradients[key] if key in gradients else torch.zeros_like(found)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-8, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("settings", [{}, {"num_minibatches": 2}, {"reject": True}])
def test_the_routers_loss_is_added_once_however_a_batch_is_cut(folders: dict[str, Path], settings: dict) -> None:
    """Its weight beside the objective does not depend on the objective's denominator, which rejection changes."""
    correction = Objective(loss=NO_LOSS.loss).correction
    if settings.pop("reject", False):
        correction = dataclasses.replace(correction, reject="off_policy", reject_above=0.05)
    objective = dataclasses.replace(NO_LOSS, correction=correction)
    make = partial(trainer, folders["qwen3_moe"], objective=objective, router_aux_coef=COEFFICIENT, **settings)
    whole, cut = make(micro_batch_tokens=10**6), make(micro_batch_tokens=50)
    batch = on_policy(whole, shares(*LENGTHS))
    batch.behavior_logprobs[batch.cu_seqlens[1] : batch.cu_seqlens[2]] += 1  # the second rollout is far off
    batch.minibatch[:] = np.arange(len(LENGTHS)) % settings.get("num_minibatches", 1)
    one, other = (policy.step(batch, 0) for policy in (whole, cut))
    assert one["optimizer_steps"] == settings.get("num_minibatches", 1)
    assert (one["rejected_share"] > 0) == (correction.reject != "none")
    assert one["num_microbatches"] < other["num_microbatches"]
    for key in ("router_loss", "grad_norm", "expert_load_max", "expert_dead_share", "rejected_share"):
        assert one[key] == pytest.approx(other[key], rel=1e-5), key
    if "num_minibatches" not in settings:
        kept = trainer(folders["qwen3_moe"], objective=NO_LOSS, router_aux_coef=COEFFICIENT).step(batch, 0)
        assert one["grad_norm"] == pytest.approx(kept["grad_norm"], rel=1e-5)


def test_the_routers_loss_is_added_to_the_objective(folders: dict[str, Path]) -> None:
    """First moments add up."""
    settings = [{}, {"objective": NO_LOSS, "router_aux_coef": COEFFICIENT}, {"router_aux_coef": COEFFICIENT}]
    alone, routers, both = (trainer(folders["mixtral"], **some) for some in settings)
    for policy in (alone, routers, both):
        policy.step(shares(*LENGTHS), 0)
    moments = [[p.optimizer.state[w]["exp_avg"] for w in p.model.parameters()] for p in (alone, routers, both)]
    for one, other, total in zip(*moments, strict=True):
        torch.testing.assert_close(total, one + other, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_load_is_what_the_routers_chose_and_is_there_without_their_loss(folders: dict[str, Path], name: str) -> None:
    """The bias of DeepSeek's router takes part in its choice."""
    batch, chosen = shares(*LENGTHS), {}
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32).eval()
    for layer, module in model.named_modules():
        if layer.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, args, layer=layer: chosen.setdefault(layer, []).append(args[1]))
    for a, b in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
        model(input_ids=torch.from_numpy(batch.token_ids[a : b - 1]).long()[None], use_cache=False)
    num = model.config.num_experts if name == "qwen3_moe" else model.config.n_routed_experts
    load = torch.stack([torch.bincount(torch.cat(of).flatten(), minlength=num) for of in chosen.values()]).double()
    assert load.sum() == len(chosen) * 2 * (sum(a + b for a, b in LENGTHS) - len(LENGTHS))
    metrics = trainer(folders[name], micro_batch_tokens=50).step(batch, 0)
    assert metrics["expert_load_max"] == pytest.approx((load / load.mean(1, keepdim=True)).max().item())
    assert metrics["expert_dead_share"] == (load == 0).double().mean()
    assert "router_loss" not in metrics


def test_load_of_one_expert_alone(folders: dict[str, Path]) -> None:
    policy = trainer(folders["qwen3_moe"])
    for experts in policy.routing.experts:  # every token to the last one, twice
        experts.register_forward_pre_hook(lambda _, args: (args[0], args[1] * 0 + 3, args[2]), prepend=True)
    metrics = policy.step(shares(*LENGTHS), 0)
    assert (metrics["expert_load_max"], metrics["expert_dead_share"]) == (4.0, 0.75)


def test_a_dense_model_has_no_load_and_no_loss_of_routers(tmp_path: Path) -> None:
    from spmd_rl.demo import tiny_model

    tiny_model.make(tmp_path / "dense")
    assert not {"expert_load_max", "expert_dead_share"} & trainer(tmp_path / "dense").step(shares((3, 8)), 0).keys()
    with pytest.raises(ValueError, match=r"trainer\.router_aux_coef: .* no router loss for qwen3: set it to 0"):
        check_router_loss(load(tmp_path / "dense"))


ATTENTION = 2 * 32 * 64 + 2 * 32 * 32  # q, o of 4 heads of 16; k, v of 2
BY_HAND = {  # weights that a token is multiplied by, in both layers; biases and norms count as weights
    # two of four experts of 24, their router
    "qwen3_moe": 2 * (ATTENTION + 2 * 3 * 24 * 32 + 4 * 32 + 2 * 32 + 2 * 16),
    # two of four experts of 48
    "mixtral": 2 * (2 * 32 * 32 + 2 * 32 * 16 + 2 * 3 * 48 * 32 + 4 * 32 + 2 * 32),
    # latent attention: q 32 → 24 → 4·16, kv 32 → 16 + 8 and 16 → 4·16, o 4·8 → 32; two norms inside; a dense layer of
    # 48, then two of eight experts of 24, a shared one of 24, the router
    "deepseek_v3": 2 * (32 * 24 + 24 * 64 + 32 * 24 + 16 * 64 + 32 * 32 + 24 + 16 + 2 * 32)
    + 3 * 48 * 32
    + (2 + 1) * 3 * 24 * 32
    + 8 * 32,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_experts_cost_what_a_token_goes_through(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(moe_models.CONFIGS[name])
    assert Flops(model, CPU, torch.float32).per_input == 6 * BY_HAND[name]


def test_default_targets_of_lora_are_the_attention_of_a_model_of_experts(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    lora = Lora(rank=4, alpha=8.0, targets=Settings().targets)
    policy = trainer(folders["qwen3_moe"], lora=lora)
    trained = {name.split(".")[-2] for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "k_proj", "v_proj", "o_proj"}
    for n in range(2):
        policy.step(shares(*LENGTHS), n)
    policy.export(tmp_path / "model", folders["qwen3_moe"])
    policy.export_adapter(tmp_path / "adapter", folders["qwen3_moe"])
    ids = np.arange(3, 40, dtype=np.int32)
    np.testing.assert_allclose(trainer(tmp_path / "model").score(ids), policy.score(ids), rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_targets_that_experts_have_are_refused_with_what_there_is(folders: dict[str, Path], tmp_path: Path) -> None:
    said = r"\['down_proj'\]: no such linear layers; the model has k_proj, o_proj, q_proj, v_proj; experts "
    with pytest.raises(ValueError, match=said + r"\(down_proj, gate_up_proj\) are no linear layers"):
        check_targets(load(folders["mixtral"]), ("q_proj", "down_proj"))
    with torch.device("meta"):
        latent = AutoModelForCausalLM.from_config(moe_models.CONFIGS["deepseek_v3"])
    with pytest.raises(ValueError, match=r"\['k_proj', 'q_proj', 'v_proj'\]: .* has .*kv_b_proj, o_proj, q_a_proj"):
        check_targets(latent, Settings().targets)
    check_targets(latent, ("q_a_proj", "q_b_proj", "kv_b_proj", "o_proj", "down_proj"))


def test_a_router_that_is_a_linear_layer_is_no_target() -> None:
    """Phimoe's: its forward does more."""
    from transformers import PhimoeConfig

    config = PhimoeConfig(**moe_models.SHAPE, num_local_experts=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"\['router'\]: no such linear layers"):
        check_targets(model, ("q_proj", "router"))


def test_sampled_and_packed_scores_are_those_of_transformers(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        ids = np.random.default_rng(0).integers(3, 60, 50).astype(np.int32)
        with torch.no_grad():
            logprobs = model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0].numpy()
        np.testing.assert_allclose(trainer(folder).score(ids)[1:], expected, rtol=0, atol=1e-4)
