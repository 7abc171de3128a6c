"""The probe without a job: an engine's thread, its sampler, a trainer, all in this process, and faults to plant."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from spmd_rl.engine.protocol import Engine
from spmd_rl.engine.thread import EngineThread
from spmd_rl.metrics.probe import Limits, Sampled, Scored, behind, compare, ends_of
from spmd_rl.packing import packing
from spmd_rl.ranks.probe_sampler import BEFORE_SWAP, ProbeSampler
from spmd_rl.trainer.trainer import Trainer
from spmd_rl.types import Sampling

Weights = Mapping[str, torch.Tensor]
EXACT = Limits(exact=True)


def probes(
    engine: Engine,
    trainer: Trainer,
    versions: Sequence[Weights],
    *,
    max_seq_len: int,
    sampling: Sampling | None = None,
    recomputes: bool = True,
    vocab: int = 97,
) -> list[dict[str, float]]:
    """What is measured at each version: at the first in full, at the others in small, weights arriving meanwhile."""

    async def main() -> list[dict[str, float]]:
        loop, failed = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()
        thread = EngineThread(
            engine=engine, loop=loop, failed=lambda error: loop.call_soon_threadsafe(failed.set_exception, error)
        )
        sampler = ProbeSampler(
            engine=thread,
            sampling=sampling or Sampling(max_tokens=8, temperature=trainer.temperature),
            encode=lambda text: np.frombuffer(text.encode(), np.uint8) % vocab,
            max_seq_len=max_seq_len,
            recomputes=recomputes,
            seed=0,
        )
        thread.start()
        loaded, measured, beside = asyncio.Event(), [], []
        for version, weights in enumerate(versions):
            trainer.model.load_state_dict(dict(weights), strict=False)
            if version == 0:
                thread.load(lambda: versions[0], 0, lambda _: loop.call_soon_threadsafe(loaded.set))
                await first_of(loaded.wait(), failed)
                job = sampler.at_start(lambda: versions[0])
            else:
                both = threading.Event()  # are asked for before the engine begins either
                thread._commands.put(both.wait)
                job = asyncio.ensure_future(sampler.at(version))
                await asyncio.sleep(0)  # it has begun
                thread.load(lambda weights=weights: weights, version, lambda _: None, after=BEFORE_SWAP)
                both.set()
            sample = await first_of(job, failed)
            share = packing.pack(sample.rollouts)
            scored = Scored(**trainer.score_probe(behind(beside, share))).last(len(share.token_ids))
            beside = beside or ends_of(share)
            sampled = Sampled(rank=0, packed=share, scores=sample.scores, choices=sample.choices)
            measured.append(compare(sampled, [scored], version=version, limits=EXACT, recomputes=recomputes))
        thread.close(60.0)
        return measured

    return asyncio.run(main())


async def first_of(job, failed: asyncio.Future) -> object:
    """The result of the job, or the engine thread's error."""
    task = asyncio.ensure_future(job)
    await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED, timeout=120.0)
    return failed.result() if failed.done() else task.result()


# faults: of an engine's calls, or of the trainer's packed forward


def one_version_behind(engine: Engine) -> None:
    """From version 1 on it goes on with what it was given before."""
    load, before = engine.load_weights, []

    def late(tensors: Weights, version: int) -> None:
        before.append(tensors)
        load(before[-2] if version == 1 else tensors, version)

    engine.load_weights = late


def layers_swapped(engine: Engine) -> None:
    load = engine.load_weights

    def swapped(tensors: Weights, version: int) -> None:
        names = {name: name.replace("layers.0.", "layers.1.") for name in tensors if "layers.0." in name}
        other = names | {there: here for here, there in names.items()}
        load({name: tensors[other.get(name, name)] for name in tensors}, version)

    engine.load_weights = swapped


def packed_without_borders(trainer: Trainer) -> None:
    """Sequences of a micro-batch go on from each other."""
    forward = trainer._forward

    def leaking(micro, policy=None):
        return forward(replace(micro, cu_seqlens=[0, len(micro.token_ids)], parents=[0]), policy)

    trainer._forward = leaking


def table(rows: Mapping[str, dict[str, float]], names: Sequence[str]) -> str:
    """For the test's output."""
    lines = [f"{'fault':<42}" + "".join(f"{name.removeprefix('probe/'):>16}" for name in names)]
    lines += [f"{fault:<42}" + "".join(f"{values[name]:>16.2g}" for name in names) for fault, values in rows.items()]
    return "\n".join(lines)


Plant = Callable[[Engine], None]
