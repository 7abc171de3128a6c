"""What becomes of rewards between a rollout and the metrics."""

import asyncio

import numpy as np
import pytest

from spmd_rl.config.age_bound import age_bound
from spmd_rl.envs.single_turn import SingleTurn
from spmd_rl.metrics.report import batch_metrics, reward_metrics
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.objective.advantages import grpo
from spmd_rl.orchestrator.order import make_order
from spmd_rl.orchestrator.train_sink import KEPT, TrainSink, zero_spread
from spmd_rl.types import Batch, Task
from tests import fakes
from tests.says import Says, write_folder


def test_parts_one_and_zero_with_weights_seven_and_three_tenths_are_a_reward_of_seven_tenths(tmp_path):
    tokenizer = Tokenizer(write_folder(tmp_path))
    env = SingleTurn(
        tokenizer=tokenizer,
        prompt=lambda data: "x",
        reward=lambda data, reply: {"right": 1.0, "form": 0.0},
        weights={"right": 0.7, "form": 0.3},
    )
    rollout = asyncio.run(env.rollout(Task(env="sums", task_id="t"), Says(tokenizer, "7<|end|>")))
    values = reward_metrics([rollout])
    assert values == {"reward": 0.7, "reward/sums": 0.7, "reward/sums/right": 1.0, "reward/sums/form": 0.0}


def test_a_rollout_of_many_turns_and_segments_counts_its_reward_once():
    work = fakes.work(0, size=2)
    many, one = fakes.rollout(work, 0, versions=[0] * 9, reward=1.0), fakes.rollout(work, 1, reward=0.0)
    many.num_turns, many.segments = 3, [2, 5]
    assert reward_metrics([many, one])["reward"] == 0.5


def test_lengths_count_what_was_sampled_and_not_prompts_or_tool_replies():
    work = fakes.work(0, size=2)
    rollouts = [fakes.rollout(work, i, versions=[0] * 4) for i in range(2)]
    rollouts[0].append(np.array([7] * 50, np.int32))  # what a tool said
    batch = Batch(index=0, rollouts=rollouts, advantages=np.array([1.0, -1.0], np.float32))
    assert batch_metrics(batch, given_up={}, usable=lambda _: True)["rollout/length"] == 4.0


def test_what_was_not_measured_is_in_no_mean():
    work = fakes.work(0, size=3)
    rollouts = [fakes.rollout(work, 0, reward=1.0), fakes.rollout(work, 1, reward=0.5)]
    lost = fakes.rollout(work, 2, failed=True)  # a NaN, a time-out
    assert reward_metrics([*rollouts, lost])["reward"] == 0.75


@pytest.mark.parametrize(("rewards", "verdict"), [([0.0, 1.0], KEPT), ([0.0, 0.0], "zero_spread")])
def test_a_group_whose_members_were_all_truncated_is_judged_by_its_rewards(rewards, verdict):
    sink = TrainSink(
        batch_size=2,
        group_size=2,
        advantages=grpo,
        order=make_order("completion"),
        bound=age_bound(
            gate="admission", order="completion", max_staleness=0, batch_size=2, group_size=2, max_concurrent=2
        ),
        filters={"zero_spread": zero_spread},
        max_empty_batches=9,
    )
    work = fakes.work(0, size=2)
    sink.admitted(work)
    group = fakes.group(work, rewards)
    for rollout in group.rollouts:
        rollout.finish_reason = "length"
    assert sink.add(group) == verdict
    if verdict == KEPT:
        assert np.sign(sink.next_batch(0).advantages).tolist() == [-1.0, 1.0]


def test_the_trainable_share_is_of_everything_that_was_sampled_for_the_batch():
    work = fakes.work(0, size=4)
    batch = Batch(
        index=0,
        rollouts=[fakes.rollout(work, i) for i in range(4)],
        advantages=np.array([1.0, -1.0, 0.0, 1.0], np.float32),
    )
    given_up = {"filtered": [fakes.rollout(work)] * 10, "dropped": [fakes.rollout(work)] * 6}
    values = batch_metrics(batch, given_up=given_up, usable=lambda _: True)
    shown = {name: values[f"rollout/{name}"] for name in ("filtered", "dropped", "trainable_share")}
    assert shown == {"filtered": 10, "dropped": 6, "trainable_share": 3 / 20}
