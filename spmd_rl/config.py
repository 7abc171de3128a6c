"""Every setting, its unit and what moves when it moves.  Imports no torch, so a wrong key is answered at once.

`load` reads a TOML file and `section.key=value` overrides (each value parsed as TOML) into frozen dataclasses.
Anything unknown or inconsistent is a ValueError of one line: what is wrong, the value, the bound, the next step.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from spmd_rl import topology
from spmd_rl.bounds import Bound, age_bound

SETTINGS = dataclass(frozen=True, kw_only=True)


@SETTINGS
class Run:
    """The run as a whole."""

    dir: str = ""
    """run directory, on a file system that all nodes see; empty: runs/<config name>-<time>"""
    steps: int = 100
    """optimizer batches to train"""
    seed: int = 0
    """of the data order and of every sampled token"""
    resume: str = "auto"
    """auto: from the newest complete checkpoint if there is one; must: there must be one; never: a fresh directory"""
    metrics_interval_s: float = 10.0
    """seconds between two lines of interval metrics"""
    probe_every: int = 1
    """versions between two comparisons of engine and trainer on the probe (>= 256 tokens); 0: never"""
    stall_timeout_s: float = 600.0
    """seconds without progress of a rank after which the run fails"""
    shutdown_s: float = 20.0
    """seconds that a stopping run has for finishing and saving"""


@SETTINGS
class Topology:
    """How the ranks of the job are split; inference + trainer must equal WORLD_SIZE."""

    inference: int = 1
    """inference ranks; rank 0 is one of them and runs the orchestrator"""
    trainer: int = 1
    """trainer ranks"""
    dp_replicate: int = 1
    """replicas of the sharded trainer; divides topology.trainer"""
    tensor_parallel: int = 1
    """trainer ranks that split every layer (Llama and Qwen families); neighbours, so best within a node"""
    context_parallel: int = 1
    """trainer ranks that split the tokens of their rollouts; for sequences too long for one device"""


@SETTINGS
class Model:
    """The policy's model."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer)"""
    make: str = ""
    """import path of a function that writes the folder when it is missing, such as spmd_rl.tiny_model:make"""
    dtype: str = "auto"
    """float32 | bfloat16 of the computation; auto: bfloat16 on GPUs, float32 on the CPU"""
    template: dict[str, object] = field(default_factory=dict)
    """what the chat template is told beside the messages, such as { enable_thinking = false }"""


@SETTINGS
class Env:
    """One source of tasks."""

    path: str
    """import path of the environment's class, such as spmd_rl.envs.arithmetic:Arithmetic"""
    weight: float = 1.0
    """share of the training tasks, relative to the other environments"""
    args: dict[str, object] = field(default_factory=dict)
    """keyword arguments of the class"""


@SETTINGS
class Rollout:
    """What is sampled."""

    batch_size: int = 64
    """B, rollouts per optimizer batch, for gate and trainer alike; a multiple of group_size"""
    group_size: int = 8
    """G, rollouts of one prompt, whose rewards are compared with each other"""
    max_tokens: int = 256
    """sampled tokens per turn at most"""
    temperature: float = 1.0
    """of sampling, and of the log-probs that are trained"""
    top_p: float = 1.0
    """nucleus; 1: off"""
    top_k: int = 0
    """most likely tokens sampled from; 0: off"""
    max_retries: int = 1
    """further attempts of an episode that raised, before it counts as failed"""
    max_failure_rate: float = 0.5
    """share of failed episodes among two batches' worth of them, beyond which the run fails; 1: any"""
    long_prompts: str = "skip"
    """skip: prompts that leave no room in inference.max_seq_len fail, counted; refuse: the first one ends the run"""


@SETTINGS
class Data:
    """Which tasks are drawn, by how often they were solved lately."""

    min_solve_rate: float = 0.0
    """tasks solved less often than this are passed over; 0: off"""
    max_solve_rate: float = 1.0
    """tasks solved more often than this are passed over; 1: off"""
    revisit: float = 0.1
    """share of such draws that are run nevertheless, to see whether that has changed"""


