"""What going on from a checkpoint depends on, recorded in it by content and compared with what is there at a resume.

Another value of it is refused by name.  What was drawn (seed, weights of environments, rows) and what made prompts of
it may be others where the data start again at 0 on purpose: data.restart_at.  Rows are compared by the task stream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from spmd_rl.config import Config
from spmd_rl.files.fingerprint import template_digest, tokenizer_digest, weights_digest
from spmd_rl.types import Task

Facts = Mapping[str, object]
WEIGHTS, EVALUATED = "weights of model.path", "tasks of evaluations"
STOPS = "eos_token_id of generation_config.json"
FIXED = ("rollout.group_size", "critic", "tokenizer")
DIGESTS = ("tokenizer", "chat template")


def facts(config: Config, eval_tasks: Mapping[str, Sequence[Task]]) -> dict[str, object]:
    """Of a start.  Reads all weights in model.path."""
    folder = Path(config.model.path)
    stops = folder / "generation_config.json"
    evaluated = json.dumps([asdict(task) for tasks in eval_tasks.values() for task in tasks], sort_keys=True)
    return {
        "run.seed": config.run.seed,
        **{f"env.{name}.weight": env.weight for name, env in config.env.items()},
        "rollout.group_size": config.rollout.group_size,
        "critic": config.critic.body if config.trainer.advantage == "gae" else "none",
        "model.template": config.model.template,
        "chat template": template_digest(folder),
        "tokenizer": tokenizer_digest(folder),
        STOPS: json.loads(stops.read_text("utf-8")).get("eos_token_id") if stops.is_file() else None,
        WEIGHTS: weights_digest(folder),
        EVALUATED: hashlib.blake2b(evaluated.encode(), digest_size=16).hexdigest(),
    }


def data_anew(config: Config, version: int, data_from: int) -> bool:
    """Whether the data start at 0 at this checkpoint, whose data started at version `data_from`."""
    wanted = config.data.restart_at
    if wanted not in (-1, version, data_from):
        raise ValueError(
            f"data.restart_at = {wanted}, but the run goes on from version {version} with data that began at version "
            f"{data_from}: remove the setting, or name version {version} to start the data at 0 here"
        )
    return wanted == version != data_from


def restart_hint(version: int, data_from: int) -> str:
    """How other data are started on purpose."""
    if version == data_from:
        return "remove this checkpoint, whose data began here"
    return f"start the data at 0 on purpose with data.restart_at={version}"


def compare(there: Facts, here: Facts, config: Config, *, restart: str, anew: bool) -> list[str]:
    """What differs and is no harm, a line each; ValueError for what is."""
    names = sorted((there.keys() | here.keys()) - {WEIGHTS, EVALUATED})
    for name in names:
        was, now = there.get(name), here.get(name)
        if was == now or (anew and name not in FIXED):
            continue
        values = "is another, by content" if name in DIGESTS else f"= {_shown(now)}, it was {_shown(was)}"
        if name == "critic":
            values = f"is {now}, it was {was} (trainer.advantage, critic.body)"
        raise ValueError(f"{name} {values}: {_next_step(name, restart)}")
    lines = []
    if there[WEIGHTS] != here[WEIGHTS]:
        what = f"model.path = {config.model.path!r} holds other weights than those that the run began with"
        needs = {
            f"trainer.kl_coefficient = {config.trainer.kl_coefficient} compares with them": (
                config.trainer.kl_coefficient
            ),
            f"lora.rank = {config.lora.rank} adds to them": config.lora.rank,
        }
        for why, needed in needs.items():
            if needed:
                raise ValueError(f"{what}, and {why}: give that folder back, or train from this one in a new run.dir")
        lines.append(f"{what}: they are not used, the checkpoint's are")
    if there[EVALUATED] != here[EVALUATED]:
        lines.append("evaluations are of other tasks from here on (eval settings, rows or held-out rows have changed)")
    return lines


@contextmanager
def data_named(restart: str) -> Iterator[None]:
    """What the task stream finds is told with the next step."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}: {_next_step('the data', restart)}") from error


def _next_step(name: str, restart: str) -> str:
    if name in FIXED:
        return "give the former one back, or export the checkpoint and train from that folder in a new run.dir"
    former = "rows back (appended ones and more epochs are no harm)" if name == "the data" else "value back"
    return f"give the former {former}, or {restart}"


def _shown(value: object) -> str:
    return "not there" if value is None else json.dumps(value, ensure_ascii=False, default=str)
