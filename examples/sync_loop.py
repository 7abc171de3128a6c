"""The algorithm as one script: sample a batch, train on it, load the new weights, again.

    python examples/sync_loop.py configs/tiny_cpu_sync.toml MODEL_OUT [section.key=value ...]

One process takes turns.  The parts are those of a run: environments, engine, sink, advantages, objective, trainer.  A
run adds ranks, messages, generation beside training, proof of weights, evaluations, checkpoints.  With
inference.deterministic = true and staleness.max_staleness = 0 its weights are equal to these, bit for bit.
"""

from __future__ import annotations

import asyncio
import itertools
import pkgutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch

from spmd_rl.config import Config, load
from spmd_rl.distributed.world import alone
from spmd_rl.engine.protocol import Engine
from spmd_rl.model.causal_lm import engine_dtype
from spmd_rl.model.tokenizer import Tokenizer
from spmd_rl.objective.advantages import ADVANTAGES
from spmd_rl.orchestrator.order import make_order
from spmd_rl.orchestrator.train_sink import TrainSink, zero_spread
from spmd_rl.packing import packing
from spmd_rl.ranks.build_engine import build_engine
from spmd_rl.ranks.build_tasks import load_environments, make_tasks
from spmd_rl.ranks.build_trainer import make_trainer
from spmd_rl.ranks.episodes import Episodes
from spmd_rl.ranks.inference_rank import run_sampling
from spmd_rl.trainer.trainer import Trainer
from spmd_rl.types import Completion, Group, GroupWork, Rollout, Sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Player:
    """Plays the episodes of admitted groups: they wait for the engine, which steps as long as any of them waits."""

    def __init__(self, config: Config, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._numbers = itertools.count()  # of requests
        self._requests: dict[int, asyncio.Future[Completion]] = {}
        self._ended: dict[int, Rollout] = {}  # by ticket
        self._episodes = Episodes(
            envs=load_environments(config, tokenizer),
            generate=self._generate,
            engine_version=lambda: engine.version,
            sampling=run_sampling(config, tokenizer),
            max_seq_len=config.inference.max_seq_len,
            seed=config.run.seed,
            max_retries=config.rollout.max_retries,
            finished=lambda rollout: self._ended.update({rollout.ticket: rollout}),
        )

    async def play(self, works: list[GroupWork]) -> list[Group]:
        for work in works:
            self._episodes.start(work)
        while len(self._episodes):
            for number, completion in self._engine.step() if self._requests else ():
                self._requests.pop(number).set_result(completion)
            await asyncio.sleep(0)  # episodes go on: to the next turn, or to the reward
        return [
            Group(
                group_id=work.group_id,
                first_ticket=work.first_ticket,
                admission_version=work.version,
                rollouts=[self._ended.pop(ticket) for ticket in work.tickets],
            )
            for work in works
        ]

    async def _generate(self, prompt: np.ndarray, sampling: Sampling) -> tuple[Completion, int]:
        number = next(self._numbers)
        self._engine.submit(number, prompt, sampling)
        self._requests[number] = asyncio.get_running_loop().create_future()
        return await self._requests[number], 0


async def train(config: Config, engine: Engine, trainer: Trainer, tokenizer: Tokenizer) -> None:
    """Take run.steps turns; end early where no task is left, or all are solved."""
    size, batch_size = config.rollout.group_size, config.rollout.batch_size
    player, sink = Player(config, engine, tokenizer), make_sink(config)
    tasks, groups = make_tasks(config, tokenizer).train, itertools.count()
    load_weights(engine, trainer, 0, config)
    for version in range(config.run.steps):
        # Sample groups, each several rollouts of one prompt, until a batch of them teaches something.
        while (batch := sink.next_batch(version)) is None:
            missing = (batch_size - sink.num_waiting) // size
            works = [
                GroupWork(group_id=group, first_ticket=group * size, size=size, task=task, version=version)
                for group, task in zip(itertools.islice(groups, missing), tasks, strict=False)
            ]
            for work in works:
                sink.admitted(work)
            for group in await player.play(works):
                sink.add(group)  # rewards to advantages; a group of equal rewards may be given up here
            if not works or not sink.still_teaches():
                return
        # One optimizer step for each minibatch: this version becomes the next.
        rollouts = batch.rollouts
        usable, group_ids = np.array([sink.usable(r) for r in rollouts]), np.array([r.group_id for r in rollouts])
        cut = packing.minibatches(group_ids, config.trainer.num_minibatches, whole_groups=config.trainer.share_prefix)
        packed = packing.by_segment(packing.pack(rollouts, batch.advantages, usable, cut))
        loss = trainer.step(packed, version)["loss"]
        load_weights(engine, trainer, version + 1, config)
        print(f"step {version + 1}  reward {np.mean([r.reward for r in rollouts]):.3f}  loss {loss:+.5f}", flush=True)


def make_sink(config: Config) -> TrainSink:
    """What judges groups and forms batches; mask_truncated, overlong_buffer and advantage_scale are left out."""
    advantage = ADVANTAGES[config.trainer.advantage]
    return TrainSink(
        batch_size=config.rollout.batch_size,
        group_size=config.rollout.group_size,
        advantages=advantage.of_group,
        batch_advantages=None if config.trainer.kl_in_reward else advantage.of_batch,
        order=make_order("admission"),
        bound=config.age_bound,
        filters={"zero_spread": zero_spread} if config.trainer.filter_zero_spread else {},
        max_empty_batches=config.trainer.max_empty_batches,
    )


def load_weights(engine: Engine, trainer: Trainer, version: int, config: Config) -> None:
    """Give the engine a copy of the trainer's weights, in the engine's types."""
    trainer.models.refresh()
    dtypes = trainer.models.dtypes(engine_dtype(config.model.dtype, DEVICE))
    weights = trainer.models.named_parameters().items()
    engine.load_weights({name: weight.detach().to(dtypes[name], copy=True) for name, weight in weights}, version)


def main(config: Config, out: Path) -> None:
    source = Path(config.model.path)
    if not source.is_dir():
        pkgutil.resolve_name(config.model.make)(source)
    tokenizer, trainer = Tokenizer(source, config.model.template), make_trainer(config, device=DEVICE)
    with alone() as group:
        engine, _ = build_engine(config, device=DEVICE, group=group, decode=partial(tokenizer.decode, special=True))
        asyncio.run(train(config, engine, trainer, tokenizer))
    trainer.export(out, source)


if __name__ == "__main__":
    main(load(Path(sys.argv[1]), sys.argv[3:]), Path(sys.argv[2]))
