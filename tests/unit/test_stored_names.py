"""What is exported has the names of the folder that it came from, experts one by one where they lie so there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig, Qwen3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from spmd_rl.behavior.shrink import shrunk
from spmd_rl.files.model_files import stored_tensors
from spmd_rl.model.causal_lm import build, is_multimodal
from spmd_rl.model.stored_names import StoredNames, original_names
from spmd_rl.trainer.hf_folder import export
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.weights.disk import FILE
from tests.disk_versions import by_disk
from tests.unit import moe_models
from tests.unit.moe_models import SHAPE

CPU = torch.device("cpu")
TRAINED = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "granitemoe", "deepseek_v3")


def exported(folder: Path, to: Path) -> dict[str, Tensor]:
    model = build(folder, device=CPU, dtype=torch.float32, weights=True)
    weights = Models(policy=model, mesh=None, device=CPU).named_parameters()
    export(weights, TrainerRanks(group=None, device=CPU), folder=to, source=folder, dtypes=None)
    return load_file(to / "model.safetensors")


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", TRAINED)
def test_an_export_of_untrained_weights_is_its_source_to_the_bit(name: str, original: bool, tmp_path: Path) -> None:
    folder = moe_models.save(name, tmp_path / "source", original=original)
    source = load_file(folder / "model.safetensors")
    assert name == "granitemoe" or any(".experts.0." in key for key in source) == original  # its experts are one tensor
    assert equal(exported(folder, tmp_path / "model"), source)
    assert equal(exported(tmp_path / "model", tmp_path / "again"), source)


def test_renamed_and_prefixed_and_tied_folders_keep_their_names(tmp_path: Path) -> None:
    neox = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
    configs = {"gpt_neox": GPTNeoXConfig(**neox), "tied": Qwen3Config(**(SHAPE | {"tie_word_embeddings": True}))}
    for name, config in configs.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    tied = load_file(tmp_path / "tied/model.safetensors")
    forms = {
        "gpt_neox": load_file(tmp_path / "gpt_neox/model.safetensors"),
        "tied": tied,
        "base": {key.removeprefix("model."): tensor for key, tensor in tied.items()},
        "head": {key.replace("model.embed_tokens", "lm_head"): tensor for key, tensor in tied.items()},
    }
    for form, tensors in forms.items():
        folder = tmp_path / form
        if form not in configs:
            folder.mkdir()
            (folder / "config.json").write_text((tmp_path / "tied/config.json").read_text())
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        assert equal(exported(folder, tmp_path / f"{form}_exported"), tensors), form


def test_shards_and_what_the_architecture_does_not_read_are_exported(tmp_path: Path) -> None:
    """DeepSeek-V3's last layer in a published folder predicts several tokens, and transformers does not read it."""
    folder = moe_models.save("deepseek_v3", tmp_path / "source")
    tensors = load_file(folder / FILE)
    beyond = {n.replace("layers.1.", "layers.61."): t.bfloat16() for n, t in tensors.items() if "layers.1." in n}
    assert any(".experts.7." in name for name in beyond)
    (folder / FILE).unlink()
    save_file(tensors, folder / "one.safetensors", {"format": "pt"})
    save_file(beyond, folder / "two.safetensors", {"format": "pt"})
    shards = dict.fromkeys(tensors, "one.safetensors") | dict.fromkeys(beyond, "two.safetensors")
    (folder / f"{FILE}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    made = exported(folder, tmp_path / "model")
    assert (
        equal(made, tensors | beyond) and made["model.layers.61.mlp.experts.7.up_proj.weight"].dtype == torch.bfloat16
    )
    assert equal(exported(tmp_path / "model", tmp_path / "again"), made)


def test_a_reader_that_knows_experts_one_by_one_computes_from_the_export_what_the_model_computes(
    tmp_path: Path,
) -> None:
    """By the names of Qwen3-MoE's published folders and the formula of its router."""
    folder = moe_models.save("qwen3_moe", tmp_path / "source")
    exported(folder, tmp_path / "model")
    x = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))
    with safe_open(tmp_path / "model/model.safetensors", "pt") as file:
        weight = lambda name: file.get_tensor(f"model.layers.1.mlp.{name}.weight")  # noqa: E731
        scores, chosen = (x @ weight("gate").T).softmax(-1).topk(2)
        expected = torch.zeros_like(x)
        for i, (share, experts) in enumerate(zip(scores / scores.sum(-1, keepdim=True), chosen, strict=True)):
            for s, e in zip(share, experts.tolist(), strict=True):
                gate, up = (weight(f"experts.{e}.{part}") @ x[i] for part in ("gate_proj", "up_proj"))
                expected[i] += s * (weight(f"experts.{e}.down_proj") @ (F.silu(gate) * up))
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(plain.model.layers[1].mlp(x[None])[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_the_names_of_an_architecture_need_no_folder(name: str, tmp_path: Path) -> None:
    published = moe_models.save(name, tmp_path / "published")
    folder = moe_models.save(name, tmp_path / "source", original=False)
    loaded = build(folder, device=CPU, dtype=torch.float32, weights=True)
    bare = build(folder, device=CPU, dtype=torch.float32, weights=False)
    named = dict(original_names(bare, ((n, p.detach()) for n, p in loaded.named_parameters())))
    assert equal(named, load_file(published / "model.safetensors"))


@pytest.mark.parametrize("original", [True, False])
def test_folders_of_versions_have_the_names_of_the_source_and_engines_get_those_of_the_model(
    original: bool, tmp_path: Path
) -> None:
    folder = moe_models.save("mixtral", tmp_path / "source", original=original)
    model = build(folder, device=CPU, dtype=torch.float32, weights=True)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with by_disk(tmp_path, folder, parameters, dict.fromkeys(parameters, torch.bfloat16)) as versions:
        versions.publish(0)
        assert load_file(tmp_path / "step_0" / FILE).keys() == stored_tensors(folder).keys()
        assert equal(dict(versions.take(0).tensors), {n: t.to(torch.bfloat16) for n, t in parameters.items()})
        next(p for p in parameters.values() if p.ndim == 3)[1, 2, 3] += 3
        versions.publish(1)
        assert versions.take(1).version == 1
    assert versions.reports[1].update_norm == pytest.approx(3, rel=1e-2)  # in bfloat16


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of architectures
@pytest.mark.parametrize("original", [True, False])
def test_every_family_goes_there_and_back(original: bool, tmp_path: Path) -> None:
    """All causal LMs of the installed transformers that are made small, but those that name what is in no folder."""
    num, wrong = 0, {}
    for config in MODEL_FOR_CAUSAL_LM_MAPPING:
        folder = tmp_path / config.model_type
        try:
            model = AutoModelForCausalLM.from_config(shrunk(config()))
            model.save_pretrained(folder, save_original_format=original)
        except Exception:  # whatever an architecture trips over
            continue
        try:
            names = StoredNames(folder)
        except ValueError:  # refused at a start
            continue
        stored = load_file(folder / FILE)
        back = names.loaded(stored)
        made = dict(names.of((name, tensor.contiguous()) for name, tensor in back.items())) | dict(names.rest())
        weights = {name: t for name, t in model.state_dict().items() if name not in model.all_tied_weights_keys}
        weights = back if is_multimodal(folder) else weights  # of which a part alone is trained
        num += 1
        if not (equal(made, stored) and equal(back, weights)):
            wrong[config.model_type] = sorted(made.keys() ^ stored.keys())[:3], sorted(back.keys() ^ weights.keys())[:3]
        shutil.rmtree(folder)
    assert not wrong
    assert num >= 150
