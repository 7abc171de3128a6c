"""The tasks of a run, those that are trained on and those that are evaluated, from the environments of its config.

Made once, by rank 0 before anything is built: what is wrong with an environment or its data is a ValueError here.  The
environments that make tasks play none: inference ranks have their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice

from spmd_rl.config import Config
from spmd_rl.diagnostics.user_code import refused
from spmd_rl.envs.environment import Environment, checked_tasks, load
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.orchestrator.difficulty import Difficulty
from spmd_rl.orchestrator.task_stream import TaskStream
from spmd_rl.types import Task

MOST_REPETITIONS = 1000  # tasks in a row that were drawn before: the environment has no others


@dataclass(frozen=True, kw_only=True)
class Tasks:
    """What the orchestrator is given."""

    train: TaskStream
    difficulty: Difficulty  # decides what of it is passed over
    eval: dict[str, list[Task]]  # by environment; {} where nothing is evaluated


def make_tasks(config: Config, tokenizer: Tokenizer) -> Tasks:
    """From their start."""
    environments = load_environments(config, tokenizer)
    seed = config.run.seed
    difficulty = Difficulty(
        least=config.data.min_solve_rate,
        most=config.data.max_solve_rate,
        revisit=config.data.revisit,
        solved_at=config.eval.solved_at,
        seed=seed,
    )
    train = TaskStream(
        {name: partial(checked_tasks, name, env, seed=seed, split="train") for name, env in environments.items()},
        weights={name: env.weight for name, env in config.env.items()},
        seed=seed,
        keep=difficulty.keep,
    )
    return Tasks(
        train=train, difficulty=difficulty, eval=eval_tasks(config, environments) if config.eval.every >= 0 else {}
    )


def eval_tasks(config: Config, environments: Mapping[str, Environment]) -> dict[str, list[Task]]:
    """The first eval.num_tasks different ones of each environment, or all where it has fewer."""
    tasks = {}
    for name, env in environments.items():
        with refused(f"environment {name}"):
            all_tasks = checked_tasks(name, env, seed=config.run.seed, split="eval")
            tasks[name] = list(islice(_different(task.of(name) for task in all_tasks), config.eval.num_tasks))
    return tasks


def _different(tasks: Iterable[Task]) -> Iterator[Task]:
    """Leave out repetitions; end after MOST_REPETITIONS in a row."""
    seen: set[str] = set()
    repetitions = 0
    for task in tasks:
        content = json.dumps([task.task_id, task.data], sort_keys=True)
        if content not in seen:
            seen.add(content)
            repetitions = 0
            yield task
        elif (repetitions := repetitions + 1) == MOST_REPETITIONS:
            return


def load_environments(config: Config, tokenizer: Tokenizer) -> dict[str, Environment]:
    """By the names that they have in the config."""
    return {name: load(env.path, tokenizer=tokenizer, args=env.args) for name, env in config.env.items()}
