import json
import math

from spmd_rl.recorder import Recorder


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
