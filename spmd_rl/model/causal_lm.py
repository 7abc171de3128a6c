"""A `transformers` causal LM from a local folder, whose attention layers call ours.

Given a folder with a config.json (and safetensors), `build` returns the ordinary module of that architecture.
Knows nothing of ranks or engines.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils.loading_report import LoadStateDictInfo
from transformers.utils.logging import disable_progress_bar

from spmd_rl.files import tensor_file
from spmd_rl.files.model_files import FLOATS, INDEX, SINGLE, Stored, stored_tensors
from spmd_rl.model.attention import ATTENTION, Attend, ByRow, Segments, attending, token_positions
from spmd_rl.model.logit_form import logit_form
from spmd_rl.model.logprobs import Head
from spmd_rl.model.parts import body, decoder_layers
from spmd_rl.model.text_part import TextNames, text_config, text_names, text_prefix

STATES = {"linear_attention", "conv", "mamba", "mamba2", "recurrent"}  # kinds of layers without attention
CARRIES = STATES | {"hybrid", "hybrid_sliding"}  # and with both
OTHER_LAYERS = {"moe", "mlp"}  # with neither
_FORM = "form_of_logits"  # where it is kept with a model
_PIECE = 16 << 20  # bytes compared at a time
LONGEST = 300  # characters of another library's error


def load_config(folder: str | Path) -> PretrainedConfig:
    """The architecture in a local folder, of a multimodal model its text part's.

    Refuses by name what our attention would compute wrongly.
    """
    config = _whole_config(folder)
    try:
        text = text_config(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    refused = {
        "use_bidirectional_attention": bool(getattr(text, "use_bidirectional_attention", False)),
        "quantization_config": any(getattr(c, "quantization_config", None) is not None for c in (config, text)),
        "is_encoder_decoder": bool(config.is_encoder_decoder),
    }
    for name, is_set in refused.items():
        if is_set:
            value = getattr(text, name, None) or getattr(config, name)
            raise ValueError(f"{folder}: config.{name} = {value!r} is not supported")
    return text


def _whole_config(folder: str | Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return config
    except Exception as error:  # whatever a config of that name trips over
        raise ValueError(f"{folder}: no model folder: {_one_line(error)}") from error


def is_multimodal(folder: str | Path) -> bool:
    """Whether the folder holds more than the causal LM that `build` makes of it."""
    config = _whole_config(folder)
    return text_config(config) is not config


def text_layers(folder: str | Path) -> str:
    """What names of the text part's layers begin with in the whole model of a multimodal folder, with a dot."""
    return text_prefix(_whole_config(folder))


def stored_weights(folder: str | Path, model: PreTrainedModel) -> tuple[dict[str, Stored], TextNames | None]:
    """What the folder stores of `model`, which is made of its config; of a text part by the names of one alone."""
    stored = stored_tensors(Path(folder))
    if not is_multimodal(folder):
        return stored, None
    try:
        names = text_names(stored, model)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return {text: stored[name] for name, text in names.text.items()}, names


def hidden_size(folder: str | Path) -> int:
    """Width of the model in a folder."""
    width: int = load_config(folder).get_text_config().hidden_size
    return width


def vocab_size(folder: str | Path) -> int:
    """Token ids that the model in a folder has an embedding of: 0 to one less."""
    size: int = load_config(folder).get_text_config().vocab_size
    return size


def has_experts(folder: str | Path) -> bool:
    """Whether layers of the model route each token to some of several experts."""
    text = load_config(folder).get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)


def kv_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Layers with attention, key heads, width of a head (the wider one where keys and values differ)."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    layers = sum(kind not in STATES | OTHER_LAYERS for kind in kinds)
    if not layers:
        return 0, 0, 0
    if nope := getattr(config, "qk_nope_head_dim", None):  # latent attention, whose keys are held expanded
        return layers, config.num_attention_heads, max(nope + config.qk_rope_head_dim, config.v_head_dim)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return layers, heads, dim


