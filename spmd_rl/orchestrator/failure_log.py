"""Attempts of episodes that raised, to failures.jsonl: one JSON object a line, the first of each kind in full.

Knows nothing of what becomes of the episode.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from spmd_rl.types import FailedAttempt

MOST = 100  # of a kind, by one process


class FailureLog:
    """Makes its file with the first failure."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._counts: Counter[str] = Counter()  # attempts by kind

    def add(self, attempt: FailedAttempt) -> None:
        self._counts[attempt.kind] += 1
        count = self._counts[attempt.kind]
        if count <= MOST:
            self._append(asdict(attempt))
        if count == MOST:
            more = f"{MOST} attempts of this kind are written, more are only counted: failures/{attempt.kind}"
            self._append({"time": attempt.time, "version": attempt.version, "kind": attempt.kind, "more": more})

    def _append(self, entry: dict[str, object]) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
