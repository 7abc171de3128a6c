"""An inference rank whole, in one process: weights from disk, messages in and out."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from spmd_rl import config
from spmd_rl.inference import InferenceRank
from spmd_rl.run_dir import RunDir
from spmd_rl.tiny_model import make, random_model
from spmd_rl.transport import Kind, Message
from spmd_rl.weights.checksum import tensor_checksum
from spmd_rl.weights.disk import folder_of

ROOT = Path(__file__).parents[2]


def take(version: int, run_dir: RunDir) -> Message:
    """The word that a version lies there; its weights are those of that seed."""
    model = random_model(version)
    model.save_pretrained(folder_of(run_dir.weights, version))
    named = dict(model.named_parameters())
    checksums = [int(tensor_checksum(named[name].detach())) for name in sorted(named)]
    return Message(Kind.SWAP, {"version": version, "checksums": checksums})


def probe(*sequences: list[int]) -> Message:
    token_ids, lengths = np.concatenate(sequences).astype(np.int32), [0, *map(len, sequences)]
    return Message(Kind.PROBE, {}, {"token_ids": token_ids, "cu_seqlens": np.cumsum(lengths, dtype=np.int64)})


def test_every_version_that_is_to_be_probed_is_answered_with_nothing_before_the_probe_has_come(tmp_path):
    make(tmp_path / "model")
    settings = [f"model.path={tmp_path}/model", "weights.mode=disk", "run.probe_every=2"]
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()

    async def main() -> dict[int, np.ndarray]:
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
        scores = {}
        for version in range(5):
            if version == 3:
                rank.handle(probe([5, 6, 7], [8, 9]))
            rank.handle(take(version, run_dir))
            kinds = [Kind.LOADED, Kind.PROBED] if version % 2 == 0 else [Kind.LOADED]
            for kind in kinds:
                answer = await asyncio.wait_for(answers.get(), 20.0)
                assert (answer.kind, answer.words["version"]) == (kind, version)
            if kind is Kind.PROBED:
                scores[version] = answer.arrays["logprobs"]
        rank.close(60.0)
        assert answers.empty()
        return scores

    scores = asyncio.run(main())
    assert [len(scores[version]) for version in (0, 2, 4)] == [0, 0, 5]
    assert (scores[4] < 0).tolist() == [False, True, True, False, True]
