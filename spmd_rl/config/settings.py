"""Every setting, its unit and what moves when it moves.  Imports no torch, so a wrong key is answered at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spmd_rl.config import topology as split_of_ranks
from spmd_rl.config.age_bound import Bound, age_bound, batches_ahead

AUTO = -1.0  # stands for the number that the loss is usually used with

USUAL: dict[str, tuple[float, float, str]] = {
    "decoupled": (0.2, 0.28, "token_mean"),
    "ppo": (0.2, 0.28, "token_mean"),
    "cispo": (1.0, 4.0, "token_mean"),
    "gspo": (3e-4, 4e-4, "sequence_mean"),
    "reinforce": (0.2, 0.28, "token_mean"),
}
"""By loss: clip_low, clip_high and aggregation where they are not chosen."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run as a whole."""

    dir: str = ""
    """run directory, on a file system that all nodes see; empty: runs/<config name>-<time of the first start>
    [-] where everything that the run leaves behind lies"""
    steps: int = 100
    """batches to train; each makes one version
    [batches] how long it trains: `version` ends here, and no rollout is admitted that no batch would train"""
    seed: int = 0
    """of the data order and of every sampled token
    [-] `data/drawn` brings other tasks, sampling other tokens"""
    resume: str = "auto"
    """auto: from the newest complete checkpoint, or from the start where there is none, with what is there moved to
    abandoned/; must: there must be one; never: a fresh directory
    [-] whether `version` begins at 0"""
    metrics_interval_s: float = 10.0
    """seconds between two lines of interval metrics
    [s] lines of kind `interval`"""
    probe_every: int = -1
    """versions between two probes after the one at the start; -1: as often as costs 1% of the time; 0: none at all
    [versions] lines of kind `probe`, how soon an engine that samples wrongly is found; `probe/cost_s` each"""
    stall_timeout_s: float = 600.0
    """seconds without progress of a rank after which the run fails
    [s] when a run that stands still fails; too low, and slow disks or long episodes end it"""
    shutdown_s: float = 20.0
    """seconds that a stopping run has for finishing and saving
    [s] how long a signal may take to end the run; too low, and its checkpoint is lost"""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How the ranks of the job are split; inference + trainer must equal WORLD_SIZE."""

    inference: int = 1
    """inference ranks; rank 0 is one of them and runs the orchestrator
    [ranks] `engine/tokens_per_s` rises, `trainer/wait_s` falls"""
    trainer: int = 1
    """trainer ranks
    [ranks] `trainer/step_s` and memory per rank fall"""
    dp_replicate: int = 1
    """replicas of the sharded trainer; divides topology.trainer
    [replicas] traffic between nodes falls, memory per rank rises"""
    tensor_parallel: int = 1
    """trainer ranks that split every layer (Llama and Qwen families); neighbours, so best within a node
    [ranks] memory per rank falls; `trainer/mfu`, by the traffic in each layer"""
    context_parallel: int = 1
    """trainer ranks that split the tokens of their rollouts; for sequences too long for one device
    [ranks] `trainer/peak_memory_bytes` falls for long sequences"""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The policy's model."""

    path: str
    """Hugging Face folder (config.json, safetensors, tokenizer)
    [-] everything"""
    make: str = ""
    """import path of a function that writes the folder when it is missing, such as spmd_rl.demo.tiny_model:make
    [-] nothing, once the folder is there"""
    dtype: str = "auto"
    """float32 | bfloat16 that trainers and engines compute in; auto: bfloat16 on GPUs, float32 on the CPU. Trained
    weights and the optimizer are float32 in either
    [-] bfloat16: memory, `engine/tokens_per_s`, `trainer/mfu`; `probe/kl` rises"""
    head_dtype: str = "float32"
    """float32 | model: of logits and the products that they are made of, in trainers and engines; model: model.dtype
    [-] model: with bfloat16, memory of one more head weight in float32 per rank falls, `probe/kl` rises"""
    template: dict[str, object] = field(default_factory=dict)
    """what the chat template is told beside the messages, such as { enable_thinking = false }
    [-] the tokens of every prompt"""


