"""How a rank's life ends, whatever the user's code still does."""

import asyncio
import threading
from typing import ClassVar

import pytest

from spmd_rl import config
from spmd_rl.ranks import program
from spmd_rl.ranks.build_tasks import make_tasks
from spmd_rl.types import Task


class Live:
    """Hears of failures."""

    def __init__(self) -> None:
        self.heard: list[BaseException] = []

    def failed(self, error: BaseException) -> None:
        self.heard.append(error)


def test_a_life_ends_though_a_thread_and_a_task_of_the_users_never_do():
    given_up = threading.Event()
    timer = threading.Timer(20.0, given_up.set)
    timer.start()
    live, tasks = Live(), []

    async def deaf():
        while not given_up.is_set():
            try:
                await asyncio.to_thread(given_up.wait)
            except asyncio.CancelledError:
                continue

    async def life():
        tasks.append(asyncio.create_task(deaf()))
        await asyncio.sleep(0)
        return 143

    try:
        assert program._turn(life(), live) == 143
        assert not given_up.is_set()
        assert live.heard == []
    finally:
        timer.cancel()
        given_up.set()
        loop = asyncio.get_event_loop()
        loop.run_until_complete(tasks[0])
        loop.close()
        asyncio.set_event_loop(None)


class Three:
    """Three tasks a split; remembers what it was asked for."""

    asked: ClassVar[list[str]] = []

    def __init__(self, *, tokenizer) -> None:
        self.asked.append("made")

    def tasks(self, seed, split):
        self.asked.append(split)
        return (Task(env="", task_id=f"{split} {n}") for n in range(3))

    async def rollout(self, task, generate):
        raise NotImplementedError


CONFIG = config.from_tree({"model": {"path": "m"}, "env": {"e": {"path": "tests.unit.test_train:Three"}}})


def test_data_that_ends_before_the_checkpoint_does_is_refused_before_anything_is_built():
    whole = make_tasks(CONFIG, None).train
    list(whole)
    make_tasks(CONFIG, None).train.restore(whole.state())
    more = {"cursor": 4, "sources": {"e": {"drawn": 4, "digest": "", "state": None}}}
    with pytest.raises(ValueError, match=r"env\.e: its tasks end after 3, 4 were drawn"):
        make_tasks(CONFIG, None).train.restore(more)


def test_tasks_that_were_looked_at_before_the_run_are_those_of_the_run():
    Three.asked.clear()
    tasks = make_tasks(CONFIG, None)
    assert [task.task_id for task in tasks.eval["e"]] == ["eval 0", "eval 1", "eval 2"]
    assert [task.task_id for task in tasks.train] == ["train 0", "train 1", "train 2"]
    assert sorted(Three.asked) == ["eval", "made", "train"]  # data are read once
