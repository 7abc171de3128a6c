"""Reads rows from files as people have them: JSON lines, a JSON array, CSV, TSV, Parquet; all but Parquet also as .gz.

    for where, row in rows_of(Path("train.csv.gz"), ["question"]):  # ("train.csv.gz row 1", {"question": …})

The first character says whether JSON is an array or lines.  Text is UTF-8, with or without a byte order mark.  CSV has
a header, and all its values are strings.  What cannot be read is a ValueError with the file and the place in it.
Knows nothing of tasks; Parquet needs the extra `parquet`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pyarrow
    from _typeshed import WriteableBuffer as Buffer

Row = dict[str, Any]  # by column; what a cell holds is the file's
FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": ",", ".tsv": "\t", ".parquet": "parquet"}
WANTED = f"{', '.join(FORMATS)}, or one of them but the last with .gz"
BATCH_ROWS = 1024  # of Parquet, decoded at a time
ROOM = 1 / 8  # of the machine's memory, for the bytes of packed text
_MISSING = object()


def row_files(path: Path) -> list[Path]:
    """The file, or those of a folder in order of name; ValueError where there is none, or one is there twice."""
    if not path.is_dir():
        if not path.is_file():
            raise ValueError(f"data {path}: no such file")
        if not _format(path):
            raise ValueError(f"data {path}: the name of a file with rows ends with {WANTED}")
        return [path]
    there = sorted(p for p in path.iterdir() if p.name[0] not in "._" and not _tells_of_rows(p))
    files = [p for p in there if p.is_file() and _format(p)]
    if not files:
        raise ValueError(f"data {path}: no file in it that ends with {WANTED}")
    if others := [p.name for p in there if p not in files]:
        raise ValueError(f"data {path}: it has {others[0]!r} too, which is not read: name a file, or move that away")
    for file in files:
        if file.with_name(f"{file.name}.gz") in files:
            raise ValueError(f"data {path}: {file.name} and {file.name}.gz are the same rows twice; keep one")
    return files


def rows_of(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Each row and where it stands.  Of Parquet only what these columns need is read."""
    kind = _format(file)
    if kind == "parquet":
        yield from _parquet_rows(file, columns)
        return
    try:
        with _opened(file) as stream:
            yield from _json_rows(file, stream) if kind == "json" else _csv_rows(file, stream, kind)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"data {file}: gzip cannot read it: {error}") from error


def value_at(row: Row, column: str) -> object:
    """What a column has; "a.b" is b in the object of column a, which may be JSON in a string.  KeyError without it."""
    if column in row:
        return row[column]
    value: object = row
    for part in column.split("."):
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise KeyError(column) from None
        if not isinstance(value, Mapping) or (value := value.get(part, _MISSING)) is _MISSING:
            raise KeyError(column)
    return value


def _tells_of_rows(file: Path) -> bool:
    return file.suffix.lower() == ".md" or file.name.upper().startswith(("README", "LICENSE"))


def _format(file: Path) -> str:
    """ "json", the separator of CSV, "parquet" or ""."""
    suffix = file.suffix.lower()
    if suffix == ".gz":
        found = FORMATS.get(Path(file.stem).suffix.lower(), "")
        return "" if found == "parquet" else found
    return FORMATS.get(suffix, "")


def _opened(file: Path) -> BufferedReader:
    return BufferedReader(_Unpacked(file)) if file.suffix.lower() == ".gz" else file.open("rb")


