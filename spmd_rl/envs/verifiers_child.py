"""In a child process: the rows of an environment of the package `verifiers`, and one episode of it at a time.

The package installs signal handlers and runs rewards that may be slow or hang on its event loop, so it is kept out of
the ranks.  Up to 0.2 an environment is what its module's `load_environment` returns; from 0.3 on it is a taskset with a
harness, whose program runs in a process of its own (`verifiers.v1`).  Both talk to `url` as they would to any server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from spmd_rl.processes.guard import die_with_parent

MODEL = "policy"
NO_KEY = "SPMD_RL_NO_KEY"  # a variable that is not set: the server asks for no key


class Adapted(Protocol):
    def rows(self, split: str) -> tuple[dict[str, bool], Iterable[Mapping[str, Any]]]:
        """Whether they never end and are an evaluation set of the environment's own; then the rows."""
        ...

    async def play(self, row: Mapping[str, Any], url: str) -> dict[str, float]:
        """The parts of the reward by name, and "reward", their weighted sum."""
        ...


class _RubricErrors(logging.Handler):
    """The package logs a reward function that raises, and scores a 0: here it is no reward."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []
        logging.getLogger("verifiers.rubrics").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


class _Classic:
    """verifiers 0.1 and 0.2."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        import verifiers

        self._env = verifiers.load_environment(name, **settings)
        if self._env.requires_group_rollouts:
            raise ValueError("it scores the rollouts of a group together, here each is scored alone")
        self._rubric_errors = _RubricErrors()

    def rows(self, split: str) -> tuple[dict[str, bool], Iterable[Mapping[str, Any]]]:
        own = self._env.build_eval_dataset() if split == "eval" else None
        return {"endless": False, "own": own is not None}, self._env.get_dataset() if own is None else own

    async def play(self, row: Mapping[str, Any], url: str) -> dict[str, float]:
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig

        self._rubric_errors.said.clear()
        client = resolve_client(ClientConfig(api_base_url=url, api_key_var=NO_KEY, max_retries=0))
        try:
            output = await self._env.run_rollout(dict(row), client, MODEL, {})
        finally:
            await client.close()
        error = output.get("error")
        if error and error["error"] != "EmptyModelResponseError":  # a model may say nothing; that was scored
            raise RuntimeError(error["error_chain_str"])
        if self._rubric_errors.said:
            raise RuntimeError(self._rubric_errors.said[0])
        return {**(output.get("metrics") or {}), "reward": output["reward"]}


class _TasksetAndHarness:
    """verifiers 0.3 and later."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        import verifiers.v1 as vf

        taskset = {**settings.get("taskset", {}), "id": name}
        self._env = vf.load_environment(vf.resolve_env_config({**settings, "taskset": taskset}))
        self._serving: contextlib.AbstractAsyncContextManager[Any] | None = None

    def rows(self, split: str) -> tuple[dict[str, bool], Iterable[Mapping[str, Any]]]:
        taskset = self._env.taskset
        return {"endless": not taskset.bounded, "own": False}, (task.data.model_dump(mode="json") for task in taskset)

    async def play(self, row: Mapping[str, Any], url: str) -> dict[str, float]:
        import verifiers.v1 as vf

        if self._serving is None:
            serving = self._env.serving()
            await serving.__aenter__()
            self._serving = serving
        kind = type(self._env.taskset).task_type()
        task = kind(kind.data_type().model_validate(row), self._env.config.taskset.task)
        client = vf.EvalClientConfig(base_url=url, api_key_var=NO_KEY)
        episode = await self._env.run_episode(task, vf.ModelContext(model=MODEL, client=client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors:
            raise RuntimeError(f"{errors[0].type}: {errors[0].message}")
        ours = [trace for trace in episode.traces if trace.agent.config.client.base_url == url]
        if len(ours) != 1:
            raise RuntimeError(f"{len(ours)} agents were the policy; give the others clients of their own")
        (trace,) = ours
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {**metrics, **scores, "reward": sum(r.value for r in trace.rewards.values() if r is not None)}


@functools.lru_cache(maxsize=4)
def _environment(name: str, settings: str) -> Adapted:
    try:
        import verifiers
    except ImportError as error:
        raise ValueError("verifiers environments need pip install 'spmd_rl[verifiers]'") from error
    return (_Classic if hasattr(verifiers, "load_environment") else _TasksetAndHarness)(name, json.loads(settings))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all episodes of this process: environments keep what is bound to it."""
    return asyncio.new_event_loop()


def play(name: str, settings: str, row: Mapping[str, Any], url: str) -> dict[str, float]:
    """One episode; what it is worth."""
    return _loop().run_until_complete(_environment(name, settings).play(row, url))


def _list(name: str, settings: str, split: str) -> None:
    """Print what the rows are and the rows, one a line; what the package prints goes to stderr."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        head, rows = _environment(name, settings).rows(split)
        print(json.dumps(head), file=lines)
        for row in rows:
            print(json.dumps(row), file=lines)
    except (Exception, SystemExit) as error:  # the package's or the environment's: said by whoever reads
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=lines)
    lines.flush()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[4]))
    _list(*sys.argv[1:4])
    sys.stdout.flush()
    os._exit(0)  # whatever threads and exit handlers the package has left
