"""LoRA in whole runs: it learns, its checkpoints are what it adds, and they are exported merged or alone."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl import cli
from tests.end_to_end.jobs import MODELS, Job, run

# the head stays as it was made, at random, and tells tokens apart at a low temperature only
SETTINGS = [
    f"model.path={MODELS / 'tiny'}",
    "lora.rank=8",
    "lora.sync=adapter",
    "trainer.learning_rate=3e-3",
    "rollout.temperature=0.2",
]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("lora") / "run"
    return run("tiny_cpu.toml", folder, *SETTINGS, "run.steps=20", "checkpoint.every=10", "eval.every=-1")


def test_it_learns_with_a_tenth_of_the_bytes_on_the_way_to_the_engine(learned: Job) -> None:
    assert learned.code == 0, learned.output
    assert learned.summary["reward_first"] < 0.2
    assert learned.summary["reward_last"] > 0.8
    assert learned.probe_difference <= 1e-5
    steps = learned.metrics("step")
    assert all(step["weights/verified_engines"] == 1 and step["weights/update_norm"] > 0 for step in steps)
    sent = {step["weights/sent_bytes"] for step in steps}
    assert len(sent) == 1 and max(sent) < 1.414e6 / 9


def test_a_checkpoint_is_exported_merged_or_alone(learned: Job, tmp_path: Path) -> None:
    checkpoint = (learned.folder / "checkpoints" / "step_20" / "trainer").iterdir()
    assert sum(file.stat().st_size for file in checkpoint) < 3 * 1.4e6 / 5  # weights and moments of the whole model
    for options, made in (["--dtype", "float32"], "model"), (["--adapter"], "adapter"):
        assert cli.main(["export", str(learned.folder), *options, str(tmp_path / made)]) == 0
        name = "adapter_model.safetensors" if made == "adapter" else "model.safetensors"
        ours, theirs = (load_file(folder / made / name) for folder in (tmp_path, learned.folder))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert cli.main(["export", str(learned.folder), "--step", "10", str(tmp_path / "ten")]) == 0
    assert load_file(tmp_path / "ten" / "model.safetensors")["model.embed_tokens.weight"].dtype == torch.bfloat16
