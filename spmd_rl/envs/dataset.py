"""Rows of files as tasks: epoch after epoch, each shuffled by the seed alone.

Given a file or a folder of files (in order of name) and which of our names is which column.  Promises: the same rows
and seed give the same tasks in the same order; a task's id is the number of its row; rows that are appended while a run
is stopped join with the next epoch, so that each epoch has every row that was there when it began exactly once.
The files are read when their tasks are asked for, and every row of them is checked before the first task is there.
Knows nothing of prompts, models or rewards.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd_rl.files.row_files import Row, row_files, rows_of, value_at
from spmd_rl.types import Task

Check = Callable[[Row], Row]  # a row with our names as the data of its task; ValueError says what of it is wrong


class Dataset:
    """`tasks` is what an environment offers as its own."""

    def __init__(
        self,
        *,
        path: str,  # a file of rows (spmd_rl.files.row_files), or a folder of them
        fields: Mapping[str, str],  # name in the task's data -> column; "a.b" is b in the object of column a
        optional: Sequence[str] = (),  # columns that keep their names, and are in all rows or in none
        check: Check | None = None,
        eval_path: str = "",  # of the split "eval"
        holdout: int = 0,  # without eval_path: so many rows from the end are not trained on but make the split "eval"
        max_epochs: int = 0,  # times that each row is trained on; 0: no end
    ) -> None:
        self._path = Path(_name(path, "path"))
        self._eval_path = Path(_name(eval_path, "eval_path")) if eval_path else None
        self._fields = {name: _name(column, name) for name, column in fields.items()}
        self._optional, self._check = tuple(optional), check
        self._holdout, self._max_epochs = _count(holdout, "holdout"), _count(max_epochs, "max_epochs")
        if eval_path and holdout:
            raise ValueError(f"holdout = {holdout}: eval_path {eval_path!r} leaves nothing to hold out")

    def tasks(self, seed: int, split: str) -> Iterator[Task]:
        if split == "eval":
            return self._eval_tasks()
        return self._train_tasks(seed)

    def _train_tasks(self, seed: int) -> Iterator[Task]:
        rows = self._rows(self._path)
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
        if self._eval_path and (both := _resolved(self._path) & _resolved(self._eval_path)):
            raise ValueError(
                f"eval_path {self._eval_path}: {min(both)} is trained on too; name another file, or use holdout"
            )
        rows = self._rows(self._eval_path or self._path)
        first = 0 if self._eval_path else max(0, len(rows) - self._holdout)
        for i in range(first, len(rows)):
            yield Task(env="", task_id=f"eval {i}" if self._eval_path else str(i), data=rows[i])

    def _rows(self, path: Path) -> list[Row]:
        return read_rows(path, self._fields, optional=self._optional, check=self._check)


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

    def restore(self, state: Mapping[str, Any]) -> None:
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


def read_rows(
    path: Path,
    fields: Mapping[str, str],
    *,
    optional: Sequence[str] = (),  # columns that keep their names, and are in all rows or in none
    check: Check | None = None,
) -> list[Row]:
    """All rows, each with our names only, as `check` gives them back.

    ValueError tells the first row that lacks a column or that `check` refuses, and how many more there are.
    """
    rows: list[Row] = []
    there: list[str] | None = None  # of the optional columns, in the first row
    num_wrong, first = 0, ""
    for file in row_files(path):
        for where, row in rows_of(file, [*fields.values(), *optional]):
            try:
                picked = {name: _picked(row, column, name) for name, column in fields.items()}
                others = _those_there(row, optional)
                found = list(others)
                if there is None:
                    there = found
                    _refuse_misspelt([column for column in optional if column not in found], row)
                if found != there:
                    column = next(column for column in optional if (column in found) != (column in there))
                    raise ValueError(f"column {column!r}, which the prompt names, is in some of the rows only")
                picked |= others
                rows.append(check(picked) if check else _as_json(picked))
            except ValueError as error:
                first, num_wrong = first or f"data {where}: {error}", num_wrong + 1
    if num_wrong:
        raise ValueError(first + (f" (and {num_wrong - 1} more rows are refused)" if num_wrong > 1 else ""))
    return rows


def _picked(row: Row, column: str, name: str) -> object:
    try:
        return value_at(row, column)
    except KeyError:
        raise ValueError(f"no column {column!r} (for {name!r}); it has: {', '.join(map(str, row))}") from None


def _those_there(row: Row, columns: Sequence[str]) -> Row:
    found = {}
    for column in columns:
        with contextlib.suppress(KeyError):
            found[column] = value_at(row, column)
    return found


def _refuse_misspelt(columns: Sequence[str], row: Row) -> None:
    for column in columns:
        if column.isidentifier() and (close := difflib.get_close_matches(column, map(str, row), n=1, cutoff=0.8)):
            raise ValueError(f"no column {column!r}, which the prompt names; did you mean {{{close[0]}}}?")


def _as_json(row: Row) -> Row:
    for name, value in row.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name!r} cannot travel with its task, which is JSON: {error}") from None
    return row


def _resolved(path: Path) -> set[Path]:
    """The files of rows that are there."""
    return {file.resolve() for file in row_files(path)} if path.exists() else set()


def _count(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{what} = {value!r}: must be a whole number, at least 0")
    return value


def _name(value: object, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} = {value!r}: must be a name")
    return value
