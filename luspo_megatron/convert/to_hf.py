"""Megatron (torch_dist) checkpoint -> Hugging Face folder of sharded safetensors with an index.

One shard is written at a time: its header first, then every worker writes its tensors in place, then fsync. The padded
vocabulary is trimmed, experts get their names on disk, a tied head is left out (config.json ties it).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from luspo_megatron.convert.carry import carry, check_companions
from luspo_megatron.convert.hf_files import INDEX, make_header
from luspo_megatron.convert.manifest import write_manifest
from luspo_megatron.convert.pieces import PieceMap
from luspo_megatron.convert.pool import Pool, Progress, advance
from luspo_megatron.convert.sources import Hashes, HfSource, Source, blocks, cuts, open_checkpoint, runs
from luspo_megatron.convert.steps import Summary, check_written, disk_errors, main_dtype, require_once, target_dtypes
from luspo_megatron.convert.tensors import pwrite, raw, write_durably
from luspo_megatron.convert.workspace import Workspace, is_complete, source_files
from luspo_megatron.errors import UserError
from luspo_megatron.weights.layouts import Shape


@dataclass(frozen=True)
class Shard:
    """One output file: entries [first, last), its header, and where each tensor starts."""

    name: str
    first: int
    last: int
    header: bytes
    starts: dict[str, int]
    size: int


def plan_shards(pieces: PieceMap, dtypes: dict[int, torch.dtype], shard_bytes: int) -> list[Shard]:
    """Consecutive entries up to `shard_bytes`; an entry that is larger is a shard of its own."""
    sizes = [pieces.nbytes(entry, dtypes[number].itemsize) for number, entry in enumerate(pieces.entries)]
    parts = cuts(sizes, shard_bytes)
    shards = []
    for i, (first, last) in enumerate(parts):
        tensors: dict[str, tuple[torch.dtype, Shape]] = {
            name: (dtypes[number], shape) for number in range(first, last)
            for name, shape in pieces.entries[number].hf_tensors}
        header, starts, total = make_header(tensors)
        shards.append(Shard(f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors", first, last, header, starts, total))
    return shards


@dataclass(frozen=True)
class _Context:
    source: Source
    pieces: PieceMap
    dtypes: dict[int, torch.dtype]
    shards: list[Shard]
    folder: Path


def write_entries(context: _Context, shard: int, first: int, last: int) -> dict[str, str]:
    """Task: entries [first, last) into their places in a shard that exists; returns the hashes of their tensors."""
    target = context.shards[shard]
    hashes = Hashes()
    fd = os.open(context.folder / target.name, os.O_WRONLY)
    try:
        for number in range(first, last):
            for piece, tensors in blocks(context.source, context.pieces, context.pieces.entries[number],
                                         context.dtypes[number]):
                hashes.update(piece, tensors)
                for name, tensor in zip(piece.names, tensors, strict=True):
                    row = prod(tensor.shape[1:]) * tensor.element_size()
                    start = piece.start if len(piece.names) == 1 else 0
                    pwrite(fd, raw(tensor), target.starts[name] + start * row)
                    advance(tensor.numel() * tensor.element_size())
    finally:
        os.close(fd)
    return hashes.digests()


def convert(megatron: str | Path, out: str | Path, *, hf_config: str | Path | None = None, shard_bytes: int = 5 * 10**9,
            dtype: str | None = None, family: str = "", workers: int = 1, resume: bool = False,
            quiet: bool = False) -> Summary:
    """Writes `out`, complete and verified, or raises (UserError, CheckpointError) and leaves OUT.partial."""
    out, summary = Path(out).absolute(), Summary()
    if resume and is_complete(out):
        return summary
    if shard_bytes < 1:
        raise UserError(f"--shard-size {shard_bytes}: must be positive")
    with summary.phase("read metadata"):
        source = open_checkpoint(megatron, hf_config, family)
        if source.kind != "megatron":
            raise UserError(f"{megatron}: is a Hugging Face folder; --megatron takes a Megatron checkpoint")
        summary.warnings = check_companions(source.config_folder, source.arch)
        dtypes = target_dtypes(source.source, source.pieces, dtype)
        shards = plan_shards(source.pieces, dtypes, shard_bytes)
    plan = {"source": str(source.weights.absolute()), "files": source_files(source.weights), "dtype": dtype,
            "shard_size": shard_bytes, "config": str(source.config_folder.absolute()), "family": source.arch.family}
    with disk_errors(out), Workspace(out, plan, resume=resume) as space:
        with summary.phase("convert"):
            context = _Context(source.source, source.pieces, dtypes, shards, space.out)
            hashes = require_once(source.pieces, _convert(context, space, summary, workers, quiet))
        _write_index(space.out, context)
        carried = carry(source.config_folder, space.out, main_dtype(dtypes, source.pieces), must_say=dtype is not None)
        with summary.phase("verify"):
            check_written(HfSource(space.out, source.table), source.pieces, hashes, space.partial, workers, "verify",
                          quiet)
        write_manifest(space.out, "huggingface", source.pieces, dtypes, hashes, carried, None)
        space.publish()
    return summary


def _convert(context: _Context, space: Workspace, summary: Summary, workers: int, quiet: bool) -> list[dict[str, str]]:
    """Hashes of each shard's tensors."""
    shards, pieces = context.shards, context.pieces
    parts = [space.recorded(shard.name) for shard in shards]
    summary.parts, summary.resumed_parts = len(shards), sum(part is not None for part in parts)
    summary.nbytes, summary.tensors = sum(s.size for s in shards), len(pieces.table.hf_shapes)
    done = sum(shard.size for shard, part in zip(shards, parts, strict=True) if part is not None)
    space.need(summary.nbytes - done)
    progress = Progress("convert", summary.nbytes, quiet=quiet)
    with Pool(workers, context) as pool:
        for i, shard in enumerate(shards):
            if parts[i] is not None:
                continue
            hashes: dict[str, str] = {}

            def finished(task: Any, result: dict[str, str], into: dict[str, str] = hashes) -> None:
                into.update(result)

            path = context.folder / shard.name
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                os.ftruncate(fd, shard.size)
                pwrite(fd, memoryview(shard.header), 0)
                itemsize = max(context.dtypes[n].itemsize for n in range(shard.first, shard.last))
                tasks = [(i, *run) for run in runs(pieces, range(shard.first, shard.last), itemsize)]
                done = pool.run(write_entries, tasks, progress=progress, finished=finished, before=done)
                os.fsync(fd)
            finally:
                os.close(fd)
            space.record(shard.name, hashes)
            parts[i] = hashes
    progress.show(summary.nbytes, last=True)
    return [part for part in parts if part is not None]


def _write_index(folder: Path, context: _Context) -> None:
    weight_map = {name: shard.name for shard in context.shards for name in shard.starts}
    total = sum(context.pieces.nbytes(entry, context.dtypes[number].itemsize)
                for number, entry in enumerate(context.pieces.entries))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_durably(folder / INDEX, json.dumps(index, indent=2).encode())