class _Unpacked(io.RawIOBase):
    """What a .gz file holds; ValueError as soon as that is more than memory has room for as rows.

    A few bytes of a file can be many of what it holds, and as rows these take a multiple: ROOM is what may be read.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._num_bytes = file, 0
        self._stream = gzip.open(file)  # noqa: SIM115 (closed in close)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        num = self._stream.readinto(buffer)
        self._num_bytes += num
        _check_memory(self._file, self._num_bytes / ROOM)
        return num

    def close(self) -> None:
        self._stream.close()
        super().close()


def _json_rows(file: Path, stream: BufferedReader) -> Iterator[tuple[str, Row]]:
    offset, begun = 0, False
    for number, data in enumerate(stream, 1):
        line = _text(file, data, offset=offset, line=number)
        offset += len(data)
        where = f"{file} line {number}"
        if not line.strip():
            continue
        if not begun and line.lstrip().startswith("["):
            rest = _text(file, stream.read(), offset=offset, line=number + 1)
            rows = _json(f"{where}, where an array begins", line + rest)
            yield from (_object(f"{file} row {i}", row) for i, row in enumerate(rows, 1))
            return
        begun = True
        yield _object(where, _json(where, line))


def _csv_rows(file: Path, stream: BufferedReader, separator: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(sys.maxsize)
    text = _text(file, stream.read(), offset=0, line=1)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    header: list[str] | None = None
    number = 0
    try:
        for values in lines:
            if not values:
                continue
            if header is None:
                header = values
                if len(set(header)) < len(header):
                    raise ValueError(f"data {file}: two columns are named {_first_twice(header)!r}")
                continue
            number += 1
            if len(values) != len(header):
                where = f"data {file} row {number} (up to line {lines.line_num})"
                raise ValueError(f"{where}: {len(values)} values, the header has {len(header)} columns")
            yield f"{file} row {number}", dict(zip(header, values, strict=True))
    except csv.Error as error:
        raise ValueError(f"data {file} line {lines.line_num}: {error}") from error


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f"data {file}: Parquet needs pip install 'spmd_rl[parquet]'") from error
    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            there = opened.schema_arrow.names
            if len(set(there)) < len(there):
                raise ValueError(f"data {file}: two columns are named {_first_twice(there)!r}")
            needed = [name for name in there if any(c == name or c.startswith(f"{name}.") for c in columns)]
            missing = {name: None for name in there if name not in needed}
            groups = map(opened.metadata.row_group, range(opened.num_row_groups))
            _check_memory(file, sum(group.total_byte_size for group in groups))
            num_bytes = 0
            for batch in opened.iter_batches(columns=needed, batch_size=BATCH_ROWS):
                made = {}
                for name, values in zip(batch.schema.names, batch.columns, strict=True):
                    if pyarrow.types.is_dictionary(values.type):
                        values = values.dictionary_decode()
                    num_bytes += values.nbytes  # a few bytes of a file can be many rows
                    _check_memory(file, num_bytes)
                    made[name] = values.to_pylist()
                    if "float" in str(values.type):
                        made[name] = [_shortest(value, values.type) for value in made[name]]
                for i in range(batch.num_rows):
                    number += 1
                    yield f"{file} row {number}", {name: values[i] for name, values in made.items()} | missing
    except (pyarrow.ArrowException, OSError, OverflowError, MemoryError) as error:
        raise ValueError(f"data {file}: Parquet cannot read it: {' '.join(str(error).split())[:300]}") from error


def _check_memory(file: Path, num_bytes: float) -> None:
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > there:
        raise ValueError(
            f"data {file}: its rows take {num_bytes / 1e9:.1f} GB or more, this machine's memory has "
            f"{there / 1e9:.1f} GB: were they meant?"
        )


def _shortest(value: Any, kind: pyarrow.DataType) -> object:
    """A value of Parquet with its numbers of 16 and 32 bits as they are written: 0.1, not 0.10000000149011612."""
    if value is None:
        return None
    if (number := {"float": np.float32, "halffloat": np.float16}.get(str(kind))) is not None:
        return float(str(number(value)))
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_shortest(one, kind.value_type) for one in value]
    if isinstance(value, dict):
        return {name: _shortest(one, kind.field(name).type) for name, one in value.items()}
    return value


def _text(file: Path, data: bytes, *, offset: int, line: int) -> str:
    """The text of bytes that begin at this offset and line."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        at, number = offset + error.start, line + data.count(b"\n", 0, error.start)
        found = f"byte 0x{data[error.start]:02x} at offset {at} (line {number}) is not UTF-8"
        if not offset and data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            found = f"it begins with 0x{data[:2].hex()}, as UTF-16 does, and is not UTF-8"
        raise ValueError(f"data {file}: {found}; iconv -f ENCODING -t UTF-8 makes it so") from None
    return text.removeprefix("\ufeff") if not offset else text


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_keys_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"data {where}: {error}") from error


def _first_twice(names: Iterable[str]) -> str:
    """The first of the names that stand there more than once."""
    return next(name for name, num in Counter(names).items() if num > 1)


def _keys_once(pairs: list[tuple[str, object]]) -> Row:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError(f"an object has {_first_twice(name for name, _ in pairs)!r} twice")
    return made


def _object(where: str, row: object) -> tuple[str, Row]:
    if not isinstance(row, dict):
        raise ValueError(f"data {where}: {str(row)[:60]!r} ({type(row).__name__}) is no object of columns")
    return where, row
