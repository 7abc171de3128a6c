"""Which engine, and what brings it weights: the one place that knows them all, and gives each what it needs."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed import ProcessGroup

from spmd_rl.config import Config
from spmd_rl.distributed.world import World
from spmd_rl.engine.cache import Cache
from spmd_rl.engine.kv_room import KvRoom
from spmd_rl.engine.lockstep import Leader
from spmd_rl.engine.native import NativeEngine
from spmd_rl.engine.protocol import Engine
from spmd_rl.engine.states import state_bytes
from spmd_rl.engine.stops import Decode
from spmd_rl.model.causal_lm import (
    build,
    engine_dtype,
    exact_dtype,
    head_dtype,
    is_multimodal,
    kv_token_bytes,
    load_config,
    packs,
)
from spmd_rl.model.stored_names import StoredNames, original_names
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.weights.adapter import AdapterReceiver
from spmd_rl.weights.disk import DiskReceiver
from spmd_rl.weights.layout import TensorSpec, manifest
from spmd_rl.weights.low_rank import Lora
from spmd_rl.weights.receiver import WeightReceiver
from spmd_rl.weights.wire import Deliver, Failed


def build_engine(
    config: Config, *, device: torch.device, group: ProcessGroup | None, decode: Decode
) -> tuple[Engine, list[TensorSpec]]:
    """This rank's part of the engine of `group`, without weights, and what an update consists of.

    To be called before any thread uses torch.distributed.
    """
    check_folder(config)
    check_lengths(config, device)
    inference, dtype = config.inference, engine_dtype(config.model.dtype, device)
    model = build(config.model.path, device=device, dtype=dtype, weights=False)
    specs = manifest(model)
    if inference.engine == "native":
        return NativeEngine(
            model=model,
            device=device,
            max_slots=inference.max_slots,
            max_seq_len=inference.max_seq_len,
            kv_on_update=inference.kv_on_update,
            kv_cache_bytes=inference.kv_cache_mib << 20,
            deterministic=inference.deterministic,
            head_dtype=head_dtype(config.model.head_dtype),
            decode=decode,
        ), specs

    from spmd_rl.engine.vllm import VllmEngine

    assert group is not None  # of all its ranks
    engine = VllmEngine(
        folder=config.model.path,
        config=model.config,
        specs=specs,
        group=group,
        device=device,
        dtype=dtype,
        head_dtype=config.model.head_dtype,
        max_slots=inference.max_slots,
        max_seq_len=inference.max_seq_len,
        kv_on_update=inference.kv_on_update,
        kv_cache_bytes=inference.kv_cache_mib << 20,
        decode=decode,
        original=partial(original_names, model),
    )
    if group.size() > 1 and group.rank() == 0:
        return Leader(engine=engine, group=group), specs
    return engine, specs


def make_receiver(
    world: World, config: Config, run_dir: RunDir, *, specs: list[TensorSpec], deliver: Deliver, failed: Failed
) -> WeightReceiver | AdapterReceiver | DiskReceiver:
    """What gets this rank the weights of every version."""
    if config.weights.mode == "disk":
        return DiskReceiver(
            weights=run_dir.weights,
            loaded=StoredNames(config.model.path, engine_dtype(config.model.dtype, world.device)).loaded,
            device=world.device,
            deliver=deliver,
            failed=failed,
            sender=world.trainer_ranks[0],
            rank=world.rank,
        )
    copied = config.inference.engine == "vllm"
    if config.lora.sync == "merged":
        return WeightReceiver(
            specs=specs,
            meta_groups=world.wts_meta,
            payload_groups=world.wts,
            device=world.device,
            deliver=deliver,
            failed=failed,
            copied=copied,
            in_place=config.weights.receive == "in_place",
        )
    return AdapterReceiver(
        specs=specs,
        meta_groups=world.wts_meta,
        payload_groups=world.wts,
        device=world.device,
        deliver=deliver,
        failed=failed,
        copied=copied,
        lora=Lora(rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets),
        exact=exact_dtype(config.model.path, specs[0].dtype),
    )


def check_engine(config: Config) -> None:
    """ValueError for an engine that is not installed."""
    if config.inference.engine == "vllm":
        from spmd_rl.engine.vllm import check_installed

        check_installed()


def check_folder(config: Config) -> None:
    """ValueError for a model folder that the engine cannot read as it is trained."""
    if config.inference.engine == "vllm" and is_multimodal(config.model.path):
        raise ValueError(
            f"inference.engine = 'vllm': {config.model.path} is a multimodal folder, of which the text part alone is "
            "trained; use 'native', or a folder of its text part"
        )


def device_bytes(device: torch.device) -> int:
    """Its memory; 0 where that is the host's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def memory_warnings(config: Config, device: torch.device, num_bytes: int) -> list[str]:
    """A line where keys, values and states of a native engine alone may outgrow the `num_bytes` of its device.

    0: no limit.
    """
    inference = config.inference
    if inference.engine != "native" or not num_bytes:
        return []
    text = load_config(config.model.path).get_text_config()
    num_tokens = inference.max_slots * Cache.capacity(inference.max_seq_len)
    token_bytes = kv_token_bytes(text, engine_dtype(config.model.dtype, device))
    states = inference.max_slots * sequence_state_bytes(config, device)
    needed = inference.kv_cache_mib << 20 or num_tokens * token_bytes + states
    if needed <= num_bytes:
        return []
    return [
        f"inference.kv_cache_mib = {inference.kv_cache_mib}, max_slots = {inference.max_slots}, max_seq_len = "
        f"{inference.max_seq_len}: keys and values{' and states' * bool(states)} may take {needed / 1e9:.0f} GB and "
        f"{device} has {num_bytes / 1e9:.0f}: set kv_cache_mib to what weights and buffers leave, or use "
        "inference.engine = 'vllm'"
    ]


def check_lengths(config: Config, device: torch.device) -> None:
    """ValueError if the model has fewer positions than a request may have tokens, or the KV cache no room for one.

    vllm checks its cache when it starts.
    """
    model, longest = load_config(config.model.path).get_text_config(), config.inference.max_seq_len
    positions = getattr(model, "max_position_embeddings", None) or longest
    if longest > positions:
        raise ValueError(
            f"inference.max_seq_len = {longest}: the model has {positions} positions (max_position_embeddings); lower "
            "max_seq_len"
        )
    if config.inference.engine == "native":
        KvRoom.of(
            model,
            dtype=engine_dtype(config.model.dtype, device),
            num_bytes=config.inference.kv_cache_mib << 20,
            max_seq_len=longest,
            state_bytes=sequence_state_bytes(config, device) if config.inference.kv_cache_mib else 0,
        )


def sequence_state_bytes(config: Config, device: torch.device) -> int:
    """What layers of the run's model carry from token to token beside keys and values, for one sequence."""
    dtype = engine_dtype(config.model.dtype, device)
    model = build(config.model.path, device="cpu", dtype=dtype, weights=False)
    return 0 if packs(model) else state_bytes(model, device)
