"""Several engines: who gets which group, and what is said of each."""

from pathlib import Path

import numpy as np
import pytest
import torch

from spmd_rl.demo.tiny_model import random_model, write_model
from spmd_rl.engine.native import NativeEngine
from spmd_rl.metrics.engine_rates import EngineFigures
from spmd_rl.model.causal_lm import build
from spmd_rl.orchestrator.engine_pool import EnginePool
from spmd_rl.packing.messages import CancelGroup, StartGroup
from spmd_rl.types import GroupWork, Rollout, Sampling, Task

SIZE = 4  # members of a group
TASK = Task(env="e", task_id="0")


def group(number: int, purpose: str = "train") -> GroupWork:
    return GroupWork(group_id=number, first_ticket=number * SIZE, size=SIZE, task=TASK, version=0, purpose=purpose)


def member_of(number: int, purpose: str = "train") -> Rollout:
    return Rollout(env="e", task_id="0", group_id=number, purpose=purpose)


def test_a_group_goes_whole_to_the_engine_with_the_fewest_in_flight():
    started, cancelled = [], []

    def send(rank, message):
        match message:
            case StartGroup(work=work):
                started.append((rank, work.purpose, work.group_id))
            case CancelGroup(first_ticket=first, size=size, purpose=purpose):
                cancelled.append((rank, purpose, first, size))

    pool = EnginePool(engines=(0, 2), send=send)
    for number in range(3):
        pool.submit(group(number))
    assert started == [(0, "train", 0), (2, "train", 1), (0, "train", 2)]
    for _ in range(SIZE):
        pool.ended(member_of(0))
        pool.ended(member_of(2))
    pool.submit(group(1, "eval"))  # another one than group 1 of training
    pool.cancel(group(1))
    pool.cancel(group(1, "eval"))
    assert started[-1] == (0, "eval", 1)
    assert cancelled == [(2, "train", SIZE, SIZE), (0, "eval", SIZE, SIZE)]
    assert pool.in_flight == {0: SIZE, 2: SIZE}
    assert pool.ended_by == {0: 2 * SIZE, 2: 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, random_model(0))
    return path