@SETTINGS
class Staleness:
    """How far generation may run ahead of training."""

    max_staleness: int = 2
    """S, policy versions; 0: synchronous"""
    max_concurrent: int = 64
    """C, rollouts in flight at most"""
    gate: str = "admission"
    """admission: bounds what is started; ship: bounds what is handed to the trainer"""
    order: str = "admission"
    """completion | oldest | admission: which finished rollouts are trained first"""
    window: int = 1
    """w, look-ahead of order = admission, in tickets; w <= group_size gives age <= S exactly"""
    max_age: int = -1
    """M, hard cap of the age of what is trained, >= max_staleness; -1: none"""
    over_age: str = "wait"
    """wait: hold back batches so that nothing grows too old; drop: give such rollouts up"""
    queue_size: int = 64
    """finished rollouts that gate = ship lets wait"""
    adaptive: bool = False
    """admit only what keeps the trainer busy, S being the ceiling"""
    target_idle: float = 0.02
    """share of time that adaptive admission lets the trainer wait"""
    on_update: str = "continue"
    """continue | hold | restart: what running sequences do when new weights arrive; drain: new weights wait until all
    that was admitted under the old ones has ended, so that each rollout is of the version of its admission"""


@SETTINGS
class Inference:
    """The engines."""

    engine: str = "native"
    """native | vllm (needs the extra: pip install 'spmd_rl[vllm]')"""
    tensor_parallel: int = 1
    """inference ranks that make one engine (vllm only)"""
    engine_on_rank0: bool = True
    """false: rank 0 is the orchestrator only"""
    max_slots: int = 64
    """sequences decoded together per engine"""
    max_seq_len: int = 2048
    """tokens of prompt and completions together"""
    kv_on_update: str = "recompute"
    """recompute | keep: KV cache of running sequences when new weights arrive"""
    deterministic: bool = False
    """compute each sequence alone, so that nothing depends on what else is in the batch (native only)"""
    kv_cache_mib: int = 0
    """KV cache of each rank with an engine, MiB; requests wait for room; 0: enough for max_slots of max_seq_len"""


@SETTINGS
class Weights:
    """How new weights get to the engines."""

    mode: str = "full"
    """full | delta: all, or what changed, over the network; disk: as Hugging Face folders in weights/ of the run"""
    anchor_every: int = 16
    """versions of which one is sent whole although mode = delta"""
    receive: str = "shadow"
    """shadow | in_place: into memory of its own while the engine goes on, or into the live weights while it pauses:
    half the memory; the pause is as long as the transfer"""


@SETTINGS
class Trainer:
    """The optimizer step."""

    learning_rate: float = 1e-6
    """AdamW, after warm-up"""
    warmup_steps: int = 0
    """steps over which the learning rate rises linearly"""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW"""
    weight_decay: float = 0.0
    """AdamW"""
    grad_clip: float = 1.0
    """largest gradient norm, of the policy and of a critic with a body of its own each"""
    advantage: str = "grpo"
    """grpo | grpo_population | dr_grpo | rloo | reinforce_pp | reinforce_pp_baseline | gae: rewards to advantages"""
    advantage_scale: float = 1.0
    """factor on every advantage; -1 unlearns (a control)"""
    filter_zero_spread: bool = True
    """give up groups whose rewards are all equal: they train nothing"""
    mask_truncated: bool = False
    """rollouts cut off at max_tokens train nothing and are in no baseline and no denominator"""
    overlong_buffer: int = 0
    """tokens before max_tokens over which the reward that is trained on falls by 1; 0: off"""
    loss: str = "decoupled"
    """decoupled | ppo | cispo | gspo | reinforce: the objective of a token"""
    clip_low: float = 0.2
    """ratio is clipped below 1 - clip_low"""
    clip_high: float = 0.28
    """ratio is clipped above 1 + clip_high"""
    clip_dual: float = 0.0
    """bound of a token's loss where its advantage is negative, in advantages; 0: none, 3 is usual"""
    correction: str = "truncate"
    """truncate | mask | none: what the importance weight does outside its bounds"""
    correction_level: str = "token"
    """token | sequence (product of its tokens) | geometric (their mean): what the weight is taken over"""
    importance_low: float = 0.0
    """least importance weight"""
    importance_high: float = 2.0
    """largest importance weight"""
    reject: str = "none"
    """none | off_policy | off_policy_negative (advantage below 0): sequences that the policy has left are dropped"""
    reject_above: float = 0.1
    """nats per token, log behavior - log current, above which they are"""
    aggregation: str = "token_mean"
    """token_mean | sequence_mean | constant (divides by sequences · rollout.max_tokens)"""
    entropy: float = 0.0
    """coefficient of the entropy bonus"""
    kl: str = "k3"
    """k1 | k2 | k3: estimate of the KL to the reference model, which is model.path as it was"""
    kl_coefficient: float = 0.0
    """its weight; 0: no reference model is loaded"""
    kl_in: str = "loss"
    """loss | reward (k1, taken off each token's reward): where it is added"""
    proximal: str = "recompute"
    """recompute | loglinear (no extra forward): log-probs at the start of a batch of several minibatches"""
    num_minibatches: int = 1
    """optimizer steps that share a batch; versions count batches"""
    num_epochs: int = 1
    """passes over a batch"""
    micro_batch_tokens: int = 4096
    """tokens per forward pass at most (one longer sequence goes alone)"""
    share_prefix: bool = False
    """compute once what the rollouts of a group begin with alike: for prompts longer than the replies"""
    activation_checkpointing: bool = False
    """recompute activations in the backward pass"""
    cpu_offload: bool = False
    """keep weights, gradients and optimizer in host memory between uses"""
    max_empty_batches: int = 3
    """batches' worth of groups in a row without anything trainable, after which the run stops with an error"""


