"""examples/sync_loop.py against the same training on two ranks."""

import subprocess
import sys

from tests.end_to_end.jobs import CONFIGS, LIMIT_S, ROOT, environment, run

SETTINGS = (
    *("run.steps=6", "inference.deterministic=true", "eval.every=-1"),
    *("rollout.batch_size=16", "rollout.group_size=4", "staleness.max_concurrent=16"),
    *("trainer.num_minibatches=2", "trainer.filter_zero_spread=true"),
)


def test_one_process_taking_turns_trains_the_weights_of_two_ranks_to_the_bit(tmp_path):
    script, config = ROOT / "examples" / "sync_loop.py", CONFIGS / "tiny_cpu_sync.toml"
    words = [sys.executable, script, config, tmp_path / "model", *SETTINGS]
    subprocess.run(words, cwd=ROOT, env=environment(), timeout=LIMIT_S, check=True)
    job = run(config.name, tmp_path / "run", *SETTINGS)
    assert job.code == 0, job.output
    assert job.summary["ledger"]["rollouts"]["filtered"] > 0
    one, two = ((folder / "model.safetensors").read_bytes() for folder in (tmp_path / "model", job.folder / "model"))
    assert one == two