def test_an_engine_that_takes_four_times_as_long_for_a_step_gets_a_fifth(folder):
    weights = {name: parameter.detach() for name, parameter in random_model(0).named_parameters()}
    engines = {}
    for rank in (0, 1):
        model = build(folder, device="cpu", dtype=torch.float32, weights=False)
        engines[rank] = NativeEngine(model=model, device=torch.device("cpu"), max_slots=64, max_seq_len=64)
        engines[rank].load_weights(weights, 0)

    def send(rank: int, message: StartGroup) -> None:
        for ticket in message.work.tickets:
            engines[rank].submit(ticket, np.arange(3, 9), Sampling(max_tokens=1 + ticket * 7 % 12, seed=ticket))

    pool = EnginePool(engines=(0, 1), send=send)
    made: dict[int, set[int]] = {}  # engines that had a hand in a group
    num_groups, num_ended = 0, 0
    while num_ended < 500:
        while sum(pool.in_flight.values()) < 48:  # as the gate has room
            pool.submit(group(num_groups))
            num_groups += 1
        for rank in (0, 0, 0, 0, 1):
            for ticket, _ in engines[rank].step():
                made.setdefault(ticket // SIZE, set()).add(rank)
                pool.ended(member_of(ticket // SIZE))
                num_ended += 1
    assert all(len(ranks) == 1 for ranks in made.values())
    assert 0.15 < pool.ended_by[1] / num_ended < 0.28
    assert sum(pool.ended_by.values()) == num_ended


def counters(**changed: float) -> dict[str, float]:
    zero = dict.fromkeys(
        (
            "busy_s",
            "pause_s",
            "recompute_s",
            "slot_s",
            "waiting_s",
            "kv_waiting_s",
            "tokens",
            "swaps",
            "kv_used",
            "version",
        ),
        0,
    )
    return {**zero, "rollouts": 0, **changed}


def test_figures_of_two_engines_since_the_count_before():
    times = iter([10.0, 12.0, 20.0])
    figures = EngineFigures(clock=lambda: next(times))
    assert figures.rates("step") == {} and figures.within == {} and figures.summary() == {}
    figures.count({0: counters(), 3: counters()})
    figures.mark()
    figures.count({0: counters(tokens=100, busy_s=2, slot_s=3), 3: counters(tokens=20, busy_s=1)})
    rates = figures.rates("step")
    assert (rates["engine/tokens_per_s"], rates["engine/idle"]) == (60.0, 0.25)
    figures.count(
        {
            0: counters(
                tokens=900,
                busy_s=10,
                slot_s=35,
                waiting_s=8,
                kv_waiting_s=4,
                kv_used=0.5,
                version=2,
                swaps=2,
                pause_s=0.3,
            ),
            3: counters(tokens=100, busy_s=3, recompute_s=1, slot_s=20, kv_used=0.7, version=1, rollouts=9),
        }
    )
    figures.mark()
    assert figures.rates("step") == {
        "engine/tokens_per_s": 110.0,
        "engine/idle": 0.375,
        "engine/recompute": 0.0625,
        "engine/running": 6.5,  # 32 and 20 sequences' seconds in eight
        "engine/waiting": 1,
        "engine/kv_waiting": 0.5,
        "engine/kv_used": 0.7,
        **{
            f"engine/rank0/{k}": v
            for k, v in {"tokens_per_s": 100.0, "idle": 0.0, "recompute": 0.0, "rollouts": 0, "kv_waiting": 0.5}.items()
        },
        **{f"engine/rank0/{k}": v for k, v in {"running": 4, "waiting": 1, "kv_used": 0.5, "version": 2}.items()},
        **{
            f"engine/rank3/{k}": v
            for k, v in {"tokens_per_s": 10.0, "idle": 0.75, "recompute": 0.125, "rollouts": 9, "kv_waiting": 0}.items()
        },
        **{f"engine/rank3/{k}": v for k, v in {"running": 2.5, "waiting": 0, "kv_used": 0.7, "version": 1}.items()},
    }
    assert (figures.within["idle"], figures.within["running"]) == (0.35, 5.5)  # over all ten seconds
    assert figures.summary() == {
        "rank0": {
            "rollouts": 0,
            "tokens": 900,
            "idle": 0.0,
            "updates": 2,
            "mean_pause_s": 0.15,
            "mean_recompute_s": 0.0,
        },
        "rank3": {
            "rollouts": 9,
            "tokens": 100,
            "idle": 0.7,
            "updates": 0,
            "mean_pause_s": 0.0,
            "mean_recompute_s": 1.0,
        },
    }


def test_one_engine_is_all_there_is_to_say():
    times = iter([0.0, 1.0, 1.01])
    figures = EngineFigures(clock=lambda: next(times))
    for tokens in (0, 50, 101):
        figures.count({0: counters(tokens=tokens)})
        rates = figures.rates("step")
    assert rates["engine/tokens_per_s"] == 100  # the last count but one is too young
    assert rates.keys() == {
        f"engine/{name}"
        for name in ("tokens_per_s", "running", "waiting", "kv_waiting", "recompute", "idle", "kv_used")
    }


def test_a_step_has_the_rates_of_the_step_whoever_counts_in_between():
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0])
    figures = EngineFigures(clock=lambda: next(times))
    rates = {}
    for reader, tokens in (("step", 0), ("interval", 90), ("step", 100), ("interval", 100), ("step", 160)):
        figures.count({0: counters(tokens=tokens)})
        rates[reader] = figures.rates(reader).get("engine/tokens_per_s")
    assert rates == {"step": 6.0, "interval": pytest.approx(10 / 3)}
