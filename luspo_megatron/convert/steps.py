"""Steps that both directions share: the dtypes of the result, its check, errors of the disk."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from luspo_megatron.convert.manifest import hash_entries, require_equal
from luspo_megatron.convert.pieces import PieceMap
from luspo_megatron.convert.pool import NO_ROOM, Pool, Progress
from luspo_megatron.convert.sources import Checkpoint, Source, runs
from luspo_megatron.convert.tensors import PARAMETER_DTYPES, CheckpointError, dtype_name, dtype_of


@dataclass
class Summary:
    """What a conversion did: seconds of its phases, bytes and tensors of the result."""

    seconds: dict[str, float] = field(default_factory=dict)
    nbytes: int = 0
    tensors: int = 0
    resumed_parts: int = 0
    parts: int = 0
    warnings: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began

    def lines(self) -> list[str]:
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())
        rate = self.nbytes / 1e6 / max(self.seconds.get("convert", 0.0), 1e-9)
        out = [f"{self.tensors} tensors, {self.nbytes / 1e9:.2f} GB, {self.parts} files"
               + (f" ({self.resumed_parts} of an earlier run)" if self.resumed_parts else f", {rate:.0f} MB/s"), phases]
        return out


def target_dtypes(source: Source, pieces: PieceMap, name: str | None) -> dict[int, torch.dtype]:
    """Entry number -> dtype in the result: `name`, or as stored (None). One kind of parameter has one dtype."""
    if name is not None:
        return dict.fromkeys(range(len(pieces.entries)), dtype_of(name))
    dtypes = {number: source.dtype(entry) for number, entry in enumerate(pieces.entries)}
    by_row: dict[str, torch.dtype] = {}
    for number, entry in enumerate(pieces.entries):
        if dtypes[number] not in PARAMETER_DTYPES:
            raise CheckpointError(f"{entry.hf_names[0]}: dtype {dtype_name(dtypes[number])} is stored; choose another "
                                  "with --dtype")
        if by_row.setdefault(entry.row.megatron, dtypes[number]) != dtypes[number]:
            raise CheckpointError(f"{entry.hf_names[0]}: stored as {dtype_name(dtypes[number])}, other layers as "
                                  f"{dtype_name(by_row[entry.row.megatron])}; choose one with --dtype")
    return dtypes


def main_dtype(dtypes: dict[int, torch.dtype], pieces: PieceMap) -> str:
    """The dtype that config.json states: that of the most elements."""
    sizes: dict[torch.dtype, int] = {}
    for number, entry in enumerate(pieces.entries):
        sizes[dtypes[number]] = sizes.get(dtypes[number], 0) + pieces.nbytes(entry, 1)
    return dtype_name(max(sizes, key=lambda dtype: sizes[dtype]))


def check_written(source: Source, pieces: PieceMap, want: dict[str, str], where: Path, workers: int, label: str,
                  quiet: bool) -> None:
    """Reads the result back and compares every tensor with the hash taken of what was read from the input."""
    got: dict[str, str] = {}
    total = sum(pieces.nbytes(e, source.dtype(e).itemsize) for e in pieces.entries)
    progress = Progress(label, total, quiet=quiet)

    def finished(task: Any, hashes: dict[str, str]) -> None:
        got.update(hashes)

    with Pool(workers, (source, pieces)) as pool:
        done = pool.run(hash_entries, runs(pieces, range(len(pieces.entries)), 4), progress=progress, finished=finished)
    progress.show(done, last=True)
    require_equal(where, want, got)


def require_once(pieces: PieceMap, hashes: list[dict[str, str]]) -> dict[str, str]:
    """All hashes of the parts in one; RuntimeError unless every tensor of the model is in exactly one part."""
    together: dict[str, str] = {}
    for part in hashes:
        if twice := together.keys() & part.keys():
            raise RuntimeError(f"converted twice: {sorted(twice)[:5]}")
        together |= part
    if together.keys() != pieces.table.hf_shapes.keys():
        raise RuntimeError(f"not converted: {sorted(pieces.table.hf_shapes.keys() - together.keys())[:5]}")
    return together


@contextlib.contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """A full disk or a failing one is one message, not a traceback."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            free = shutil.disk_usage(out.parent).free
            raise CheckpointError(f"{out}.partial: no room left to write ({error.strerror}, {free / 1e9:.2f} GB free); "
                                  "make room and go on with --resume") from error
        raise CheckpointError(f"{error.filename or out}: {error.strerror}; mend it and go on with --resume") from error


def config_problems(side: Checkpoint, other: Checkpoint) -> list[str]:
    """Facts of the two config.json files that differ."""
    a, b = vars(side.arch), vars(other.arch)
    return [f"{key}: {a[key]} and {b[key]}" for key in a if a[key] != b[key]]
