"""Environments of the package `verifiers`, unchanged (extra `verifiers`): they talk to the policy by HTTP.

    [env.wordle]
    path = "spmd_rl.envs.verifiers:Verifiers"
    args = { name = "wordle", settings = { num_train_examples = 2000 } }

`settings` are the arguments of the environment's `load_environment`, or its whole config where it is made of a taskset
and a harness (verifiers 0.3 and later).  Its rows and its episodes come from child processes (verifiers_child.py): one
episode a process at a time, killed with all that it started when it does not end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from spmd_rl.envs import verifiers_child
from spmd_rl.envs.chat_server import ChatServer
from spmd_rl.envs.dataset import Epochs
from spmd_rl.envs.environment import Generate, judged, of_split
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.processes.workers import Workers
from spmd_rl.types import Rollout, Task


class Verifiers:
    """The reward is the environment's own; its parts and metrics are logged by their names."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        name: str,  # of the environment or taskset: an installed package, or a module on PYTHONPATH
        settings: Mapping[str, Any] | None = None,
        eval_settings: Mapping[str, Any] | None = None,  # over `settings`, for the split "eval"
        holdout: int = 0,  # without an evaluation set of its own: so many rows from the end are not trained on
        max_epochs: int = 0,  # 0: no end
        num_processes: int = 16,  # episodes at a time, per inference rank
        timeout_s: float = 600.0,  # of an episode
        on_rewrite: str = "segment",  # as in spmd_rl.envs.chat
    ) -> None:
        if holdout < 0 or max_epochs < 0 or (holdout and eval_settings):
            raise ValueError(
                f"verifiers {name}: holdout = {holdout} and max_epochs = {max_epochs} must be at least 0, and with "
                "eval_settings there is nothing to hold out"
            )
        self._name, self._holdout, self._max_epochs = name, holdout, max_epochs
        self._eval_settings = eval_settings
        by_split = {"train": settings or {}, "eval": _merged(settings or {}, eval_settings or {})}
        self._settings = {split: json.dumps(merged, sort_keys=True) for split, merged in by_split.items()}
        self._server = ChatServer(tokenizer=tokenizer, on_rewrite=on_rewrite)
        self._workers = Workers(num=num_processes, timeout_s=timeout_s)

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        listed = self._listed(split)
        head, own = next(listed), bool(self._eval_settings)
        if head["endless"]:
            tasks = (_task(split, number, row) for number, row in enumerate(listed))
            return tasks if own else of_split(tasks, split, _content)
        rows = list(listed)
        if split == "train":
            num, settings = len(rows) - self._holdout, {"max_epochs": self._max_epochs, "holdout": self._holdout}
            return Epochs(lambda number: _task(split, number, rows[number]), max(0, num), seed=seed, **settings)
        if not (own or head["own"] or self._holdout):
            raise ValueError(
                f"verifiers {self._name}: give eval_settings or holdout to evaluate, or set eval.every = -1"
            )
        first = 0 if own or head["own"] else max(0, len(rows) - self._holdout)
        return (_task(split, number, rows[number]) for number in range(first, len(rows)))

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        settings = self._settings[str(task.data["split"])]
        play = partial(self._workers.call, verifiers_child.play, self._name, settings, task.data["row"])
        rollout, parts = await self._server.episode(task, generate, play)
        return judged(rollout, parts, {name: float(name == "reward") for name in parts})

    async def close(self) -> None:
        await self._server.close()
        await self._workers.close()

    def _listed(self, split: str) -> Iterator[Mapping[str, Any]]:
        """What the rows are, then the rows, from a child process that ends with whoever reads."""
        arguments = (self._name, self._settings[split], split, str(os.getpid()))
        command = [sys.executable, "-m", verifiers_child.__name__, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    answer = json.loads(line)
                    if "error" in answer:
                        raise ValueError(f"verifiers {self._name}: {answer['error']}")
                    yield answer
                if code := child.wait():
                    raise ValueError(f"verifiers {self._name}: the process that lists the rows ended with code {code}")
            finally:
                child.kill()


def _task(split: str, number: int, row: Mapping[str, Any]) -> Task:
    return Task(env="", task_id=f"{split} {number}", data={"split": split, "row": row})


def _content(task: Task) -> str:
    """What of a generated row is not its place in the stream."""
    return json.dumps({key: value for key, value in task.data["row"].items() if key != "idx"}, sort_keys=True)


def _merged(settings: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables within tables are merged too."""
    both = {key: _merged(settings[key], over[key]) for key in over if isinstance(settings.get(key), Mapping)}
    return {**settings, **over, **both}