def kv_token_bytes(config: PretrainedConfig, dtype: torch.dtype, num_ranks: int = 1) -> int:
    """Keys and values of one token, on each of the ranks that share the heads."""
    layers, heads, dim = kv_shape(config)
    return 2 * layers * max(1, heads // num_ranks) * dim * dtype.itemsize


def engine_dtype(name: str, device: torch.device) -> torch.dtype:
    """What trainers and engines compute in, and so what travels; "auto" is bfloat16 on GPUs and float32 on the CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def head_dtype(name: str) -> torch.dtype | None:
    """What logits and the products that they are made of are computed in; None, for "model": what the model is."""
    return None if name == "model" else getattr(torch, name)


def weight_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Of each weight, by name, where the model is one of `dtype`: some architectures keep some of them in float32."""
    made = on_meta(model.name_or_path or "", model.config, dtype)
    return {name: tensor.dtype for name, tensor in made.state_dict().items()}


def exact_dtype(folder: str | Path, dtype: torch.dtype) -> torch.dtype:
    """The least type that holds every weight in a folder and every value of `dtype`."""
    stored = load_config(folder).dtype
    return torch.promote_types(stored, dtype) if isinstance(stored, torch.dtype) else torch.float32


def build(folder: str | Path, *, device: torch.device | str, dtype: torch.dtype, weights: bool) -> PreTrainedModel:
    """The model in a folder, in eval mode.  weights=False: parameters on the meta device, only their shapes."""
    config = load_config(folder)
    if weights:
        model = _load(folder, config, dtype)
        model.to(device)  # type: ignore[arg-type]  # transformers wraps it and loses `self`
    else:
        model = on_meta(folder, config, dtype)
        _fill_buffers(model, device)
    try:
        head(model)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    model.eval()
    return model


def _load(folder: str | Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """With its weights; ValueError where the folder has not all of them."""
    check_weights(folder)
    if is_multimodal(folder):
        return _load_part(folder, config, dtype)
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(  # a pair; its types know only of the model
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder}: its weights cannot be read: {_one_line(error)}") from error
    model: PreTrainedModel
    model, info = found
    wrong = sorted(info["missing_keys"]) + sorted(str(key) for key, *_ in info["mismatched_keys"])
    if wrong:  # transformers would go on with random ones
        raise ValueError(f"{folder}: weights missing or of another shape than config.json says: {', '.join(wrong[:3])}")
    return model


def _load_part(folder: str | Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The text part alone."""
    model = on_meta(folder, config, dtype)
    stored, names = stored_weights(folder, model)
    assert names is not None  # the folder holds more than this part
    _fill_buffers(model, "cpu")
    whole = names.whole
    loaded_from(
        model, {text: tensor_file.read(entry.file, whole[text]) for text, entry in stored.items()}, device="cpu"
    )
    model.tie_weights()
    if empty := [name for name, tensor in model.state_dict().items() if tensor.is_meta]:
        raise ValueError(f"{folder}: weights missing of its text part: {', '.join(empty[:3])}")
    return model


def check_weights(folder: str | Path) -> None:
    """ValueError, by file and tensor, where the weights of a folder are not those of its config.json.

    Reads headers, and the values of tied weights that are stored twice.
    """
    folder = Path(folder)
    model = on_meta(folder, load_config(folder), torch.float32)
    stored, _ = stored_weights(folder, model)
    tied = dict(model.all_tied_weights_keys)
    report = loaded_from(model, {name: torch.empty(entry.shape, device="meta") for name, entry in stored.items()})
    for copy, original in tied.items():  # either is made of the other one
        report.missing_keys -= {copy} if report.missing_keys.issuperset((copy, original)) else {copy, original}
    unexpected = set(report.unexpected_keys)
    model._adjust_missing_and_unexpected_keys(report)  # by what the architecture says of itself
    ignored = unexpected - report.unexpected_keys
    where = folder / (SINGLE if (folder / SINGLE).is_file() else INDEX)
    for name in sorted(report.missing_keys):
        untied = name.removesuffix(".weight") in _names_of(model, model.get_output_embeddings())
        why = "which config.json does not tie (tie_word_embeddings = false)" if untied else "which config.json needs"
        raise ValueError(f"{where}: has no tensor {name}, {why}")
    for name, found, wanted in sorted(report.mismatched_keys):
        file = stored[name].file if name in stored else where
        raise ValueError(f"{file}: {name} is {list(found)}, config.json says {list(wanted)}")
    for name in sorted(report.unexpected_keys):
        file = stored[name].file if name in stored else where
        raise ValueError(f"{file}: {name} is no weight of the model in config.json: do the two belong together?")
    for name, error in report.conversion_errors.items():
        raise ValueError(f"{where}: {name} cannot be made of its weights: {error.splitlines()[0]}")
    counts = {name for name, tensor in model.state_dict().items() if not tensor.is_floating_point()}
    for name, entry in stored.items():
        if entry.dtype not in FLOATS and name not in ignored | counts:
            raise ValueError(f"{entry.file}: {name} is stored as {entry.dtype}: weights must be {', '.join(FLOATS)}")
    for copy, original in tied.items():
        if copy in stored and original in stored and not _same_bytes(stored[copy], stored[original]):
            raise ValueError(
                f"{stored[copy].file}: {copy} is not {original}, and config.json ties the two (tie_word_embeddings = "
                f"true): set it to false, or take {copy} out of the file"
            )


def loaded_from(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], device: torch.device | str = "meta"
) -> LoadStateDictInfo:
    """Put the tensors of a folder into the model as transformers does, renamed and put together; what it says of it.

    On the meta device nothing is computed.
    """
    disable_progress_bar()
    needs = inspect.signature(convert_and_load_state_dict_in_model).parameters
    report: LoadStateDictInfo
    report, _ = convert_and_load_state_dict_in_model(
        model=model,
        state_dict=dict(tensors),
        load_config=LoadStateDictConfig(
            ignore_mismatched_sizes=True,  # they are told apart above
            device_map={"": device},
            dtype=model.dtype,
            dtype_plan=model._get_dtype_plan(model.dtype),
            weight_mapping=get_model_conversion_mapping(model),  # type: ignore[arg-type]  # of their common base class
        ),
        **({"tp_plan": None} if "tp_plan" in needs else {}),  # before transformers 5.6
    )
    return report


def _names_of(model: PreTrainedModel, module: nn.Module | None) -> list[str]:
    return [name for name, one in model.named_modules() if one is module]


def _same_bytes(one: Stored, other: Stored) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open(one.file, "rb") as first, open(other.file, "rb") as second:
        first.seek(one.begin), second.seek(other.begin)
        for at in range(one.begin, one.end, _PIECE):
            num = min(_PIECE, one.end - at)
            if first.read(num) != second.read(num):
                return False
    return True


def on_meta(folder: str | Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The module of a config, all of it on the meta device."""
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION
            )
            return model
    except Exception as error:  # an architecture raises whatever it trips over
        raise ValueError(f"{folder}: config.json makes no causal LM: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:LONGEST]
    return text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


def _fill_buffers(model: PreTrainedModel, device: torch.device | str) -> None:
    """Compute the buffers that no checkpoint holds (rope frequencies, embedding scale), leaving parameters on meta."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=device)
    _initialize(model, model)


def _initialize(module: nn.Module, within: PreTrainedModel) -> None:
    """As transformers does: modules within first, each by the innermost model that it is part of."""
    within = module if isinstance(module, PreTrainedModel) else within
    for child in module.children():
        _initialize(child, within)
    if next(module.buffers(), None) is not None:  # some modules fill those of modules within them
        within._init_weights(module)


def rope_limit(config: PretrainedConfig) -> int | None:
    """Tokens up to which positions are turned alike in every sequence: in a longer one, all of them otherwise.

    None: in a sequence of any length alike.
    """
    text = config.get_text_config()
    limits = [
        rope["original_max_position_embeddings"] if kind == "longrope" else text.max_position_embeddings
        for rope in ropes(text)
        if (kind := rope.get("rope_type", "default")) == "longrope" or "dynamic" in kind
    ]
    return min(limits, default=None)


def distances(config: PretrainedConfig) -> tuple[int, ...]:
    """Tokens beyond which a token sees or turns something else: windows, chunks, the original length of ropes."""
    text = config.get_text_config()
    sizes = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    sizes += [rope.get("original_max_position_embeddings") for rope in ropes(text)]
    return tuple(sorted({size for size in sizes if isinstance(size, int) and size > 0}))


def within_rope_limit(config: PretrainedConfig) -> PretrainedConfig:
    """A config with a plain rope in place of one with a limit: up to that it does the same, by other frequencies."""
    same = deepcopy(config)
    for rope in ropes(same.get_text_config()):
        if rope.get("rope_type") == "longrope" or "dynamic" in rope.get("rope_type", "default"):
            for name in ("short_factor", "long_factor", "factor", "attention_factor"):
                rope.pop(name, None)
            rope["rope_type"] = "default"
    return same


def ropes(text: PretrainedConfig) -> list[dict[str, Any]]:
    """The parameters of each rope, of which some architectures have one for each kind of layer."""
    parameters = getattr(text, "rope_parameters", None) or {}
    return [rope for rope in parameters.values() if isinstance(rope, dict)] or [parameters]


def packs(model: PreTrainedModel) -> bool:
    """Whether several sequences may share a forward: only attention passes anything from token to token.

    By structure, so the same on all ranks.  False: layers carry a state (linear attention, convolution, Mamba), and
    every sequence has a forward of its own.
    """
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    if kinds & CARRIES or getattr(model, "_is_stateful", False):
        return False
    return not any(isinstance(module, nn.Conv1d) for module in decoder_layers(model).modules())


def hidden_states(
    model: PreTrainedModel,
    token_ids: Tensor,  # [T] ints
    cu_seqlens: Sequence[int],  # [n + 1] Python ints, from 0 to T
    parents: Sequence[int] = (),  # [n], see `spans`
) -> Tensor:  # [T, d], after the last norm
    """Body of the model over packed sequences; positions restart in each.

    ValueError for more than one sequence of a model that does not pack, or longer than the limit of its rope.
    """
    attend = Segments(cu_seqlens, parents)
    if len(attend.spans) > 1:
        if not packs(model):
            raise ValueError(f"{len(attend.spans)} sequences in one forward: {type(model).__name__} carries state")
        limit, longest = rope_limit(model.config), max(s.position + s.end - s.start for s in attend.spans)
        if limit is not None and longest > limit:
            raise ValueError(f"a sequence of {longest} tokens beside others: the rope changes above {limit}")
    return run_body(model, token_ids, token_positions(attend.spans, token_ids.device), attend)


def run_body(
    model: PreTrainedModel,
    token_ids: Tensor,  # [T]
    positions: Tensor,  # [T]
    attend: Attend,
    states: object | None = None,  # see engine.states: of one sequence, of which these are the first tokens
) -> Tensor:  # [T, d]
    """Body of the model over T tokens whose attention is whatever `attend` does."""
    return _run(model, token_ids[None], positions[None], attend, states)[0]


def run_rows(
    model: PreTrainedModel,
    token_ids: Tensor,  # [n]
    positions: Tensor,  # [n]
    attend: Attend,
    states: object,  # of n sequences, one row each
) -> Tensor:  # [n, d]
    """Body of the model over the next token of each of n sequences, which go on from their states."""
    return _run(model, token_ids[:, None], positions[:, None], ByRow(attend), states)[:, 0]


def _run(model: PreTrainedModel, token_ids: Tensor, positions: Tensor, attend: Attend, states: object | None) -> Tensor:
    """[n, T] to [n, T, d]."""
    run = body(model)
    cached = {} if states is None else {cache_keyword(run): states}
    with attending(attend):
        out = run(input_ids=token_ids.long(), position_ids=positions, use_cache=states is not None, **cached)
    hidden: Tensor = out.last_hidden_state
    return hidden


def cache_keyword(module: nn.Module) -> str:
    """By which a module is given what it carries from token to token; another one in older transformers."""
    taken = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in taken), "cache")


def head(model: PreTrainedModel, dtype: torch.dtype | None = None) -> Head:
    """What the model makes logits with: its output embedding as it is now, scale and softcap as in its own forward."""
    out = model.get_output_embeddings()
    scale, softcap = _form_of_logits(model)
    return Head(weight=out.weight, bias=getattr(out, "bias", None), scale=scale, softcap=softcap, dtype=dtype)


def _form_of_logits(model: PreTrainedModel) -> tuple[float, float | None]:
    """Scale and softcap; measured once for each model."""
    if _FORM not in model.__dict__:
        model.__dict__[_FORM] = logit_form(model)
    form: tuple[float, float | None] = model.__dict__[_FORM]
    return form
