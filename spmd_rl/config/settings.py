"""Every setting, its unit and what moves when it moves.  Imports no torch, so a wrong key is answered at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spmd_rl import topology
from spmd_rl.bounds import Bound, age_bound, batches_ahead

SETTINGS = dataclass(frozen=True, kw_only=True)


@SETTINGS
class Run:
    """The run as a whole."""

    dir: str = ""
    """run directory, on a file system that all nodes see; empty: runs/<config name>-<time of the first start>"""
    steps: int = 100
    """optimizer batches to train"""
    seed: int = 0
    """of the data order and of every sampled token"""
    resume: str = "auto"
    """auto: from the newest complete checkpoint, or from the start where there is none, with what is there moved to
    abandoned/; must: there must be one; never: a fresh directory"""
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
    """share of failed episodes of two batches' worth drawn in a row, beyond which the run fails; 1: never"""
    long_prompts: str = "skip"
    """skip: prompts that leave no room in inference.max_seq_len are left out, counted; refuse: the first ends it"""


@SETTINGS
class Data:
    """Which tasks are drawn: by how often they were solved lately, and from where."""

    min_solve_rate: float = 0.0
    """tasks solved less often than this are passed over; 0: off"""
    max_solve_rate: float = 1.0
    """tasks solved more often than this are passed over; 1: off"""
    revisit: float = 0.1
    """share of the tasks passed over that are run all the same, to see whether their solve rate has changed"""
    restart_at: int = -1
    """version of the checkpoint at which the data start again at 0, on purpose: a resume there may bring other rows,
    seed, weights of environments or chat template, and what was unfinished is of the new data; -1: the data go on"""


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
    """n: with mode = delta, every n-th version is sent whole"""
    receive: str = "shadow"
    """shadow | in_place: into memory of its own while the engine goes on, or over the version before while it pauses:
    one set of weights less; the pause is as long as the transfer and, on CPUs, the layout for the processor (native
    only: vllm copies what it takes, and needs one set beside its own)"""


@SETTINGS
class Trainer:
    """The optimizer step."""

    learning_rate: float = 1e-6
    """AdamW, after warm-up"""
    warmup_steps: int = 0
    """steps over which the learning rate rises linearly"""
    betas: tuple[float, float] = (0.9, 0.95)
    """of AdamW"""
    weight_decay: float = 0.0
    """of AdamW"""
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
    """none | off_policy | off_policy_negative (advantage below 0): drops sequences that the policy has left"""
    reject_above: float = 0.1
    """nats; such a sequence is one where log behavior - log current, averaged over its tokens, is more than this"""
    aggregation: str = "token_mean"
    """token_mean | sequence_mean | constant (divides by sequences · rollout.max_tokens)"""
    entropy: float = 0.0
    """coefficient of the entropy bonus"""
    kl: str = "k3"
    """k1 | k2 | k3: estimate of the KL to the reference model, which is model.path as it was"""
    kl_coefficient: float = 0.0
    """weight of that KL; 0: none, and no reference model is loaded"""
    kl_in: str = "loss"
    """loss | reward (k1, taken off each token's reward): where the KL is added"""
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

    @property
    def steps_per_batch(self) -> int:
        """num_minibatches · num_epochs, optimizer steps from one version to the next."""
        return self.num_minibatches * self.num_epochs


@SETTINGS
class Lora:
    """Train low-rank additions instead of the model; engines compute with merged weights."""

    rank: int = 0
    """of the additions; 0: off, the model itself is trained"""
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
    """weight of the value loss"""
    clip: float = 0.2
    """how far a value may move within a batch before its gradient is cut"""
    gamma: float = 1.0
    """discount per token or turn"""
    lam: float = 0.95
    """lambda of GAE; 1: Monte Carlo, 0: one step"""
    level: str = "token"
    """token | turn: what is credited"""


@SETTINGS
class Eval:
    """Evaluation, beside training and outside the gate."""

    every: int = 0
    """steps between two evaluations; 0: only before the first step and at the end; -1: never"""
    num_tasks: int = 32
    """different tasks per environment at most"""
    samples: int = 1
    """rollouts per task"""
    temperature: float = 0.0
    """of sampling; 0: greedy"""
    top_p: float = 1.0
    """nucleus; 1: off"""
    top_k: int = 0
    """most likely tokens sampled from; 0: off"""
    max_concurrent: int = 0
    """rollouts in flight at most while training runs; 0: max_concurrent / 8"""
    pin: bool = False
    """hold weight updates while an evaluation runs, so that one version makes it all; it must end in stall_timeout_s"""
    solved_at: float = 1.0
    """least reward that counts as solved, for pass@k, avg@k and the difficulty of tasks"""


@SETTINGS
class Checkpoint:
    """What a resume starts from."""

    every: int = 20
    """steps between two checkpoints of 12 bytes a parameter each: what a crash loses at most; 0: only at the end"""
    keep_last: int = 2
    """checkpoints kept; older ones are removed"""


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
    def admissible(self) -> int | None:
        """(S+1)·B, rollouts that may be admitted and not yet trained; None: the ship-side gate admits without end."""
        return (self.staleness.max_staleness + 1) * self.rollout.batch_size if self.staleness.gate != "ship" else None

    @property
    def in_flight(self) -> int:
        """Rollouts that may be in flight together: C, or what the gate admits where that is less."""
        return min(self.staleness.max_concurrent, self.admissible or self.staleness.max_concurrent)

    @property
    def batches_ahead(self) -> int:
        """Batches that are shipped before the version of the first of them is live."""
        return batches_ahead(gate=self.staleness.gate, max_staleness=self.staleness.max_staleness)

    @property
    def weights_kept(self) -> int:
        """On disk: the live version, the next one that engines take, and batches_ahead that trainers are past that."""
        return self.batches_ahead + 2

    @property
    def on_disk(self) -> dict[str, Any]:
        """What disk.needed_bytes asks for."""
        return {
            "keep_last": self.checkpoint.keep_last,
            "rank": self.lora.rank,
            "targets": self.lora.targets,
            "own_critic": self.trainer.advantage == "gae" and self.critic.body == "own",
            "num_weights": self.weights_kept + 1 if self.weights.mode == "disk" else 0,  # and the one being written
            "weight_bytes": 2 if self.model.dtype == "bfloat16" else 4,  # auto: at most
        }

    @property
    def eval_concurrent(self) -> int:
        """eval.max_concurrent, or C / 8, at least 1."""
        return self.eval.max_concurrent or max(1, self.staleness.max_concurrent // 8)
