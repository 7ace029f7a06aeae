"""Compares two checkpoints of either kind, tensor by tensor, and each with its own manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from luspo_megatron.convert.hf_files import file_hash
from luspo_megatron.convert.manifest import differences, read_manifest
from luspo_megatron.convert.pieces import PieceMap
from luspo_megatron.convert.pool import Pool, Progress, advance
from luspo_megatron.convert.sources import Checkpoint, Hashes, Source, open_checkpoint, runs
from luspo_megatron.convert.steps import config_problems
from luspo_megatron.convert.tensors import dtype_name


@dataclass
class Report:
    """`problems` is empty where everything agrees; `notes` says what was and was not checked."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def hash_in(context: list[tuple[Source, PieceMap]], which: int, cast: dict[int, str], first: int,
            last: int) -> tuple[int, dict[str, str], dict[str, str]]:
    """Task: (side, hashes as stored, hashes after the cast that the other side needs) of entries [first, last)."""
    source, pieces = context[which]
    stored: dict[str, str] = {}
    common: dict[str, str] = {}
    for number in range(first, last):
        entry = pieces.entries[number]
        plain, converted = Hashes(), Hashes()
        for piece in pieces.pieces(entry, source.dtype(entry).itemsize):
            tensors = source.read(piece)
            plain.update(piece, tensors)
            if number in cast:
                converted.update(piece, [t.to(getattr(torch, cast[number])) for t in tensors])
            advance(sum(t.numel() * t.element_size() for t in tensors))
        stored |= plain.digests()
        common |= converted.digests() if number in cast else plain.digests()
    return which, stored, common


def verify(a: str | Path, b: str | Path | None = None, *, hf_config: str | Path | None = None, family: str = "",
           workers: int = 1, quiet: bool = False) -> Report:
    """Every tensor of `a` and `b` read once. Opening them already checks names, shapes, index and file sizes."""
    report = Report()
    sides = [open_checkpoint(path, hf_config, family) for path in (a, b) if path is not None]
    if len(sides) == 2 and (wrong := config_problems(*sides)):
        report.problems += [f"{a} and {b}: config.json differs: {line}" for line in wrong]
        return report
    casts = _casts(sides, report)
    stored: list[dict[str, str]] = [{} for _ in sides]
    common: list[dict[str, str]] = [{} for _ in sides]

    def finished(task: Any, result: tuple[int, dict[str, str], dict[str, str]]) -> None:
        stored[result[0]].update(result[1])
        common[result[0]].update(result[2])

    tasks = [(i, casts[i], *run) for i, side in enumerate(sides)
             for run in runs(side.pieces, range(len(side.pieces.entries)), 4)]
    progress = Progress("verify", sum(side.num_bytes for side in sides), quiet=quiet)
    with Pool(workers, [(side.source, side.pieces) for side in sides]) as pool:
        done = pool.run(hash_in, tasks, progress=progress, finished=finished)
    progress.show(done, last=True)
    for side, hashes in zip(sides, stored, strict=True):
        _against_manifest(side, hashes, report)
    if len(sides) == 2:
        wrong = differences(*common)
        report.problems += [f"{a} and {b}: {line}" for line in wrong]
        if not wrong:
            report.notes.append(f"{a} and {b}: {len(common[0])} tensors equal")
    return report


def _casts(sides: list[Checkpoint], report: Report) -> list[dict[int, str]]:
    """Per side: entries to be compared after a cast to the other side's narrower dtype."""
    casts: list[dict[int, str]] = [{} for _ in sides]
    if len(sides) < 2:
        return casts
    pairs = set()
    for number, entry in enumerate(sides[0].pieces.entries):
        a, b = (side.source.dtype(entry) for side in sides)
        if a != b:
            narrow = a if a.itemsize < b.itemsize else b
            casts[int(narrow == a)][number] = dtype_name(narrow)
            pairs.add((dtype_name(a), dtype_name(b)))
    report.notes += [f"{sides[0].path} holds {a}, {sides[1].path} holds {b}: compared after a cast to the narrower"
                     for a, b in sorted(pairs)]
    return casts


def _against_manifest(side: Checkpoint, hashes: dict[str, str], report: Report) -> None:
    manifest = read_manifest(side.path)
    if manifest is None:
        report.notes.append(f"{side.path}: has no manifest, so damaged bytes show only by comparison")
        return
    want = {name: digest for name, (_, _, digest) in manifest["tensors"].items()}
    entry_of = {name: entry for entry in side.pieces.entries for name in entry.hf_names}
    for line in differences(want, hashes):
        name = line.split(": ")[0]
        where = side.source.file_of(entry_of[name], name) if name in entry_of else side.path
        report.problems.append(f"{where}: {line} (against conversion.json)")
    for name, digest in manifest["files"].items():
        path = side.path / name
        if not path.is_file() or file_hash(path) != digest:
            report.problems.append(f"{path}: missing or changed (against conversion.json)")
    counts = f"{len(want)} tensors and {len(manifest['files'])} files"
    report.notes.append(f"{side.path}: {counts} checked against its manifest")
