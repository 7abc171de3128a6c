import json
import math

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spmd_rl.metrics.writer import Recorder


def test_every_number_is_written_with_nine_significant_digits_however_small(tmp_path):
    values = {"probe/kl": 1.1e-12, "trainer/learning_rate": 1.23456789012e-9, "reward": 2 / 3, "none": math.nan, "n": 3}
    recorder = Recorder(metrics=tmp_path / "metrics.jsonl", tensorboard=tmp_path / "tensorboard")
    recorder.write("probe", 4, values)
    recorder.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line.pop("time") > 0
    assert line == {
        "kind": "probe",
        "version": 4,
        "probe/kl": 1.1e-12,
        "trainer/learning_rate": 1.23456789e-9,
        "reward": 0.666666667,
        "none": None,
        "n": 3,
    }


def test_after_a_resume_tensorboard_shows_every_version_once(tmp_path):
    """Versions 3 and 4 were abandoned: they are made again."""
    for since, versions in ((0, range(1, 5)), (3, range(3, 7))):
        recorder = Recorder(metrics=tmp_path / "metrics.jsonl", tensorboard=tmp_path / "tensorboard", since=since)
        for version in versions:
            recorder.write("step", version, {"reward": float(since), "age/counts": {"rollouts": [1]}})
        recorder.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        (version, 0.0 if version < 3 else 3.0) for version in range(1, 7)
    ]
