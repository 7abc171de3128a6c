"""What settings may be, alone and together.

A broken rule is a ValueError of one line: what is wrong, the value, the bound, the next step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

from spmd_rl.config.contradictions import contradictions
from spmd_rl.config.settings import Config

TORCHRUN_KILLS = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # seconds after a signal; the scripts in launch/ set it

CHOICES = {
    "run.resume": ("auto", "must", "never"),
    "rollout.long_prompts": ("skip", "refuse"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "model.head_dtype": ("float32", "model"),
    "staleness.gate": ("admission", "ship"),
    "staleness.order": ("completion", "oldest", "admission"),
    "staleness.over_age": ("wait", "drop"),
    "staleness.on_update": ("continue", "hold", "restart", "drain"),
    "inference.engine": ("native", "vllm"),
    "weights.mode": ("full", "delta", "disk"),
    "weights.receive": ("shadow", "in_place"),
    "inference.kv_on_update": ("recompute", "keep"),
    "trainer.advantage": ("grpo", "grpo_population", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gae"),
    "trainer.loss": ("decoupled", "ppo", "cispo", "gspo", "reinforce"),
    "trainer.correction": ("truncate", "mask", "none"),
    "trainer.correction_level": ("token", "sequence", "geometric"),
    "trainer.reject": ("none", "off_policy", "off_policy_negative"),
    "trainer.aggregation": ("auto", "token_mean", "sequence_mean", "constant"),
    "critic.body": ("own", "shared"),
    "critic.level": ("token", "turn"),
    "lora.sync": ("merged", "adapter"),
    "trainer.kl": ("k1", "k2", "k3"),
    "trainer.kl_in": ("loss", "reward"),
    "trainer.proximal": ("recompute", "loglinear"),
}


AT_LEAST = {
    "run.steps": 1,
    "run.metrics_interval_s": 0.1,
    "run.probe_every": -1,
    "run.stall_timeout_s": 1,
    "run.shutdown_s": 1,
    "topology.inference": 1,
    "topology.trainer": 1,
    "topology.dp_replicate": 1,
    "topology.tensor_parallel": 1,
    "topology.context_parallel": 1,
    "lora.rank": 0,
    "rollout.batch_size": 1,
    "rollout.group_size": 1,
    "rollout.max_tokens": 1,
    "rollout.temperature": 0.01,
    "rollout.top_p": 0.01,
    "rollout.top_k": 0,
    "rollout.max_retries": 0,
    "data.min_solve_rate": 0,
    "data.revisit": 0.001,
    "data.restart_at": -1,
    "staleness.max_staleness": 0,
    "staleness.window": 1,
    "staleness.max_age": -1,
    "staleness.queue_size": 1,
    "inference.tensor_parallel": 1,
    "weights.anchor_every": 1,
    "inference.kv_cache_mib": 0,
    "inference.max_slots": 1,
    "inference.max_seq_len": 2,
    "trainer.learning_rate": 0,
    "trainer.warmup_steps": 0,
    "trainer.weight_decay": 0,
    "trainer.grad_clip": 1e-9,
    "trainer.overlong_buffer": 0,
    "trainer.importance_low": 0,
    "trainer.importance_high": 1,
    "trainer.reject_above": 0,
    "trainer.kl_coefficient": 0,
    "trainer.router_aux_coef": 0,
    "trainer.num_minibatches": 1,
    "trainer.num_epochs": 1,
    "trainer.micro_batch_tokens": 1,
    "trainer.max_empty_batches": 1,
    "critic.learning_rate": 0,
    "critic.coefficient": 0,
    "critic.clip": 0,
    "eval.every": -1,
    "eval.num_tasks": 1,
    "eval.samples": 1,
    "eval.temperature": 0,
    "eval.top_p": 0.01,
    "eval.top_k": 0,
    "eval.max_concurrent": 0,
    "checkpoint.every": 0,
    "checkpoint.keep_last": 1,
}

MAY_BE_INFINITE = {  # bounds: infinity is none
    "trainer.grad_clip",
    "trainer.clip_high",
    "trainer.importance_high",
    "trainer.reject_above",
    "critic.clip",
}

LONGEST_S = 1e8  # of settings in seconds, three years: timers overflow some decades later


Problem = tuple[bool, str]  # whether a rule of several settings is broken, and what is wrong then


def check(config: Config) -> None:
    """Every rule; ValueError for the first that is broken."""
    _check_each(config)
    problems = (_rollout_problems, _staleness_problems, _lora_problems, _engine_problems, _trainer_problems)
    for wrong, message in chain.from_iterable(each(config) for each in problems):
        if wrong:
            raise ValueError(f"config: {message}")
    for section, derived in (("topology", "split"), ("staleness", "age_bound")):
        try:
            getattr(config, derived)
        except ValueError as error:
            raise ValueError(f"config: {section}: {error}") from None


def _check_each(config: Config) -> None:
    """Check each setting alone; ValueError for the first that is wrong."""
    for key, choices in CHOICES.items():
        value = _get(config, key)
        if value not in choices:
            raise ValueError(f"config: {key} = {value!r}: must be one of {', '.join(choices)}")
    for key, value in _floats(config):
        if math.isnan(value) or (math.isinf(value) and key not in MAY_BE_INFINITE):
            raise ValueError(f"config: {key} = {value}: must be a finite number")
        if key.endswith("_s") and value > LONGEST_S:
            raise ValueError(f"config: {key} = {value}: must be at most {LONGEST_S:g} s")
    for key, least in AT_LEAST.items():
        value = _get(config, key)
        if not value >= least:
            raise ValueError(f"config: {key} = {value}: must be at least {least}")
    for name, env in config.env.items():
        for key, path in ((f"env.{name}.path", env.path), ("model.make", config.model.make or "a:b")):
            if path.count(":") != 1:
                raise ValueError(f"config: {key} = {path!r}: an import path is written package.module:name")
        if not env.weight > 0:
            raise ValueError(f"config: env.{name}.weight = {env.weight}: must be above 0")


def _rollout_problems(config: Config) -> list[Problem]:
    """List the rules of [env], [rollout] and [eval]."""
    rollout, trainer = config.rollout, config.trainer
    return [
        (not config.env, "no [env.NAME] section: name at least one environment"),
        (
            not 0 <= rollout.max_failure_rate <= 1,
            f"rollout.max_failure_rate = {rollout.max_failure_rate}: a share between 0 and 1",
        ),
        (rollout.top_p > 1, f"rollout.top_p = {rollout.top_p}: must be at most 1"),
        (config.eval.top_p > 1, f"eval.top_p = {config.eval.top_p}: must be at most 1"),
        (
            rollout.batch_size % rollout.group_size != 0,
            f"rollout.batch_size = {rollout.batch_size} is not a multiple of group_size = {rollout.group_size}",
        ),
        (
            rollout.group_size < 2 and trainer.advantage not in ("reinforce_pp", "gae"),
            f"rollout.group_size = {rollout.group_size}: advantages compare rollouts of one prompt, so 2 at least",
        ),
    ]


def _staleness_problems(config: Config) -> list[Problem]:
    """List the rules of [staleness]."""
    rollout, staleness = config.rollout, config.staleness
    return [
        (
            staleness.max_concurrent < rollout.group_size,
            f"staleness.max_concurrent = {staleness.max_concurrent} is below rollout.group_size = "
            f"{rollout.group_size}: no group could ever start",
        ),
        (
            0 <= staleness.max_age < staleness.max_staleness,
            f"staleness.max_age = {staleness.max_age} is below max_staleness = {staleness.max_staleness}: "
            "raise the first or lower the second",
        ),
        (
            staleness.adaptive and staleness.gate == "ship",
            "staleness.adaptive needs staleness.gate = 'admission': the ship-side gate does not limit admission",
        ),
        (
            staleness.on_update == "drain" and staleness.gate == "ship",
            "staleness.on_update = 'drain' needs staleness.gate = 'admission': the ship-side gate never says that all "
            "that a version may start has started",
        ),
        (
            staleness.gate == "ship" and staleness.queue_size + staleness.max_concurrent < rollout.batch_size,
            f"staleness.queue_size + max_concurrent = {staleness.queue_size + staleness.max_concurrent} is below "
            f"rollout.batch_size = {rollout.batch_size}: gate = 'ship' could never fill a batch",
        ),
        (
            not 0 < staleness.target_idle < 1,
            f"staleness.target_idle = {staleness.target_idle}: a share between 0 and 1",
        ),
    ]


def _lora_problems(config: Config) -> list[Problem]:
    """List the rules of [lora]."""
    lora, weights = config.lora, config.weights
    return [
        (lora.rank > 0 and not lora.alpha > 0, f"lora.alpha = {lora.alpha}: must be above 0"),
        (lora.rank > 0 and not lora.targets, "lora.targets = []: name at least one linear layer"),
        (
            lora.sync == "adapter" and lora.rank == 0,
            "lora.sync = 'adapter' with lora.rank = 0: the whole model is trained; set lora.rank",
        ),
        (
            lora.sync == "adapter" and weights.mode != "full",
            f"lora.sync = 'adapter' with weights.mode = {weights.mode!r}: additions change everywhere in every "
            "step and travel over the network; use weights.mode = 'full', or lora.sync = 'merged'",
        ),
    ]


def _engine_problems(config: Config) -> list[Problem]:
    """List the rules of [inference] and [weights]."""
    rollout, inference = config.rollout, config.inference
    return [
        (
            rollout.max_tokens >= inference.max_seq_len,
            f"rollout.max_tokens = {rollout.max_tokens} leaves no room for a prompt in inference.max_seq_len = "
            f"{inference.max_seq_len}",
        ),
        (
            inference.engine == "native" and inference.tensor_parallel > 1,
            f"inference.tensor_parallel = {inference.tensor_parallel} needs inference.engine = 'vllm': a native "
            "engine is one rank's",
        ),
        (
            inference.engine == "vllm" and (rollout.top_p < 1 or rollout.top_k > 0),
            f"rollout.top_p = {rollout.top_p}, top_k = {rollout.top_k} with inference.engine = 'vllm': its log-probs "
            "would be those of the truncated distribution, not of the policy; use 1 and 0, or engine = 'native'",
        ),
        (
            inference.engine == "vllm" and max(rollout.temperature, config.eval.temperature) > 2,
            f"rollout.temperature = {rollout.temperature}, eval.temperature = {config.eval.temperature}: "
            "vLLM takes 2 at most",
        ),
        (
            inference.engine == "vllm" and inference.deterministic,
            "inference.deterministic needs inference.engine = 'native'",
        ),
        (
            config.weights.receive == "in_place"
            and (inference.engine == "vllm" or config.weights.mode == "disk" or config.lora.sync == "adapter"),
            f"weights.receive = 'in_place' with inference.engine = {inference.engine!r}, weights.mode = "
            f"{config.weights.mode!r}, lora.sync = {config.lora.sync!r}: needs 'native', 'full' or 'delta', 'merged'",
        ),
    ]


def _trainer_problems(config: Config) -> list[Problem]:
    """List the rules of [data], [trainer] and [critic]."""
    rollout, data, trainer, critic = config.rollout, config.data, config.trainer, config.critic
    return [
        (
            not data.min_solve_rate <= data.max_solve_rate <= 1 or data.revisit > 1,
            f"data: min_solve_rate = {data.min_solve_rate} <= max_solve_rate = {data.max_solve_rate} <= "
            f"1 and revisit = {data.revisit} <= 1 must hold",
        ),
        (
            not 0 <= trainer.clip[0] <= 1,
            f"trainer.clip_low = {trainer.clip_low}: between 0 and 1, a ratio is never below 0; -1: as the loss has it",
        ),
        (trainer.clip[1] < 0, f"trainer.clip_high = {trainer.clip_high}: at least 0; -1: as the loss has it"),
        (trainer.clip_dual != 0 and trainer.clip_dual <= 1, f"trainer.clip_dual = {trainer.clip_dual}: 0 or above 1"),
        (
            trainer.importance_low > 1,
            f"trainer.importance_low = {trainer.importance_low}: at most 1, the weight of data of the policy itself",
        ),
        (
            trainer.overlong_buffer > rollout.max_tokens,
            f"trainer.overlong_buffer = {trainer.overlong_buffer}: at most rollout.max_tokens = {rollout.max_tokens}",
        ),
        (
            not (0 <= critic.gamma <= 1 and 0 <= critic.lam <= 1),
            f"critic.gamma = {critic.gamma} and critic.lam = {critic.lam}: each between 0 and 1",
        ),
        (not all(0 <= b < 1 for b in trainer.betas), f"trainer.betas = {trainer.betas}: each at least 0 and below 1"),
    ]


def check_model_folder(config: Config) -> None:
    """ValueError where there is none and nothing would make it."""
    path, make = config.model.path, config.model.make
    if not path:
        raise ValueError("model.path = '': name a Hugging Face folder, there or to be made by model.make")
    if not Path(path).is_dir() and not make:
        raise ValueError(f"model.path = {path!r}: no such folder, and model.make names nothing that makes it")


def _get(config: Config, key: str) -> Any:  # each setting has its own type
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _floats(config: Config) -> Iterator[tuple[str, float]]:
    """Every setting that is one float, by its name."""
    for section in fields(config):
        value = getattr(config, section.name)
        tables = {f"env.{name}": env for name, env in value.items()} if section.name == "env" else {section.name: value}
        for name, table in tables.items():
            for f in fields(table):
                if isinstance(getattr(table, f.name), float):
                    yield f"{name}.{f.name}", getattr(table, f.name)


def limits(config: Config) -> list[str]:
    """What these settings promise, and which of them bind; a line each."""
    room, most, reach = config.admissible, config.staleness.max_concurrent, config.in_flight
    bind = " = ".join(name for name, value in (("max_concurrent", most), ("(S+1)·B", room)) if value == reach)
    other = f"; (S+1)·B = {room} may be admitted and not yet trained" if room and room > reach else ""
    lines = [f"age bound: {config.age_bound}", f"in flight: {reach} rollouts at most = {bind}{other}"]
    trainer, (low, high) = config.trainer, config.trainer.clip
    clipped = "" if trainer.loss == "reinforce" else f", ratio clipped to {1 - low:g} … {1 + high:g}"
    lines.append(f"objective: {trainer.loss}{clipped}, {trainer.aggregates_by}, advantages of {trainer.advantage}")
    if not config.checkpoint.every:
        lines.append("checkpoint.every = 0: nothing is saved before the end, a crash loses all since the start")
    return lines


def warnings(config: Config, environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is allowed and probably not meant, a line each."""
    trainer, lines = config.trainer, contradictions(config)
    each, shares = config.rollout.batch_size // trainer.num_minibatches, config.split.num_shares
    if trainer.num_minibatches > 1 and each < shares:
        lines.append(
            f"trainer.num_minibatches = {trainer.num_minibatches} of rollout.batch_size = {config.rollout.batch_size}: "
            f"{each} rollouts for {shares} shares of the trainer ranks, the others wait in every optimizer step; "
            f"lower it to {max(1, config.rollout.batch_size // shares)}"
        )
    room, most, reach = config.admissible, config.staleness.max_concurrent, config.in_flight
    if most > reach:
        lines.append(
            f"staleness.max_concurrent = {most} is never reached: at most (S+1)·B = {room} rollouts are admitted and "
            f"not yet trained; lower it to {room}, or raise staleness.max_staleness"
        )
    engines, each = len(config.split.engines), config.inference.max_slots
    if engines * each < reach:
        lines.append(
            f"inference.max_slots = {each} on {engines} engine{'s' * (engines > 1)} for {reach} rollouts in flight: "
            f"the others wait in the engine and age; raise it to {-(-reach // engines)}, or lower "
            "staleness.max_concurrent, unless episodes mostly wait for tools"
        )
    staleness, ahead = config.staleness, config.staleness.max_staleness + 2
    if staleness.gate == "ship" and 0 <= staleness.max_age < ahead:
        lower = f", or lower max_staleness to {staleness.max_age - 2}" if staleness.max_age >= 2 else ""
        lines.append(
            f"staleness.gate = 'ship' with max_age = {staleness.max_age}: the gate admits only what can still be "
            f"trained, (max_age + 1)·B = {(staleness.max_age + 1) * config.rollout.batch_size} rollouts, so the "
            f"max_staleness + 2 = {ahead} batches ahead are never reached; raise max_age to {ahead}{lower}"
        )
    bound, cap = config.age_bound, config.staleness.max_age
    if bound.age is not None and cap > bound.age:
        lines.append(f"staleness.max_age = {cap} does nothing, for {bound} holds without it: leave it out")
    killed_s = int(environ.get(TORCHRUN_KILLS, 30))
    if config.run.shutdown_s + 5 > killed_s:
        lines.append(
            f"run.shutdown_s = {config.run.shutdown_s:g}: torchrun kills every rank {killed_s} s after it passed on a "
            f"signal; raise {TORCHRUN_KILLS} above {config.run.shutdown_s + 5:g}"
        )
    fixed = {"staleness.order": "admission", "staleness.on_update": "drain", "staleness.adaptive": False}
    loose = [key for key, value in fixed.items() if _get(config, key) != value]
    if config.inference.deterministic and loose:
        lines.append(
            f"inference.deterministic without {', '.join(f'{key} = {fixed[key]!r}' for key in loose)}: each token "
            "is repeatable, the run as a whole is not"
        )
    return lines
