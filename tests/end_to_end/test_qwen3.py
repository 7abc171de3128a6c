"""The configs for Qwen3 as jobs on two CPU ranks: overrides make them smaller, and random replies worth something."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import qwen3
from tests.end_to_end.jobs import CONFIGS, run


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("qwen3_*.toml")))
def test_a_config_for_qwen3_trains(name: str, tmp_path: Path) -> None:
    model = qwen3.write(tmp_path / "model")
    data = qwen3.data(CONFIGS / f"{name}.toml", tmp_path)
    job = run(f"{name}.toml", tmp_path / "run", f"model.path={model}", *qwen3.SMALLER, "inference.engine=native", *data)
    assert job.code == 0, job.output
    assert (job.summary["status"], job.summary["version"]) == ("done", 2)
    assert job.probe_difference <= 1e-5
    assert len(job.metrics("eval")) == 2
    assert (job.folder / "model" / "model.safetensors").exists()
