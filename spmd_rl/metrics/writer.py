"""Metrics to metrics.jsonl (one JSON object a line) and to TensorBoard, under the same names.

Every line has `kind` (step | interval | probe | eval), `version` and `time` (seconds since the epoch).
Numbers have 9 significant digits.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path


class Recorder:
    """Given paths; writes each record through at once, so that what is on disk is what happened.

    TensorBoard forgets what it was told before of version `since` and later ones.
    """

    def __init__(self, *, metrics: Path, tensorboard: Path, since: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # imports torch: not for whoever reads metrics

        self._file = open(metrics, "a", encoding="utf-8")  # noqa: SIM115 (closed in close)
        self._board = SummaryWriter(str(tensorboard), purge_step=since, flush_secs=10)

    def write(self, kind: str, version: int, values: Mapping[str, object]) -> None:
        record = {"kind": kind, "version": version, "time": round(time.time(), 3)}
        record |= {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                self._board.add_scalar(name if kind != "interval" else f"interval/{name}", value, version)

    def close(self) -> None:
        self._file.close()
        self._board.close()


def _plain(value: object) -> object:
    """JSON has no NaN or infinity; None stands for them."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value
