"""Small files of records: JSON lines that survive a kill, a resume and a NaN, and atomic whole files.

A process may be killed in the middle of a line, so reading skips what is no JSON object and counts it. Numbers that
JSON does not know (nan, inf) become null.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def jsonable(value: Any) -> Any:
    """``value`` as plain JSON data: numpy scalars and arrays unpacked, nan and inf turned into None, keys into str."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # numpy (and torch) scalars and arrays, without importing either
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def dump_line(record: Mapping[str, Any]) -> bytes:
    """One record as a line of UTF-8 JSON. A lone surrogate (half a character) is written as its JSON escape."""
    text = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", errors="backslashreplace")


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record and hand it to the operating system before returning."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(dump_line(record))


def read_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(records, number of unreadable lines) of a JSON lines file; a missing file is empty."""
    records: list[dict[str, Any]] = []
    bad = 0
    if not path.exists():
        return records, bad
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
            except ValueError:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
                bad += 1
                continue
            if isinstance(record, dict):
                records.append(record)
            else:
                bad += 1
    return records, bad


def step_of(record: Mapping[str, Any]) -> int | None:
    """The record's step, None where it has none."""
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def cut_after_step(path: Path, step: int) -> int:
    """Keep the records of steps up to ``step`` (and drop unreadable lines); returns how many lines were removed.

    Kept lines stay byte for byte as they are. The file is replaced at once, so that a kill leaves the old or the new.
    """
    if not path.exists():
        return 0
    kept: list[bytes] = []
    removed = 0
    complete = True
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line.decode("utf-8"))
                record_step = step_of(record) if isinstance(record, dict) else None
            except ValueError:
                record_step = None
            if record_step is not None and record_step <= step:
                complete = line.endswith(b"\n")
                kept.append(line if complete else line + b"\n")
            else:
                removed += 1
    if removed or not complete:
        write_atomic(path, b"".join(kept))
    return removed


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write a whole file next to its place and move it there: readers see the old or the new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode("utf-8", errors="backslashreplace") if isinstance(content, str) else content
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp makes files that only their owner can read
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def write_json(path: Path, value: Mapping[str, Any]) -> Path:
    """Write an object as indented JSON, atomically; nan and inf become null."""
    return write_atomic(path, json.dumps(jsonable(value), ensure_ascii=False, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where the file is missing or holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def set_aside(path: Path) -> Path | None:
    """Rename an existing file or folder to the first free ``name.N``, so that a new run loses nothing of an old one."""
    if not path.exists():
        return None
    number = 1
    while (other := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(other)
    return other
