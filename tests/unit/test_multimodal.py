"""Multimodal folders: the text part is trained, and the rest is exported to the bit, so that the whole loads again."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from spmd_rl import config
from spmd_rl.engine.native import NativeEngine
from spmd_rl.model.causal_lm import build, check_weights, head, hidden_states, packs, text_layers
from spmd_rl.model.logprobs import token_logprobs
from spmd_rl.model.stored_names import StoredNames
from spmd_rl.ranks.build_trainer import check_model
from spmd_rl.trainer.hf_folder import export, export_adapter
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.ranks import TrainerRanks
from spmd_rl.types import Sampling
from spmd_rl.weights.layout import weights_of
from spmd_rl.weights.low_rank import Lora
from tests.disk_versions import by_disk
from tests.unit.families import SHAPE, expected_logprobs, prompt_of

CPU = torch.device("cpu")
ALONE = TrainerRanks(group=None, device=CPU)
TEXT = SHAPE | {"pad_token_id": 0}
ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
VISION = dict(
    hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
QWEN_VISION = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32)
LINEAR = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)


def whole(kind: str, text: dict, vision: dict, **others: object) -> PretrainedConfig:
    return AutoConfig.for_model(kind, text_config=TEXT | text, vision_config=vision, **others)


CONFIGS: dict[str, PretrainedConfig] = {
    "gemma3": whole(
        "gemma3", dict(head_dim=8, sliding_window=7, query_pre_attn_scalar=8), VISION, mm_tokens_per_image=4
    ),
    "mistral3": whole(
        "mistral3", dict(model_type="mistral", head_dim=8), VISION | dict(model_type="pixtral", head_dim=16)
    ),
    "qwen2_5_vl": whole("qwen2_5_vl", dict(rope_parameters=ROPE), QWEN_VISION | dict(fullatt_block_indexes=[0])),
    "qwen3_vl": whole(
        "qwen3_vl",
        dict(head_dim=8, rope_parameters=ROPE | dict(mrope_interleaved=True)),
        QWEN_VISION | dict(depth=2, deepstack_visual_indexes=[0]),
    ),
    "qwen3_5": whole(
        "qwen3_5",
        dict(head_dim=8, layer_types=["linear_attention", "linear_attention", "full_attention"], **LINEAR),
        QWEN_VISION,
    ),
    "llava": whole("llava", dict(model_type="llama"), VISION | dict(model_type="clip_vision_model", projection_dim=32)),
}


FAST = ("gemma3", "qwen2_5_vl")


@pytest.fixture(params=[pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in CONFIGS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A random model in a folder, in bfloat16 as most are."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[request.param])
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path) -> PreTrainedModel:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def test_log_probs_and_gradients_are_those_of_the_whole_model(folder: Path) -> None:
    plain, model = load(folder), build(folder, device=CPU, dtype=torch.float32, weights=True)
    tokens = torch.from_numpy(prompt_of(40)).long()
    cuts = [0, 15, 39] if packs(model) else [0, 39]
    logprobs, _ = token_logprobs(hidden_states(model, tokens[:-1], cuts), head(model), tokens[1:])
    parts = [plain(input_ids=tokens[None, a:b], use_cache=False).logits[0] for a, b in pairwise(cuts)]
    expected = torch.cat(parts).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)
    logprobs.sum().backward()
    expected.sum().backward()
    theirs, inside = dict(plain.named_parameters()), text_layers(folder)
    for name, mine in model.named_parameters():
        other = theirs[inside + name.removeprefix("model.") if name.startswith("model.") else name]
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_an_engine_samples_from_the_whole_model(folder: Path) -> None:
    plain = load(folder)
    trained = build(folder, device=CPU, dtype=torch.float32, weights=True)
    empty = build(folder, device=CPU, dtype=torch.float32, weights=False)
    engine, prompt = NativeEngine(model=empty, device=CPU, max_seq_len=64), prompt_of(9)
    engine.load_weights(weights_of(trained), 0)
    engine.submit(0, prompt, Sampling(max_tokens=15, seed=3))
    done = []
    while not done:
        done = engine.step()
    got = done[0][1]
    np.testing.assert_allclose(got.logprobs, expected_logprobs(plain, prompt, got.token_ids), atol=1e-4)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_exported_loads_again_with_the_rest_to_the_bit(
    folder: Path, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    models = Models(policy=build(folder, device=CPU, dtype=torch.float32, weights=True), mesh=None, device=CPU)
    with torch.no_grad():
        for parameter in models.model.parameters():
            parameter.mul_(1.5)
    dtypes = None if dtype is None else models.dtypes(dtype)
    out = tmp_path / "out"
    export(models.named_parameters(), ALONE, folder=out, source=folder, dtypes=dtypes)
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    rest = {name for name in before if "vis" in name or "multi_modal" in name}
    assert rest and all(torch.equal(before[name], after[name]) and after[name].dtype == torch.bfloat16 for name in rest)
    tokens = torch.from_numpy(prompt_of(30)).long()
    with torch.no_grad():
        again = load(out)
        theirs = again(input_ids=tokens[None], use_cache=False).logits[0]
        if dtype is None:
            ours = head(models.model).logits(hidden_states(models.model, tokens, [0, 30]))
            torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), rtol=1e-4, atol=1e-4)
    assert type(again) is type(load(folder))
    check_weights(out)
    told = StoredNames(out).loaded(after)
    assert told.keys() == weights_of(models.model).keys()


def test_versions_by_disk_reach_engines_without_the_rest(folder: Path, tmp_path: Path) -> None:
    models = Models(policy=build(folder, device=CPU, dtype=torch.float32, weights=True), mesh=None, device=CPU)
    dtypes = models.dtypes(torch.bfloat16)
    with by_disk(tmp_path, folder, models.named_parameters(), dtypes) as versions:
        for version in range(2):
            versions.publish(version)
            got = versions.take(version).tensors
            assert {name: t.dtype for name, t in got.items()} == {n: dtypes[n] for n in weights_of(models.model)}
            for name, tensor in weights_of(models.model).items():
                assert torch.equal(got[name], tensor.detach().to(dtypes[name])), name
            with torch.no_grad():
                next(models.model.parameters()).add_(1.0)


def test_an_adapter_names_the_layers_of_the_text_part(folder: Path, tmp_path: Path) -> None:
    lora = Lora(rank=2, alpha=4.0, targets=("q_proj", "up_proj"))
    policy = build(folder, device=CPU, dtype=torch.float32, weights=True)
    models = Models(policy=policy, lora=lora, mesh=None, device=CPU)
    export_adapter(models.additions(), ALONE, folder=tmp_path / "adapter", lora=lora, base=folder)
    layers = {name for name, module in load(folder).named_modules() if isinstance(module, torch.nn.Linear)}
    made = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    named = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in made}
    assert named <= layers and len(named) == len(made) // 2
    pattern = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert {name for name in layers if re.fullmatch(pattern, name)} == named


def test_vllm_is_refused_for_a_multimodal_folder(folder: Path) -> None:
    path = Path(__file__).parents[2] / "configs" / "tiny_cpu.toml"
    loaded = config.load(path, [f"model.path={folder}", "inference.engine=vllm"])
    with pytest.raises(ValueError, match=r"multimodal folder, of which the text part alone is trained; use 'native'"):
        check_model(loaded)


@pytest.mark.parametrize("kind", ["glm4v", "granite4_vision", "ernie4_5_vl_moe"])
def test_a_text_part_that_is_no_causal_lm_is_refused(kind: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}: {kind}: its text part \(.*\) is no causal LM of transformers$"):
        build(tmp_path, device=CPU, dtype=torch.float32, weights=False)


def test_a_folder_without_its_text_part_is_refused(tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_config(CONFIGS["mistral3"])
    model.save_pretrained(tmp_path, state_dict={n: t for n, t in model.state_dict().items() if "language" not in n})
    with pytest.raises(ValueError, match=r"no tensor of the folder is named …embed_tokens.weight, as the embedding"):
        check_weights(tmp_path)