@SETTINGS
class Lora:
    """Train low-rank additions instead of the model; engines compute with merged weights."""

    rank: int = 0
    """0: off, the model itself is trained"""
    alpha: float = 16.0
    """additions are scaled by alpha / rank"""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """last parts of the names of linear layers"""
    sync: str = "merged"
    """merged | adapter: what travels. adapter: the frozen model once, then additions alone, merged where they arrive to
    the same bits; an engine's rank then holds the model three times instead of twice"""


@SETTINGS
class Critic:
    """Values for trainer.advantage = gae; without effect otherwise."""

    body: str = "own"
    """own | shared: a second model of model.path, or a head on the policy"""
    learning_rate: float = 1e-5
    """AdamW, after warm-up"""
    coefficient: float = 0.5
    """of the value loss"""
    clip: float = 0.2
    """how far a value may move within a batch before its gradient is cut"""
    gamma: float = 1.0
    """discount per token or turn"""
    lam: float = 0.95
    """1: Monte Carlo, 0: one step"""
    level: str = "token"
    """token | turn: what is credited"""


@SETTINGS
class Eval:
    """Evaluation, beside training and outside the gate."""

    every: int = 0
    """steps between two evaluations; 0: only before the first step and at the end; -1: never"""
    num_tasks: int = 32
    """tasks per environment"""
    samples: int = 1
    """rollouts per task"""
    temperature: float = 0.0
    """0: greedy"""
    top_p: float = 1.0
    """nucleus; 1: off"""
    top_k: int = 0
    """0: off"""
    max_concurrent: int = 0
    """rollouts in flight at most while training runs; 0: max_concurrent / 8"""
    pin: bool = False
    """hold weight updates while an evaluation runs, so that one version makes it all; it must end in stall_timeout_s"""
    solved_at: float = 1.0
    """least reward that counts as solved, for pass@k, avg@k and the difficulty of tasks"""


@SETTINGS
class Checkpoint:
    """What a resume starts from."""

    every: int = 0
    """steps between two checkpoints; 0: only at the end"""
    keep_last: int = 2
    """older ones are removed"""


