"""`spmd_rl eval CONFIG --model DIR`: the evaluation of a config on any model folder, in one process.

The environments, sampling, engine and report are those of a run's own evaluations; no torchrun, no trainer, an engine
of one rank.  Uses a GPU where there is one.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from spmd_rl.config import Config
from spmd_rl.diagnostics.loop_watch import LoopWatch
from spmd_rl.diagnostics.terminal import escaped
from spmd_rl.distributed.world import alone
from spmd_rl.engine.thread import EngineThread
from spmd_rl.files.atomic_folder import check_writable
from spmd_rl.metrics.eval_report import EvalReport
from spmd_rl.metrics.report import eval_texts, eval_values
from spmd_rl.model.causal_lm import build, engine_dtype
from spmd_rl.model.tokenizer import try_tokenizer
from spmd_rl.orchestrator.eval_runner import EvalRunner
from spmd_rl.ranks.build_engine import build_engine, check_engine
from spmd_rl.ranks.build_tasks import eval_tasks, load_environments
from spmd_rl.ranks.inference_rank import make_episodes
from spmd_rl.storage.run_dir import write_whole
from spmd_rl.types import FailedAttempt
from spmd_rl.weights.layout import weights_of

CLOSE_S = 60.0
LOOK_S = 0.5  # between two looks at the event loop


def evaluate(config: Config, out: Path | None) -> int:
    """Print the report of `config.model.path`, and write it with all texts to `out`; exit code 0."""
    if not Path(config.model.path).is_dir():
        raise ValueError(f"no model folder {config.model.path}")
    check_engine(config)
    if out is not None:
        if out.is_dir():
            raise ValueError(f"--out {out}: is a folder; name a file")
        check_writable(out)
    with alone() as group:
        report, texts = asyncio.run(_run(config, group))
    for line in table(report):
        print(line, flush=True)
    if out is not None:
        content = {"model": config.model.path, **eval_values(report), "rollouts": texts}
        write_whole(out, json.dumps(content, indent=1))
    return 0


async def _run(config: Config, group: ProcessGroup) -> tuple[EvalReport, list[dict[str, object]]]:
    """Waits for the rollouts, or for the engine to fail."""
    tokenizer = try_tokenizer(config.model.path, config.model.template)
    tasks = eval_tasks(config, load_environments(config, tokenizer))
    loop = asyncio.get_running_loop()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    model = build(config.model.path, device=device, dtype=engine_dtype(config.model.dtype, device), weights=True)
    for name, weight in weights_of(model).items():
        if not weight.isfinite().all():
            raise ValueError(f"{config.model.path}: {name} has values that are infinite or not a number")
    engine, _ = build_engine(config, device=device, group=group, decode=partial(tokenizer.decode, special=True))
    engine.load_weights(weights_of(model), 0)
    failure: asyncio.Future[None] = loop.create_future()

    def engine_failed(error: BaseException) -> None:
        loop.call_soon_threadsafe(failure.set_exception, error)

    thread = EngineThread(
        engine=engine,
        loop=loop,
        failed=engine_failed,
    )
    runner = EvalRunner(
        tasks=tasks,
        samples=config.eval.samples,
        submit=lambda work: episodes.start(work),
        version=lambda: 0,
        solved_at=config.eval.solved_at,
    )
    kinds: set[str] = set()

    def failed(attempt: FailedAttempt) -> None:
        """The first of each kind is told, but nothing of what an engine that failed took with it."""
        if attempt.kind not in kinds and not failure.done():
            kinds.add(attempt.kind)
            task = f"{attempt.env}, task {escaped(attempt.task_id)}"
            print(f"{task}: {attempt.kind}: {attempt.error} ({attempt.place})", file=sys.stderr)

    episodes = make_episodes(config, load_environments(config, tokenizer), tokenizer, thread, runner.ended, failed)
    thread.start()
    watch = LoopWatch(
        loop=loop,
        thread_id=threading.get_ident(),
        warn=lambda text: print(f"warning: {text}", file=sys.stderr, flush=True),
    )
    threading.Thread(target=_end_when_held, args=(watch, config.run.stall_timeout_s), daemon=True).start()
    evaluation = asyncio.create_task(runner.run("eval", concurrent=config.staleness.max_concurrent))
    either: set[asyncio.Future[Any]] = {evaluation, failure}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if failure.done():
        evaluation.cancel()
        failure.result()
    report, rollouts = await evaluation
    await asyncio.to_thread(thread.close, CLOSE_S)
    return report, eval_texts(rollouts, tokenizer.decode)


def _end_when_held(watch: LoopWatch, stall_timeout_s: float) -> None:
    """In a thread, as long as the process: end it where something holds the event loop for too long."""
    waits = threading.Event()
    while not waits.wait(LOOK_S):
        held = watch.look()
        if held is not None and held[1] > stall_timeout_s:
            print(f"evaluation failed: {held[0]} for {held[1]:.0f} s", file=sys.stderr, flush=True)
            os._exit(1)


def table(report: EvalReport) -> list[str]:
    """A line for each environment."""
    lines = []
    for name, env in report.envs.items():
        passed = "  ".join(f"pass@{k} {_number(value)}" for k, value in env.pass_at.items())
        lines.append(
            f"{name}: reward {_number(env.reward)}  avg@{env.samples} {_number(env.solved)}  {passed}  length "
            f"{_number(env.length, '.1f')}  truncated {_number(env.truncated, '.0%')}  "
            f"{env.unmeasured or 'failed 0'}  ({env.num_tasks} tasks)"
        )
    return lines


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)