@dataclass(frozen=True, kw_only=True)
class Env:
    """One source of tasks."""

    path: str
    """import path of the environment's class, such as spmd_rl.envs.arithmetic:Arithmetic
    [-] `reward/ENV`"""
    weight: float = 1.0
    """share of the training tasks, relative to the other environments
    [relative] how often its tasks are drawn, so what `reward` is a mean of"""
    args: dict[str, object] = field(default_factory=dict)
    """keyword arguments of the class
    [-] what its class makes of them"""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """What is sampled."""

    batch_size: int = 64
    """B, rollouts per batch, for gate and trainer alike; a multiple of group_size
    [rollouts] noise of `trainer/grad_norm` falls; `trainer/step_s`, the time per version rises"""
    group_size: int = 8
    """G, rollouts of one prompt, whose rewards are compared with each other
    [rollouts] better baselines, `rollout/filtered` falls; fewer prompts in a batch"""
    max_tokens: int = 256
    """sampled tokens per turn at most
    [tokens] `rollout/truncated` falls; `rollout/length`, memory for keys and values rise"""
    temperature: float = 1.0
    """of sampling, and of the log-probs that are trained
    [-] `trainer/entropy`, spread of rewards rise"""
    top_p: float = 1.0
    """nucleus; 1: off
    [probability] lower: less variety; log-probs and `trainer/entropy` stay those of all tokens"""
    top_k: int = 0
    """most likely tokens sampled from; 0: off
    [tokens] lower: less variety; log-probs and `trainer/entropy` stay those of all tokens"""
    max_retries: int = 1
    """further attempts of an episode that raised, before it counts as failed
    [attempts] `rollout/failed` falls; wasted tokens in the ledger rise"""
    max_failure_rate: float = 0.5
    """share of failed episodes of two batches' worth drawn in a row, beyond which the run fails; 1: never
    [share] how early a broken environment ends the run"""
    long_prompts: str = "skip"
    """skip: prompts that leave no room in inference.max_seq_len are left out, counted; refuse: the first ends it
    [-] `rollout/skipped`, or a failed run"""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which tasks are drawn: by how often they were solved lately, and from where."""

    min_solve_rate: float = 0.0
    """tasks solved less often than this are passed over; 0: off
    [share] `data/hopeless`, `data/passed_over` rise; `rollout/trainable_share` rises"""
    max_solve_rate: float = 1.0
    """tasks solved more often than this are passed over; 1: off
    [share] lower: `data/solved`, `data/passed_over`, `rollout/trainable_share` rise"""
    revisit: float = 0.1
    """share of the tasks passed over that are run all the same, to see whether their solve rate has changed
    [share] `data/passed_over` falls; more of what teaches nothing is sampled"""
    restart_at: int = -1
    """version of the checkpoint at which the data start again at 0, on purpose: a resume there may bring other rows,
    seed, weights of environments or chat template, and what was unfinished is of the new data; -1: the data go on
    [version] `data/drawn` begins at 0"""


@dataclass(frozen=True, kw_only=True)
class Staleness:
    """How far generation may run ahead of training."""

    max_staleness: int = 2
    """S, policy versions; 0: synchronous
    [versions] `age/rollout_mean` rises; `trainer/wait_s` and `engine/idle` fall"""
    max_concurrent: int = 64
    """C, rollouts in flight at most
    [rollouts] `engine/running`, `queue/in_flight` rise until S is the limit"""
    gate: str = "admission"
    """admission: bounds what is started; ship: bounds what is handed to the trainer
    [-] ship: `time/parked_s`, ages rise up to `age/bound`"""
    order: str = "admission"
    """completion | oldest | admission: which finished rollouts are trained first
    [-] `age/rollout_max` against `trainer/wait_s`: completion never waits for stragglers"""
    window: int = 1
    """w, look-ahead of order = admission, in tickets; w <= group_size gives age <= S exactly
    [tickets] `time/held_back_s` falls; `age/bound` rises by a version for each B of it"""
    max_age: int = -1
    """M, hard cap of the age of what is trained, >= max_staleness; -1: none
    [versions] lower: `age/rollout_max` falls; `time/held_back_s` or `rollout/dropped` rises"""
    over_age: str = "wait"
    """wait: hold back batches so that nothing grows too old; drop: give such rollouts up
    [-] wait: `time/held_back_s`; drop: `rollout/dropped`, and lengths lean towards the short"""
    queue_size: int = 64
    """finished rollouts that gate = ship lets wait
    [rollouts] `queue/out_depth`, ages rise; `engine/idle` falls"""
    adaptive: bool = False
    """admit only what keeps the trainer busy, S being the ceiling
    [-] `admission/limit`, ages fall where the trainer never waits"""
    target_idle: float = 0.02
    """share of time that adaptive admission lets the trainer wait
    [share] `admission/limit`, ages fall; `trainer/idle` rises"""
    on_update: str = "continue"
    """continue | hold | restart: what running sequences do when new weights arrive; drain: new weights wait until all
    that was admitted under the old ones has ended, so that each rollout is of the version of its admission
    [-] hold, drain: `engine/idle`; restart: wasted tokens; continue: `engine/recompute`, mixed versions"""


@dataclass(frozen=True, kw_only=True)
class Inference:
    """The engines."""

    engine: str = "native"
    """native | vllm (needs the extra: pip install 'spmd_rl[vllm]')
    [-] `engine/tokens_per_s`, `probe/kl`"""
    tensor_parallel: int = 1
    """inference ranks that make one engine (vllm only)
    [ranks] larger models fit; fewer engines"""
    engine_on_rank0: bool = True
    """false: rank 0 is the orchestrator only
    [-] false: one rank less generates; `late_s` falls where environments compute much"""
    max_slots: int = 64
    """sequences decoded together per engine
    [sequences] `engine/running` rises, `engine/waiting` falls; memory for keys and values rises"""
    max_seq_len: int = 2048
    """tokens of prompt and completions together; at most those up to which the model's rope stays the same
    [tokens] `rollout/skipped`, `rollout/truncated` fall; memory for keys and values rises"""
    kv_on_update: str = "recompute"
    """recompute | keep: KV cache (and states) of running sequences when new weights arrive
    [-] keep: `engine/recompute` is 0; `trainer/mismatch_kl` rises"""
    deterministic: bool = False
    """compute each sequence alone, so that nothing depends on what else is in the batch (native only)
    [-] `engine/tokens_per_s` falls much; tokens repeat to the bit"""
    kv_cache_mib: int = 0
    """KV cache of each rank with an engine, MiB, states included; requests wait for room; 0: as max_slots need
    [MiB] `engine/kv_waiting`, `engine/kv_used` fall; memory rises"""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How new weights get to the engines."""

    mode: str = "full"
    """full | delta: all, or what changed, over the network; disk: as Hugging Face folders in weights/ of the run
    [-] `weights/sent_bytes`, `weights/send_s`; disk: `trainer/hold_s`"""
    anchor_every: int = 16
    """n: with mode = delta, every n-th version is sent whole
    [versions] `weights/sent_bytes` falls; a version that is sent whole comes more rarely"""
    receive: str = "shadow"
    """shadow | in_place: into memory of its own while the engine goes on, or over the version before while it pauses:
    one set of weights less; the pause is as long as the transfer and, on CPUs, the layout for the processor (native
    only: vllm copies what it takes, and needs one set beside its own)
    [-] in_place: memory falls by one set of weights; `weights/pause_s` rises"""


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The optimizer step."""

    learning_rate: float = 1e-6
    """AdamW, after warm-up
    [per optimizer step] `weights/update_norm`, `trainer/kl_behavior_proximal` rise"""
    warmup_steps: int = 0
    """batches over which the learning rate rises linearly, from 1/warmup_steps of it
    [batches] `trainer/learning_rate` rises later"""
    betas: tuple[float, float] = (0.9, 0.95)
    """of AdamW
    [-] how long a gradient counts, and its square"""
    weight_decay: float = 0.0
    """of AdamW
    [-] `trainer/weight_norm` falls"""
    grad_clip: float = 1.0
    """largest gradient norm, of the policy and of a critic with a body of its own each
    [L2 norm] lower: `weights/update_norm` falls where `trainer/grad_norm` is above it"""
    advantage: str = "grpo"
    """grpo | grpo_population | dr_grpo | rloo | reinforce_pp | reinforce_pp_baseline | gae: rewards to advantages
    [-] `trainer/grad_norm`, `rollout/trainable_share`; gae: `trainer/value_loss`, a critic's memory"""
    advantage_scale: float = 1.0
    """factor on every advantage; -1 unlearns (a control)
    [-] `trainer/grad_norm`"""
    filter_zero_spread: bool = True
    """give up groups whose rewards are all equal: they train nothing
    [-] `rollout/filtered`; false: such groups fill batches, `rollout/trainable_share` of a batch falls"""
    mask_truncated: bool = False
    """rollouts cut off at max_tokens train nothing and are in no baseline and no denominator
    [-] `trainer/tokens`, `rollout/length` fall by those cut off; without it length is punished"""
    overlong_buffer: int = 0
    """tokens before max_tokens over which the reward that is trained on falls by 1; 0: off
    [tokens] `rollout/truncated`, `rollout/length` fall"""
    loss: str = "decoupled"
    """decoupled | ppo | cispo | gspo | reinforce: the objective of a token
    [-] `trainer/clip_share`, `trainer/ratio_mean`"""
    clip_low: float = AUTO
    """ratio is clipped below 1 - clip_low; -1: 0.2, with gspo 3e-4, with cispo 1 (not at all)
    [ratio] `trainer/clip_share` falls; larger steps away from bad tokens"""
    clip_high: float = AUTO
    """ratio is clipped above 1 + clip_high; -1: 0.28, with gspo 4e-4, with cispo 4
    [ratio] `trainer/clip_share` falls; `trainer/entropy` is kept up"""
    clip_dual: float = 0.0
    """bound of a token's loss where its advantage is negative, in advantages; 0: none, 3 is usual
    [advantages] lower: `trainer/clip_share` rises; single bad tokens weigh less"""
    correction: str = "truncate"
    """truncate | mask | none: what the importance weight does outside its bounds
    [-] `trainer/importance_capped_share` is cut to the bound, left out, or kept"""
    correction_level: str = "token"
    """token | sequence (product of its tokens) | geometric (their mean): what the weight is taken over
    [-] `trainer/importance_max`: products leave the bounds sooner than tokens or means"""
    importance_low: float = 0.0
    """least importance weight
    [ratio] `trainer/importance_capped_share` rises"""
    importance_high: float = 2.0
    """largest importance weight
    [ratio] `trainer/importance_capped_share` falls; noise of old tokens rises"""
    reject: str = "none"
    """none | off_policy | off_policy_negative (advantage below 0): drops sequences that the policy has left
    [-] `trainer/rejected_share`"""
    reject_above: float = 0.1
    """nats; such a sequence is one where log behavior - log current, averaged over its tokens, is more than this
    [nats per token] `trainer/rejected_share` falls"""
    aggregation: str = "auto"
    """token_mean | sequence_mean | constant (divides by rollouts · rollout.max_tokens); auto: sequence_mean with gspo,
    token_mean otherwise
    [-] `trainer/loss`, `trainer/grad_norm`; whether long replies weigh more"""
    entropy: float = 0.0
    """coefficient of the entropy bonus
    [nats per token] `trainer/entropy` rises; `trainer/computed_tokens` is all of `trainer/tokens`"""
    kl: str = "k3"
    """k1 | k2 | k3: estimate of the KL to the reference model, which is model.path as it was
    [-] `trainer/kl_reference`, `trainer/grad_norm`"""
    kl_coefficient: float = 0.0
    """weight of that KL; 0: none, and no reference model is loaded
    [per nat] `trainer/kl_reference` falls; a second model's memory, one more forward"""
    kl_in: str = "loss"
    """loss | reward (k1 of the policy at the start of the batch, taken off each token's reward): where the KL is added
    [-] reward: the KL of later tokens counts too"""
    router_aux_coef: float = 0.0
    """weight of the loss that spreads tokens over experts (Switch Transformer); 0: off
    [-] `trainer/router_loss`, `trainer/expert_load_max` fall; one more forward, all of `trainer/tokens` are computed"""
    proximal: str = "recompute"
    """recompute | loglinear (no extra forward): log-probs at the start of a batch of several minibatches
    [-] loglinear: `trainer/step_s` falls; `trainer/ratio_mean` is an estimate"""
    num_minibatches: int = 1
    """parts of a batch, the same on any number of trainer ranks, with an optimizer step each; versions count batches
    [optimizer steps per pass] `trainer/optimizer_steps`, `age/optimizer_steps_max`, `trainer/clip_share` rise"""
    num_epochs: int = 1
    """passes over a batch
    [passes] `trainer/optimizer_steps`, `age/optimizer_steps_max`, `trainer/step_s`, `trainer/clip_share` rise"""
    micro_batch_tokens: int = 4096
    """tokens per forward pass at most (one longer sequence goes alone, as does each of a model that carries state)
    [tokens] `trainer/num_microbatches` falls, `trainer/mfu`, `trainer/peak_memory_bytes` rise"""
    share_prefix: bool = False
    """compute once what the rollouts of a group begin with alike: for prompts longer than the replies
    [-] `trainer/shared_tokens` rises, `trainer/step_s` falls"""
    activation_checkpointing: bool = False
    """recompute activations in the backward pass
    [-] `trainer/peak_memory_bytes` falls, `trainer/step_s` rises by a third"""
    cpu_offload: bool = False
    """keep weights, gradients and optimizer in host memory between uses
    [-] device memory falls, `trainer/step_s` rises"""
    max_empty_batches: int = 3
    """batches' worth of groups in a row without anything trainable, after which the run stops with an error
    [batches] how early a run that learns nothing ends"""

    @property
    def clip(self) -> tuple[float, float]:
        """clip_low and clip_high, or what the loss is usually clipped with."""
        low, high, _ = USUAL[self.loss]
        return low if self.clip_low == AUTO else self.clip_low, high if self.clip_high == AUTO else self.clip_high

    @property
    def aggregates_by(self) -> str:
        """The aggregation, or what the loss is usually aggregated by."""
        return USUAL[self.loss][2] if self.aggregation == "auto" else self.aggregation

    @property
    def kl_in_reward(self) -> bool:
        """Tokens pay for their distance from the reference."""
        return self.kl_in == "reward" and self.kl_coefficient > 0

    @property
    def steps_per_batch(self) -> int:
        """num_minibatches · num_epochs, optimizer steps from one version to the next."""
        return self.num_minibatches * self.num_epochs


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Train low-rank additions instead of the model; engines compute with merged weights."""

    rank: int = 0
    """of the additions; 0: off, the model itself is trained
    [-] what can be learned, `trainer/peak_memory_bytes` rise; checkpoints are small"""
    alpha: float = 16.0
    """additions are scaled by alpha / rank
    [-] `weights/update_norm` rises, as with the learning rate"""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """last parts of the names of linear layers; of the default, those of an MLP are left out where a model has none,
    because experts are no linear layers
    [-] what can be learned; `trainer/peak_memory_bytes`"""
    sync: str = "merged"
    """merged | adapter: what travels. adapter: the frozen model once, then additions alone, merged where they arrive to
    the same bits; an engine's rank then holds the model three times instead of twice
    [-] adapter: `weights/sent_bytes` falls"""


@dataclass(frozen=True, kw_only=True)
class Critic:
    """Values for trainer.advantage = gae; without effect otherwise."""

    body: str = "own"
    """own | shared: a second model of model.path, or a head on the policy
    [-] shared: `trainer/peak_memory_bytes`, `trainer/step_s` fall"""
    learning_rate: float = 1e-5
    """AdamW, after warm-up
    [per optimizer step] `trainer/value_loss` falls sooner"""
    coefficient: float = 0.5
    """weight of the value loss
    [-] `trainer/value_loss` falls; with a shared body the policy moves less by its own loss"""
    clip: float = 0.2
    """how far a value may move within a batch before its gradient is cut
    [rewards] `trainer/value_loss` falls sooner; less steadily"""
    gamma: float = 1.0
    """discount per token or turn
    [per token or turn] lower: what comes late counts less, `trainer/value_mean` falls"""
    lam: float = 0.95
    """lambda of GAE; 1: Monte Carlo, 0: one step
    [per token or turn] noise of advantages rises, their bias falls"""
    level: str = "token"
    """token | turn: what is credited
    [-] turn: one advantage for all tokens of a turn"""


@dataclass(frozen=True, kw_only=True)
class Eval:
    """Evaluation, beside training and outside the gate."""

    every: int = 0
    """batches between two evaluations; 0: only before the first step and at the end; -1: never
    [batches] lines of kind `eval`; `eval_in_flight` beside training"""
    num_tasks: int = 32
    """different tasks per environment at most
    [tasks] noise of `eval/ENV/reward` falls, time per evaluation rises"""
    samples: int = 1
    """rollouts per task
    [rollouts] `eval/ENV/pass@K` up to it; time per evaluation rises"""
    temperature: float = 0.0
    """of sampling; 0: greedy
    [-] `eval/ENV/avg@K` falls, `eval/ENV/pass@K` rises"""
    top_p: float = 1.0
    """nucleus; 1: off
    [probability] as eval.temperature"""
    top_k: int = 0
    """most likely tokens sampled from; 0: off
    [tokens] as eval.temperature"""
    max_concurrent: int = 0
    """rollouts in flight at most while training runs; 0: max_concurrent / 8
    [rollouts] evaluations end sooner; `engine/waiting` of training rises"""
    pin: bool = False
    """hold weight updates while an evaluation runs, so that one version makes it all; it must end in stall_timeout_s
    [-] `eval/pin_stall_s`, ages rise; `eval/ENV/oldest_version` is `eval/ENV/newest_version`"""
    solved_at: float = 1.0
    """least reward that counts as solved, for pass@k, avg@k and the difficulty of tasks
    [reward] `eval/ENV/avg@K`, `eval/ENV/pass@K`, `data/solved` fall"""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a resume starts from."""

    every: int = 20
    """batches between two checkpoints of 12 bytes a parameter each: what a crash loses at most; 0: only at the end
    [batches] what a crash loses rises; writing beside training falls"""
    keep_last: int = 2
    """checkpoints kept; older ones are removed
    [checkpoints] disk"""


@dataclass(frozen=True, kw_only=True)
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
    def split(self) -> split_of_ranks.Topology:
        """Which rank does what."""
        return split_of_ranks.Topology(
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
