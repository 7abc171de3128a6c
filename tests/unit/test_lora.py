import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spmd_rl.trainer.models import Models
from spmd_rl.weights.low_rank import Lora
from tests.unit.test_trainer import folder, load, shares, trainer  # noqa: F401 (folder is a fixture)

LORA = Lora(rank=4, alpha=8.0, targets=("q_proj", "down_proj"))
IDS = np.arange(3, 40, dtype=np.int32)


def test_it_starts_as_the_model_and_trains_only_the_additions(folder: Path) -> None:  # noqa: F811
    policy = trainer(folder, lora=LORA)
    plain = trainer(folder)
    assert (policy.score(IDS) == plain.score(IDS)).all()
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    policy.step(shares((4, 20), (4, 20)), 0)
    moved = {n for n, p in policy.model.named_parameters() if not torch.equal(before[n], p)}
    assert moved == {n for n in before if n.endswith("lora_b")}  # the gradient of A is 0 while B is
    policy.step(shares((4, 20), (4, 20)), 1)
    moved = {n for n, p in policy.model.named_parameters() if not torch.equal(before[n], p)}
    assert moved == {n for n in before if ".lora_" in n} and len(moved) == 8


def test_frozen_weights_cost_a_forward_and_half_a_backward(folder: Path) -> None:  # noqa: F811
    """Two layers: 4 · (128 + 128) values beside q_proj, 4 · (320 + 128) beside down_proj."""
    low, full = trainer(folder, lora=LORA).flops, trainer(folder).flops
    assert low.per_input == full.per_input * 2 / 3 + 6 * 2 * (4 * (128 + 128) + 4 * (320 + 128))
    assert (low.per_row, low.per_pair) == (full.per_row * 2 / 3, full.per_pair)


def test_first_gradient_of_b_is_that_of_the_full_weight_through_a(folder: Path) -> None:  # noqa: F811
    """y = W x + s B A x, so dL/dB = s (dL/dW) Aᵀ while B is 0."""
    low, full = trainer(folder, lora=LORA), trainer(folder)
    batch = shares((4, 20), (4, 20))
    low.step(batch, 0)
    full.step(batch, 0)
    name = "model.layers.1.mlp.down_proj"
    layer, weight = low.model.get_submodule(name), full.model.get_submodule(name).weight
    found = low.optimizer.state[layer.lora_b]["exp_avg"]
    expected = 2.0 * full.optimizer.state[weight]["exp_avg"] @ layer.lora_a.detach().T
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-7)


def test_what_is_sent_and_exported_is_merged(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    policy = trainer(folder, lora=LORA)
    names = list(trainer(folder).models.named_parameters())
    policy.models.refresh()
    sent = policy.models.named_parameters()
    assert list(sent) == names
    for n in range(3):
        policy.step(shares((4, 20), (4, 20)), n)
    policy.models.refresh()
    assert all(policy.models.named_parameters()[n].data_ptr() == t.data_ptr() for n, t in sent.items())
    assert list(policy.models.frozen()) == names
    assert all(torch.equal(p, load(folder).state_dict()[n]) for n, p in policy.models.frozen().items())
    policy.export(tmp_path / "model", folder)
    merged = trainer(tmp_path / "model")
    np.testing.assert_allclose(merged.score(IDS), policy.score(IDS), rtol=0, atol=1e-5)
    assert np.abs(trainer(folder).score(IDS) - policy.score(IDS)).max() > 1e-2


def test_adapter_folder_is_in_the_form_of_peft(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    policy = trainer(folder, lora=LORA)
    policy.step(shares((4, 20), (4, 20)), 0)
    for _ in range(2):
        policy.export_adapter(tmp_path / "adapter", folder)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert (config["target_modules"], config["task_type"]) == (["down_proj", "q_proj"], "CAUSAL_LM")
    assert Path(config["base_model_name_or_path"]) == folder.absolute()
    state = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(state) == 8
    name = "model.layers.1.self_attn.q_proj"
    a, b = (state[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    assert (a.shape, b.shape) == ((4, 128), (128, 4))
    policy.models.refresh()
    expected = load(folder).get_submodule(name).weight.detach() + 2.0 * b @ a
    torch.testing.assert_close(policy.models.named_parameters()[f"{name}.weight"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about what peft calls
def test_peft_computes_with_the_adapter_what_the_merged_model_computes(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    peft = pytest.importorskip("peft", reason="peft (with accelerate) is not installed: its own reading is not tested")
    policy = trainer(folder, lora=LORA)
    for n in range(3):
        policy.step(shares((4, 20), (4, 20)), n)
    policy.export(tmp_path / "model", folder)
    policy.export_adapter(tmp_path / "adapter", folder)
    ours, plain = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (tmp_path / "model", folder))
    ids = torch.from_numpy(IDS).long()[None]
    with torch.no_grad():
        expected, before = ours(ids).logits, plain(ids).logits
        theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(ids).logits
    torch.testing.assert_close(theirs, expected, rtol=0, atol=1e-5)
    assert (before - expected).abs().max() > 1e-2


def test_only_the_additions_are_optimized_and_saved_and_go_on(folder: Path) -> None:  # noqa: F811
    straight, other = trainer(folder, lora=LORA), trainer(folder, lora=LORA)
    batch = shares((4, 20), (4, 20))
    straight.step(batch, 0)
    state = straight.state_dict()
    additions = 4 * (128 + 128 + 320 + 128) * 2  # rank 4, in and out of q_proj and down_proj, 2 layers
    assert sum(tensor.numel() for tensor in state["model"].values()) == additions
    assert sum(moments["exp_avg"].numel() for moments in state["optimizer"].values()) == additions
    other.load_state_dict(state)
    assert straight.step(batch, 1)["loss"] == other.step(batch, 1)["loss"]


def test_additions_are_put_beside_no_other_model(folder: Path) -> None:  # noqa: F811
    state = trainer(folder, lora=LORA).state_dict()
    other = load(folder)
    other.model.norm.weight.data[5] += 1e-3
    models = Models(policy=other, lora=LORA, mesh=None, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"LoRA was trained beside a model of norm .*, model\.path is one of "):
        models.load_state_dict(state)


@pytest.mark.parametrize("target", ["wq", "q", "embed_tokens", "lm_head", "self_attn.q_proj"])
def test_targets_that_are_no_linear_layer_of_the_body_are_refused_by_name(folder: Path, target: str) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=rf"\['{target}'\]: no such linear layers; the model has down_proj, .*q_proj"):
        trainer(folder, lora=Lora(rank=4, alpha=8.0, targets=(target, "q_proj")))
