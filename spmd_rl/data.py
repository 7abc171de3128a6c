"""Rows of JSONL or Parquet files as tasks: epoch after epoch, each shuffled by the seed alone.

Given a file or a folder of files (in order of name) and which of our names is which column.  Promises: the same rows
and seed give the same tasks in the same order; a task's id is the number of its row; rows that are appended while a run
is stopped join with the next epoch, so that each epoch has every row that was there when it began exactly once.
The files are read when their tasks are asked for.  Parquet needs the extra `parquet`.
Knows nothing of prompts, models or rewards.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from spmd_rl.types import Task

SUFFIXES = (".jsonl", ".parquet")
Row = dict[str, object]


class Dataset:
    """`tasks` is what an environment offers as its own."""

    def __init__(
        self,
        *,
        path: str,  # a .jsonl or .parquet file, or a folder of them
        fields: Mapping[str, str],  # name in the task's data -> column; "a.b" is b in the table of column a
        eval_path: str = "",  # of the split "eval"
        holdout: int = 0,  # without eval_path: so many rows from the end are not trained on but make the split "eval"
        max_epochs: int = 0,  # times that each row is trained on; 0: no end
    ) -> None:
        if holdout < 0 or max_epochs < 0 or (eval_path and holdout):
            raise ValueError(
                f"data {path}: holdout = {holdout} and max_epochs = {max_epochs} must be at least 0, and eval_path "
                f"{eval_path!r} leaves nothing to hold out"
            )
        self._path, self._eval_path, self._fields = path, eval_path, dict(fields)
        self._holdout, self._max_epochs = holdout, max_epochs

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        if split == "eval":
            return self._eval_tasks()
        return self._train_tasks(seed)

    def _train_tasks(self, seed: int) -> Iterator[Task]:
        rows = read_rows(Path(self._path), self._fields)
        rows = rows[: max(0, len(rows) - self._holdout)]
        if not rows:
            raise ValueError(f"data {self._path}: no rows are left to train on, holdout = {self._holdout}")

        def task(number: int) -> Task:
            return Task(env="", task_id=str(number), data=rows[number])

        return Epochs(task, len(rows), seed=seed, max_epochs=self._max_epochs, holdout=self._holdout)

    def _eval_tasks(self) -> Iterator[Task]:
        """In the order of the files."""
        if not self._eval_path and not self._holdout:
            raise ValueError(f"data {self._path}: give eval_path or holdout to evaluate, or set eval.every = -1")
        rows = read_rows(Path(self._eval_path or self._path), self._fields)
        first = 0 if self._eval_path else max(0, len(rows) - self._holdout)
        for i in range(first, len(rows)):
            yield Task(env="", task_id=f"eval {i}" if self._eval_path else str(i), data=rows[i])


class Epochs(Iterator[Task]):
    """The tasks of rows, epoch after epoch, each in an order that the seed alone decides.

    The number of rows that an epoch began with is its own: `state` holds those of all epochs that have begun, and
    `restore` begins again with them, whatever has been appended since.
    """

    def __init__(
        self,
        task: Callable[[int], Task],  # of the row of this number
        num: int,
        *,
        seed: int,
        max_epochs: int,  # 0: no end
        holdout: int = 0,  # rows after these that are never trained on
    ) -> None:
        self._task, self._num, self._seed, self._max_epochs, self._holdout = task, num, seed, max_epochs, holdout
        self._begun: list[list[int]] = []  # [epochs in a row, rows of each of them]
        self._numbers = self._shuffled([])

    def __next__(self) -> Task:
        return self._task(next(self._numbers))

    def state(self) -> dict[str, object]:
        return {"epochs": [list(run) for run in self._begun], "holdout": self._holdout}

    def restore(self, state: Mapping[str, object]) -> None:
        """Begin again with the epochs of `state`; ValueError where rows of theirs are missing now."""
        epochs = [(times, num) for times, num in state["epochs"]]
        begun, most = sum(times for times, _ in epochs), max((num for _, num in epochs), default=0)
        if state["holdout"] != self._holdout:
            raise ValueError(f"holdout = {self._holdout}, it was {state['holdout']}: rows would change sides")
        if most > self._num:
            raise ValueError(f"{self._num} rows to train on, there were {most} when the epoch under way began")
        if 0 < self._max_epochs < begun:
            raise ValueError(f"max_epochs = {self._max_epochs}, and epoch {begun} has begun")
        self._begun = []
        self._numbers = self._shuffled(epochs)

    def _shuffled(self, begun: Sequence[tuple[int, int]]) -> Iterator[int]:
        sizes = (num for times, num in begun for _ in range(times))
        for epoch in range(self._max_epochs) if self._max_epochs else itertools.count():
            num = next(sizes, self._num)
            if not num:
                break
            if self._begun and self._begun[-1][1] == num:
                self._begun[-1][0] += 1
            else:
                self._begun.append([1, num])
            order = list(range(num))
            random.Random(f"epoch {epoch} {self._seed}").shuffle(order)
            yield from order


def read_rows(path: Path, fields: Mapping[str, str]) -> list[Row]:
    """All rows, each with our names only; ValueError says which row lacks what."""
    files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ValueError(f"data {path}: no such file, or no {' or '.join(SUFFIXES)} file in it")
    return [_pick(row, fields, where) for file in files for where, row in _read(file)]


def _read(file: Path) -> Iterator[tuple[str, Row]]:
    if file.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError as error:
            raise ValueError(f"data {file}: Parquet needs pip install 'spmd_rl[parquet]'") from error
        for i, row in enumerate(parquet.read_table(file).to_pylist()):
            yield f"{file} row {i}", row
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield f"{file} line {number}", json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"data {file} line {number}: {error}") from error


def _pick(row: Row, fields: Mapping[str, str], where: str) -> Row:
    picked = {}
    for name, column in fields.items():
        value: object = row
        for part in column.split("."):
            if not isinstance(value, Mapping) or part not in value:
                have = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
                raise ValueError(f"data {where}: no column {column!r} (for {name!r}); it has: {have}")
            value = value[part]
        picked[name] = value
    return picked