@SETTINGS
class Config:
    """All settings of a run."""

    run: Run = field(default_factory=Run)
    topology: Topology = field(default_factory=Topology)
    model: Model
    env: dict[str, Env]
    data: Data = field(default_factory=Data)
    rollout: Rollout = field(default_factory=Rollout)
    staleness: Staleness = field(default_factory=Staleness)
    inference: Inference = field(default_factory=Inference)
    weights: Weights = field(default_factory=Weights)
    trainer: Trainer = field(default_factory=Trainer)
    lora: Lora = field(default_factory=Lora)
    critic: Critic = field(default_factory=Critic)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @property
    def split(self) -> topology.Topology:
        """Which rank does what."""
        return topology.Topology(
            num_inference=self.topology.inference,
            num_trainers=self.topology.trainer,
            dp_replicate=self.topology.dp_replicate,
            tensor_parallel=self.topology.tensor_parallel,
            context_parallel=self.topology.context_parallel,
            engine_on_rank0=self.inference.engine_on_rank0,
            engine_ranks_each=self.inference.tensor_parallel,
        )

    @property
    def age_bound(self) -> Bound:
        """What these settings promise about the age of what is trained."""
        staleness = self.staleness
        return age_bound(
            gate=staleness.gate,
            order=staleness.order,
            max_staleness=staleness.max_staleness,
            batch_size=self.rollout.batch_size,
            group_size=self.rollout.group_size,
            max_concurrent=staleness.max_concurrent,
            window=staleness.window,
            queue_size=staleness.queue_size,
            max_age=None if staleness.max_age < 0 else staleness.max_age,
            over_age=staleness.over_age,
        )

    @property
    def eval_concurrent(self) -> int:
        """eval.max_concurrent, or C / 8, at least 1."""
        return self.eval.max_concurrent or max(1, self.staleness.max_concurrent // 8)


CHOICES = {
    "run.resume": ("auto", "must", "never"),
    "rollout.long_prompts": ("skip", "refuse"),
    "model.dtype": ("auto", "float32", "bfloat16"),
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
    "trainer.aggregation": ("token_mean", "sequence_mean", "constant"),
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
    "run.probe_every": 0,
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


def load(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and overrides such as "staleness.max_staleness=0"; ValueError names what is wrong."""
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    for override in overrides:
        _override(tree, override)
    return from_tree(tree)


def from_tree(tree: Mapping[str, object]) -> Config:
    """Nested tables, as TOML gives them, to a checked Config."""
    config = _build(Config, tree, "")
    _check(config)
    return config


def dump(config: Config) -> str:
    """The resolved config as TOML."""
    lines: list[str] = []
    for section in fields(config):
        value = getattr(config, section.name)
        tables = {f"env.{name}": env for name, env in value.items()} if section.name == "env" else {section.name: value}
        for name, table in tables.items():
            lines += [f"[{name}]"]
            lines += [f"{f.name} = {_toml(getattr(table, f.name))}" for f in fields(table)]
            lines += [""]
    return "\n".join(lines)


def describe() -> str:
    """Every setting with its default and its docstring, a line each."""
    lines = []
    for section, cls in sections().items():
        lines.append(f"[{section}]  {inspect.getdoc(cls)}")
        docs = field_docs(cls)
        for f in fields(cls):
            lines.append(f"  {f.name} = {default(f)}  # {docs[f.name]}")
    return "\n".join(lines)


def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a settings class."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    return {
        node.target.id: after.value.value
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }


def sections() -> dict[str, type]:
    """The class of each section, by its name in the file."""
    hints = typing.get_type_hints(Config)
    return {("env.NAME" if name == "env" else name): (Env if name == "env" else cls) for name, cls in hints.items()}


def default(f: dataclasses.Field) -> str:
    """As TOML, or "(needed)"."""
    if f.default is not dataclasses.MISSING:
        return _toml(f.default)
    return "{}" if f.default_factory is not dataclasses.MISSING else "(needed)"


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _override(tree: dict, override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ValueError(f"{override!r}: a setting on the command line is written section.key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ValueError(f"{override!r}: {part!r} is a value, not a section")
    tree[parts[-1]] = value


def _build(cls: type, tree: object, where: str) -> object:
    if not isinstance(tree, Mapping):
        raise ValueError(f"config {where or 'file'}: expected a table, got {tree!r}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(hints)}"
            raise ValueError(f"config: unknown {'setting' if where else 'section'} {where + key!r}{hint}")
        values[key] = _value(hints[key], value, f"{where}{key}")
    missing = [f.name for f in fields(cls) if default(f) == "(needed)" and f.name not in values]
    if missing:
        raise ValueError(f"config: {where}{missing[0]} is needed")
    return cls(**values)


def _value(kind: object, value: object, where: str) -> object:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, f"{where}.")
    if origin is dict and isinstance(value, Mapping):
        return dict(value) if args[1] is object else {k: _value(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is tuple and args[1:] == (...,) and isinstance(value, list | tuple):
        return tuple(_value(args[0], v, where) for v in value)
    if origin is tuple and isinstance(value, list | tuple) and len(value) == len(args):
        return tuple(_value(kind, v, where) for kind, v in zip(args, value, strict=True))
    if kind is float and type(value) in (int, float) and abs(value) < float("inf"):
        return float(value)
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and type(value) is kind:
        return value
    name = kind.__name__ if isinstance(kind, type) and not args else str(kind)
    raise ValueError(f"config: {where} = {value!r}: expected {name}")


def _check(config: Config) -> None:
    for key, choices in CHOICES.items():
        value = _get(config, key)
        if value not in choices:
            raise ValueError(f"config: {key} = {value!r}: must be one of {', '.join(choices)}")
    for key, least in AT_LEAST.items():
        value = _get(config, key)
        if not value >= least:
            raise ValueError(f"config: {key} = {value}: must be at least {least}")
    topology, rollout, staleness, trainer = config.topology, config.rollout, config.staleness, config.trainer
    inference = config.inference
    for name, env in config.env.items():
        for key, path in ((f"env.{name}.path", env.path), ("model.make", config.model.make or "a:b")):
            if path.count(":") != 1:
                raise ValueError(f"config: {key} = {path!r}: an import path is written package.module:name")
        if not env.weight > 0:
            raise ValueError(f"config: env.{name}.weight = {env.weight}: must be above 0")
    problems = [
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
        (
            topology.trainer % (topology.dp_replicate * topology.tensor_parallel * topology.context_parallel) != 0,
            f"topology.dp_replicate = {topology.dp_replicate} times tensor_parallel = {topology.tensor_parallel} times "
            f"context_parallel = {topology.context_parallel} does not divide topology.trainer = {topology.trainer}",
        ),
        (config.lora.rank > 0 and not config.lora.alpha > 0, f"lora.alpha = {config.lora.alpha}: must be above 0"),
        (config.lora.rank > 0 and not config.lora.targets, "lora.targets = []: name at least one linear layer"),
        (
            config.lora.sync == "adapter" and config.lora.rank == 0,
            "lora.sync = 'adapter' with lora.rank = 0: the whole model is trained; set lora.rank",
        ),
        (
            config.lora.sync == "adapter" and config.weights.mode != "full",
            f"lora.sync = 'adapter' with weights.mode = {config.weights.mode!r}: additions change everywhere in every "
            "step and travel over the network; use weights.mode = 'full', or lora.sync = 'merged'",
        ),
        (
            topology.inference == 1 and not config.inference.engine_on_rank0,
            "inference.engine_on_rank0 = false needs topology.inference >= 2: nobody would generate",
        ),
        (
            rollout.max_tokens >= config.inference.max_seq_len,
            f"rollout.max_tokens = {rollout.max_tokens} leaves no room for a prompt in inference.max_seq_len = "
            f"{config.inference.max_seq_len}",
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
        (
            not config.data.min_solve_rate <= config.data.max_solve_rate <= 1 or config.data.revisit > 1,
            f"data: min_solve_rate = {config.data.min_solve_rate} <= max_solve_rate = {config.data.max_solve_rate} <= "
            f"1 and revisit = {config.data.revisit} <= 1 must hold",
        ),
        (not 0 <= trainer.clip_low < 1, f"trainer.clip_low = {trainer.clip_low}: must be at least 0 and below 1"),
        (trainer.clip_high < 0, f"trainer.clip_high = {trainer.clip_high}: must be at least 0"),
        (trainer.clip_dual and trainer.clip_dual <= 1, f"trainer.clip_dual = {trainer.clip_dual}: 0 or above 1"),
        (
            trainer.importance_low > 1,
            f"trainer.importance_low = {trainer.importance_low}: at most 1, the weight of data of the policy itself",
        ),
        (
            trainer.overlong_buffer > rollout.max_tokens,
            f"trainer.overlong_buffer = {trainer.overlong_buffer}: at most rollout.max_tokens = {rollout.max_tokens}",
        ),
        (
            not (0 <= config.critic.gamma <= 1 and 0 <= config.critic.lam <= 1),
            f"critic.gamma = {config.critic.gamma} and critic.lam = {config.critic.lam}: each between 0 and 1",
        ),
        (not all(0 <= b < 1 for b in trainer.betas), f"trainer.betas = {trainer.betas}: each at least 0 and below 1"),
    ]
    for wrong, message in problems:
        if wrong:
            raise ValueError(f"config: {message}")
    try:
        _ = config.age_bound
    except ValueError as error:
        raise ValueError(f"config: staleness: {error}") from None


def _get(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def warnings(config: Config) -> list[str]:
    """What is allowed and probably not meant, a line each."""
    lines = []
    trainer, aged = config.trainer, config.age_bound.age != 0
    if aged and (trainer.loss == "ppo" or (trainer.correction == "none" and trainer.loss != "cispo")):
        lines.append(
            f"staleness.max_staleness = {config.staleness.max_staleness} ({config.age_bound}) with trainer.loss = "
            f"{trainer.loss!r} and trainer.correction = {trainer.correction!r}: no importance weight corrects for old "
            "data; 'decoupled' with 'truncate' does"
        )
    if trainer.filter_zero_spread and trainer.advantage in ("reinforce_pp", "gae") and config.rollout.group_size > 1:
        lines.append(
            f"trainer.filter_zero_spread with trainer.advantage = {trainer.advantage!r}: groups of equal rewards are "
            "given up although they would train something"
        )
    if config.run.shutdown_s > 25:
        lines.append(
            f"run.shutdown_s = {config.run.shutdown_s:g}: torchrun kills every rank 30 s after it passed a signal on"
        )
    fixed = {"staleness.order": "admission", "staleness.on_update": "drain", "staleness.adaptive": False}
    loose = [key for key, value in fixed.items() if _get(config, key) != value]
    if config.inference.deterministic and loose:
        lines.append(
            f"inference.deterministic without {', '.join(f'{key} = {fixed[key]!r}' for key in loose)}: each token "
            "is repeatable, the run as a whole is not"
        )
    return lines
