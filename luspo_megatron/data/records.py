"""Rows of a .jsonl or .parquet file, and their columns, as plain data. Every mistake names file, line and mend."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from luspo_megatron.errors import UserError


@dataclass(frozen=True)
class Record:
    """One row and where it came from (``file:line`` or ``file row n``, counted from 1)."""

    where: str
    row: Mapping[str, Any]


def read_records(path: str, flag: str) -> Iterator[Record]:
    """Rows in file order; ``flag`` is the setting that named the file. Raises UserError."""
    file = Path(path)
    if not file.exists():
        raise UserError(f"{flag}: no such file: {path}")
    if file.suffix not in (".jsonl", ".parquet") or file.is_dir():
        raise UserError(f"{flag}: {path} must be a .jsonl or .parquet file")
    return _read_jsonl(file) if file.suffix == ".jsonl" else _read_parquet(file)


def _read_jsonl(file: Path) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{file}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                row = json.loads(text) if text else None
            except ValueError as error:  # both bad UTF-8 and bad JSON
                raise UserError(f"{where}: not valid JSON ({error}); mend or remove the line") from None
            if not text:
                continue
            if not isinstance(row, dict):
                raise UserError(f"{where}: a line must be a JSON object, this is a {type(row).__name__}")
            yield Record(where, row)


def _read_parquet(file: Path) -> Iterator[Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"reading {file} needs the package pyarrow; pip install pyarrow") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield Record(f"{file} row {number}", row)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{file}: not a readable parquet file ({error}); write it anew") from None


def column(record: Record, key: str, flag: str) -> Any:
    """The value of a column; ``a.b`` reads the field b of the column a. Raises UserError with the columns found."""
    if key in record.row:
        return record.row[key]
    value: Any = record.row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            found = ", ".join(map(str, record.row)) or "none"
            raise UserError(f"{record.where}: no column {key!r}; columns found: {found}; set {flag}")
        value = value[part]
    return value


def plain(value: Any) -> Any:
    """``value`` as data that JSON can hold: numpy arrays and scalars unpacked, bytes as base64, the rest as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        return [plain(inner) for inner in value.tolist()]
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
