"""Settings of the objective that are allowed together and contradict each other: a line each, with what to write.

Knows nothing of what a setting may be alone (rules.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import chain

from spmd_rl.config.settings import AUTO, Config, Trainer

GSPO_CLIP = 0.01  # some 30 times what its authors use: above it a sequence's mean ratio is hardly ever

HOLDS_ITS_WEIGHT = ("ppo", "cispo", "gspo")  # losses whose ratio is current / behavior

DEFAULT = {f.name: f.default for f in dataclasses.fields(Trainer)}


def contradictions(config: Config) -> list[str]:
    """What a setting of [trainer] makes of another."""
    return list(chain(_old_data(config), _clips(config.trainer), _kl(config.trainer), _advantages(config)))


def _old_data(config: Config) -> Iterator[str]:
    trainer, steps = config.trainer, config.trainer.steps_per_batch
    if config.age_bound.age != 0:
        if trainer.loss == "ppo" or (trainer.correction == "none" and trainer.loss not in HOLDS_ITS_WEIGHT):
            yield (
                f"staleness.max_staleness = {config.staleness.max_staleness} ({config.age_bound}) with trainer.loss = "
                f"{trainer.loss!r} and trainer.correction = {trainer.correction!r}: no importance weight corrects for "
                "old data; 'decoupled' with 'truncate' does"
            )
    elif trainer.loss == "reinforce" and trainer.correction == "none" and steps > 1:
        yield (
            f"trainer.loss = 'reinforce' and trainer.correction = 'none' with {steps} optimizer steps per batch: from "
            "the second on the data are of older weights, and nothing corrects for it; write trainer.correction = "
            "'truncate'"
        )
    truncation = ("correction_level", "importance_low", "importance_high")
    if (
        trainer.loss in HOLDS_ITS_WEIGHT
        and trainer.correction == "truncate"
        and (chosen := _chosen(trainer, *truncation))
    ):
        yield (
            f"trainer.{chosen} with trainer.loss = {trainer.loss!r} and trainer.correction = 'truncate': the ratio of "
            "this loss is its importance weight, so that there is nothing to truncate; write trainer.correction = "
            "'mask', which leaves tokens out, or trainer.loss = 'decoupled'"
        )
    if trainer.loss == "gspo" and trainer.correction == "mask" and trainer.correction_level == "token":
        yield (
            "trainer.loss = 'gspo' with trainer.correction = 'mask' and trainer.correction_level = 'token': single "
            "tokens are left out of a loss that judges sequences; write trainer.correction_level = 'geometric'"
        )
    if trainer.reject == "none" and (chosen := _chosen(trainer, "reject_above")):
        yield f"trainer.{chosen} with trainer.reject = 'none': nothing is rejected; write trainer.reject = 'off_policy'"


def _clips(trainer: Trainer) -> Iterator[str]:
    chosen = _chosen(trainer, "clip_low", "clip_high", "clip_dual")
    if trainer.loss == "reinforce" and chosen:
        yield f"trainer.{chosen} with trainer.loss = 'reinforce': it clips nothing; write trainer.loss = 'ppo'"
    if trainer.loss == "decoupled" and trainer.steps_per_batch == 1 and chosen:
        yield (
            f"trainer.{chosen} with trainer.loss = 'decoupled' and one optimizer step per batch: its ratio is to the "
            "policy at the start of the batch and is 1, so that nothing is ever clipped; write trainer.num_minibatches "
            "= 2, or leave it out"
        )
    if trainer.loss == "cispo" and trainer.clip_dual:
        yield (
            f"trainer.clip_dual = {trainer.clip_dual} with trainer.loss = 'cispo': clip_high bounds the weight of good "
            "and bad tokens alike; leave it out"
        )
    if trainer.loss == "gspo" and max(trainer.clip) > GSPO_CLIP:
        yield (
            f"trainer.loss = 'gspo' with clip_low = {trainer.clip[0]}, clip_high = {trainer.clip[1]}: the mean ratio "
            "of a sequence hardly leaves 1, so nothing is ever clipped; its authors use 3e-4 and 4e-4"
        )
    if trainer.loss == "gspo" and trainer.aggregates_by != "sequence_mean":
        yield (
            f"trainer.loss = 'gspo' with trainer.aggregation = {trainer.aggregation!r}: it judges sequences, of which "
            "long ones then weigh more; leave trainer.aggregation out for 'sequence_mean'"
        )


def _kl(trainer: Trainer) -> Iterator[str]:
    if trainer.kl_coefficient and trainer.kl_in == "loss" and trainer.kl == "k1":
        yield (
            "trainer.kl = 'k1' with trainer.kl_in = 'loss': its gradient is 0 in the mean over what the policy "
            "samples, so that it regularises nothing; write trainer.kl = 'k2' or 'k3', or trainer.kl_in = 'reward'"
        )
    if trainer.kl_in_reward and trainer.kl != "k1":
        yield (
            f"trainer.kl = {trainer.kl!r} with trainer.kl_in = 'reward': rewards pay k1, whose gradient there is that "
            "of the KL, and the other is only reported; write trainer.kl = 'k1'"
        )
    if not trainer.kl_coefficient and (chosen := _chosen(trainer, "kl", "kl_in")):
        yield f"trainer.{chosen} with trainer.kl_coefficient = 0.0: there is no KL; write trainer.kl_coefficient = 1e-3"


def _advantages(config: Config) -> Iterator[str]:
    trainer = config.trainer
    over_tokens = trainer.advantage in ("reinforce_pp", "reinforce_pp_baseline", "gae")
    if trainer.filter_zero_spread and trainer.advantage in ("reinforce_pp", "gae") and config.rollout.group_size > 1:
        yield (
            f"trainer.filter_zero_spread with trainer.advantage = {trainer.advantage!r}: groups of equal rewards are "
            "given up although they would train something; write trainer.filter_zero_spread = false"
        )
    if over_tokens and trainer.aggregates_by == "sequence_mean":
        instead = "trainer.advantage = 'grpo'" if trainer.loss == "gspo" else "trainer.aggregation = 'token_mean'"
        yield (
            f"trainer.advantage = {trainer.advantage!r} with the mean over sequences (trainer.loss = {trainer.loss!r}, "
            f"aggregation = {trainer.aggregation!r}): its advantages are 0 in the mean over tokens, not over "
            f"sequences; write {instead}"
        )
    in_trainer = trainer.advantage == "gae" or (over_tokens and trainer.kl_in_reward)
    if in_trainer and abs(trainer.advantage_scale) != 1:
        does = (
            "it scales rewards against the KL that they pay; write trainer.kl_coefficient"
            if trainer.kl_in_reward
            else "advantages are scaled to a standard deviation of 1 after it; write trainer.learning_rate"
        )
        with_ = f"trainer.advantage = {trainer.advantage!r}"
        yield f"trainer.advantage_scale = {trainer.advantage_scale} with {with_}: {does}"


def _chosen(trainer: Trainer, *names: str) -> str:
    """The first of these settings that is not as it is by default, in words."""
    return next((f"{n} = {v!r}" for n in names if (v := getattr(trainer, n)) not in (DEFAULT[n], AUTO)), "")
