"""A trainer as the config asks for it: on a rank of a mesh, or alone for a replay.

Every choice is a name in a visible dict of the part it belongs to.  Knows nothing of messages or runs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from spmd_rl.behavior import Verdict, model_verdict
from spmd_rl.config import Config
from spmd_rl.model.causal_lm import build, check_weights, engine_dtype, head_dtype, packs, rope_limit
from spmd_rl.objective.advantages import ADVANTAGES
from spmd_rl.objective.corrections import Correction
from spmd_rl.objective.losses import LOSSES, Limits
from spmd_rl.objective.objective import AGGREGATIONS, Objective
from spmd_rl.ranks.build_engine import check_folder
from spmd_rl.trainer.critic import Credit
from spmd_rl.trainer.experts import check_router_loss
from spmd_rl.trainer.lora import check_targets
from spmd_rl.trainer.models import Models
from spmd_rl.trainer.sharding import check_dtype
from spmd_rl.trainer.tensor_parallel import check_split
from spmd_rl.trainer.trainer import Trainer
from spmd_rl.weights.low_rank import Lora


def make_trainer(
    config: Config,
    *,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    group: ProcessGroup | None = None,
    context: ProcessGroup | None = None,
) -> Trainer:
    """Weights are those of model.path; a checkpoint is loaded into it afterwards."""
    t, critic = config.trainer, config.critic
    with_critic = t.advantage == "gae"

    def model() -> PreTrainedModel:  # sharding moves it to the device layer by layer, so that it never is there whole
        place = device if mesh is None else "cpu"
        return build(config.model.path, device=place, dtype=torch.float32, weights=True)

    policy = model()
    pack = packs(policy)
    models = Models(
        policy=policy,
        reference=model() if t.kl_coefficient else None,
        critic=model() if with_critic and critic.body == "own" else None,
        shared_critic=with_critic and critic.body == "shared",
        lora=make_lora(config),
        mesh=mesh,
        context=context,
        device=device,
        compute_dtype=engine_dtype(config.model.dtype, device),
        head_dtype=head_dtype(config.model.head_dtype),
        activation_checkpointing=t.activation_checkpointing,
        cpu_offload=t.cpu_offload,
    )
    return Trainer(
        models=models,
        group=group,
        objective=make_objective(config),
        aggregation=partial(AGGREGATIONS[t.aggregates_by], longest=config.rollout.max_tokens),
        credit=Credit(
            gamma=critic.gamma,
            lam=critic.lam,
            level=critic.level,
            clip=critic.clip,
            coefficient=critic.coefficient,
            kl_coefficient=t.kl_coefficient if t.kl_in_reward else 0.0,
        )
        if with_critic
        else None,
        penalty=t.kl_coefficient if t.kl_in_reward and ADVANTAGES[t.advantage].of_batch else 0.0,
        learning_rate=t.learning_rate,
        critic_learning_rate=critic.learning_rate,
        betas=t.betas,
        weight_decay=t.weight_decay,
        warmup_steps=t.warmup_steps,
        grad_clip=t.grad_clip,
        micro_batch_tokens=t.micro_batch_tokens,
        share_prefix=t.share_prefix,
        pack=pack,
        temperature=config.rollout.temperature,
        num_minibatches=t.num_minibatches,
        num_epochs=t.num_epochs,
        interpolate_proximal=t.proximal == "loglinear",
        router_aux_coef=t.router_aux_coef,
    )


def make_lora(config: Config) -> Lora | None:
    rank, alpha, targets = config.lora.rank, config.lora.alpha, config.lora.targets
    return Lora(rank=rank, alpha=alpha, targets=targets) if rank else None


def check_model(config: Config) -> Verdict:
    """ValueError for a model that is not computed exactly here, is incomplete, or has no lora.targets."""
    check_weights(config.model.path)  # before anything has the sizes that config.json says
    model = build(config.model.path, device="cpu", dtype=torch.float32, weights=False)
    check_folder(config)
    if not packs(model):
        for setting, is_set in (
            ("trainer.share_prefix = true", config.trainer.share_prefix),
            (f"topology.context_parallel = {config.topology.context_parallel}", config.topology.context_parallel > 1),
        ):
            if is_set:
                raise ValueError(
                    f"{setting}: {type(model).__name__} carries state from token to token, so that each sequence has a "
                    "forward of its own on one rank; leave it out"
                )
    check_rope(model, config.inference.max_seq_len)
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_dtype(model, engine_dtype(config.model.dtype, place))
    if config.topology.tensor_parallel > 1:
        check_split(model, config.topology.tensor_parallel)
    if config.lora.rank:
        check_targets(model, config.lora.targets)
    if config.trainer.router_aux_coef:
        check_router_loss(model)
    verdict = model_verdict(config)
    if verdict.refusal:
        raise ValueError(f"{config.model.path}: {verdict.line}; what can be trained: docs/models.md")
    return verdict


def check_rope(model: PreTrainedModel, longest: int) -> None:
    """ValueError where sequences of a run may grow past the limit of the model's rope."""
    limit = rope_limit(model.config)
    if limit is not None and longest > limit:
        raise ValueError(
            f"inference.max_seq_len = {longest}: {type(model).__name__} has another rope for all of a sequence of more "
            f"than {limit} tokens, so what was sampled before is not what would be trained; lower it to {limit}"
        )


def make_objective(config: Config) -> Objective:
    """A KL in the reward is left to what makes advantages of it and of the rewards: a critic, the batch stage."""
    t = config.trainer
    taken = t.kl_in_reward and (t.advantage == "gae" or ADVANTAGES[t.advantage].of_batch is not None)
    return Objective(
        loss=LOSSES[t.loss],
        limits=Limits(clip_low=t.clip[0], clip_high=t.clip[1], clip_dual=t.clip_dual),
        correction=Correction(
            kind=t.correction,
            level=t.correction_level,
            low=t.importance_low,
            high=t.importance_high,
            reject=t.reject,
            reject_above=t.reject_above,
        ),
        entropy_coefficient=t.entropy,
        kl=t.kl,
        kl_coefficient=0.0 if taken else t.kl_coefficient,
        kl_in=t.kl_in,
    )
