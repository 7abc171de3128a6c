"""An inference rank whole, in one process: weights from disk, messages in and out."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from spmd_rl import config
from spmd_rl.demo.tiny_model import make, random_model
from spmd_rl.packing import packing
from spmd_rl.packing.messages import (
    AskCounters,
    Counters,
    LoadFromDisk,
    Message,
    ProbeSampled,
    SampleProbe,
    WeightsLoaded,
)
from spmd_rl.ranks.inference_rank import InferenceRank
from spmd_rl.storage.run_dir import RunDir
from spmd_rl.types import Rollout
from spmd_rl.weights.checksum import tensor_checksum
from spmd_rl.weights.disk import folder_of

ROOT = Path(__file__).parents[2]


def take(version: int, run_dir: RunDir) -> LoadFromDisk:
    """The word that a version lies there; its weights are those of that seed."""
    model = random_model(version)
    model.save_pretrained(folder_of(run_dir.weights, version))
    named = dict(model.named_parameters())
    checksums = [int(tensor_checksum(named[name].detach())) for name in sorted(named)]
    return LoadFromDisk(version=version, checksums=checksums)


def test_an_engine_samples_for_the_probe_at_the_version_that_is_asked_for(tmp_path):
    """In full at the first, with a sequence that lives through the swap at the next, and late."""
    make(tmp_path / "model")
    settings = [f"model.path={tmp_path}/model", "weights.mode=disk", "rollout.temperature=0.5"]
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()

    async def main() -> dict[int, ProbeSampled]:
        answers: asyncio.Queue[Message | BaseException] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        rank = InferenceRank(
            world=SimpleNamespace(device=torch.device("cpu"), engine_group=None, rank=0, trainer_ranks=(1,)),
            config=config.load(ROOT / "configs" / "tiny_cpu.toml", settings),
            run_dir=run_dir,
            live=SimpleNamespace(
                failed=lambda error: loop.call_soon_threadsafe(answers.put_nowait, error),
                progress=lambda doing, thread: None,
            ),
            send=answers.put_nowait,
            environments={},
        )
        sampled = {}

        async def answered(kind: type[Message]):
            answer = await asyncio.wait_for(answers.get(), 60.0)
            assert isinstance(answer, kind), answer
            return answer

        for version in range(3):
            if version == 1:
                rank.handle(SampleProbe(number=1, version=version))
            rank.handle(take(version, run_dir))
            assert (await answered(WeightsLoaded)).version == version
            if version != 1:
                rank.handle(SampleProbe(number=version, version=version or None))
            sampled[version] = await answered(ProbeSampled)
            assert (sampled[version].number, sampled[version].version) == (version, version)
        rank.handle(AskCounters(number=9))
        counts = (await answered(Counters)).counts
        assert counts["tokens"] == sum(answer.num_tokens for answer in sampled.values())
        assert counts["swaps"] == 3  # the versions; what the probe loads is no update
        rank.close(60.0)
        assert answers.empty()
        return sampled

    sampled = asyncio.run(main())
    versions = {}
    for version, answer in sampled.items():
        rollouts = packing.unpack(answer.sequences)
        versions[version] = [rollout.versions[rollout.loss_mask] for rollout in rollouts]
        expected = model_scores(version, rollouts)
        np.testing.assert_allclose(answer.scores, np.concatenate([e[0] for e in expected]), atol=1e-5)
        for rollout, (_, cooled) in zip(rollouts, expected, strict=True):
            mine = rollout.versions == version
            np.testing.assert_allclose(rollout.behavior_logprobs[mine], cooled[mine], atol=1e-5)
    assert [len(set(v)) for v in versions[0]] == [1] * 5 + [2, 2] and {v[-1] for v in versions[0]} == {0}
    assert {len(set(v)) for v in versions[1]} <= {1, 2} and versions[1][-1][-1] == 1
    assert [set(v) for v in versions[2]] == [{2}]


def model_scores(version: int, rollouts: list[Rollout]) -> list[tuple[np.ndarray, np.ndarray]]:
    """By plain transformers: log-probs at temperature 1 and at 0.5."""
    model, scores = random_model(version), []
    for rollout in rollouts:
        ids = torch.from_numpy(rollout.token_ids).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        at = [(logits / t).log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy() for t in (1.0, 0.5)]
        scores.append(tuple(np.concatenate([np.zeros(1), s]) for s in at))
    return scores
