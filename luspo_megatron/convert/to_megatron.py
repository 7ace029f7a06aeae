"""Hugging Face folder -> Megatron (torch_dist) folder.

    OUT/dist/            chunks, loadable under every layout; OUT is also a folder for --model.megatron
    OUT/config.json ...  carried along, so that OUT can be converted back and exported by itself
    OUT/state.json       so that training's checkpoint reader takes OUT for a checkpoint at step 0
    OUT/conversion.json  the manifest

Each .distcp file holds parameters of one pipeline stage and expert rank; each is written by one worker, chunk after
chunk, fsynced, and recorded.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from luspo_megatron.convert import dist_files
from luspo_megatron.convert.carry import carry, check_companions, stated_dtypes
from luspo_megatron.convert.dist_files import ChunkFile
from luspo_megatron.convert.manifest import write_manifest
from luspo_megatron.convert.pieces import PieceMap
from luspo_megatron.convert.pool import Pool, Progress, advance
from luspo_megatron.convert.sources import Hashes, MegatronSource, Source, blocks, cuts, open_checkpoint
from luspo_megatron.convert.steps import Summary, check_written, disk_errors, main_dtype, require_once, target_dtypes
from luspo_megatron.convert.tensors import write_durably
from luspo_megatron.convert.workspace import Workspace, is_complete, source_files
from luspo_megatron.errors import UserError
from luspo_megatron.weights.architecture import Architecture, padded_vocab
from luspo_megatron.weights.plan import stage_of, stages_of
from luspo_megatron.weights.table import Entry

SMALLEST_FILE, LARGEST_FILE = 64 * 2**20, 2**30
MOST_ENTRIES = 2048


@dataclass(frozen=True)
class Layout:
    """What --tp --pp --ep --etp say; torch_dist needs no world size."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def require(self, arch: Architecture) -> None:
        """UserError with every rule that the sizes break."""
        rules = [("--pp", self.pp, arch.num_layers, "layers"), ("--tp", self.tp, arch.num_kv_heads, "key/value heads")]
        if arch.is_moe:
            rules += [("--ep", self.ep, arch.num_experts, "experts"), ("--etp", self.etp, arch.moe_ffn, "moe_ffn")]
        elif self.ep > 1:
            rules.append(("--ep", self.ep, 1, "experts (a dense model)"))
        wrong = [f"{flag} {size} does not divide the {count} {what}" for flag, size, count, what in rules
                 if size < 1 or count % size]
        if wrong:
            raise UserError("; ".join(wrong))

    def group(self, entry: Entry, arch: Architecture) -> int:
        """The pipeline stage and expert rank that own a parameter, as one number."""
        ep = entry.expert // (arch.num_experts // self.ep) if entry.row.per_expert else 0
        return stage_of(entry, stages_of(arch.num_layers, self.pp), self.pp) * self.ep + ep


def plan_files(pieces: PieceMap, layout: Layout, itemsize: int) -> dict[str, list[int]]:
    """File name -> entry numbers: __<group>_<n>.distcp, each of at most a bounded size and number of entries."""
    total = sum(pieces.nbytes(entry, itemsize) for entry in pieces.entries)
    most = min(max(total // 32, SMALLEST_FILE), LARGEST_FILE)
    groups: dict[int, list[int]] = {}
    for number, entry in enumerate(pieces.entries):
        groups.setdefault(layout.group(entry, pieces.table.arch), []).append(number)
    files = {}
    for group, numbers in sorted(groups.items()):
        sizes = [pieces.nbytes(pieces.entries[number], itemsize) for number in numbers]
        for n, (first, last) in enumerate(cuts(sizes, most, MOST_ENTRIES)):
            files[f"__{group}_{n}.distcp"] = numbers[first:last]
    return files


@dataclass(frozen=True)
class _Context:
    source: Source
    pieces: PieceMap
    dtypes: dict[int, torch.dtype]
    files: dict[str, list[int]]
    folder: Path


def write_file(context: _Context, name: str) -> dict[str, Any]:
    """Task: one .distcp file; returns its chunks and the hashes of the Hugging Face tensors in it."""
    hashes = Hashes()
    file = ChunkFile(context.folder / name)
    for number in context.files[name]:
        for piece, tensors in blocks(context.source, context.pieces, context.pieces.entries[number],
                                     context.dtypes[number]):
            hashes.update(piece, tensors)
            file.write(piece.region, piece.to_megatron(tensors))
            advance(sum(t.numel() * t.element_size() for t in tensors))
    file.close()
    return {"chunks": file.records, "hashes": hashes.digests()}


def convert(hf: str | Path, out: str | Path, layout: Layout, *, dtype: str | None = None, family: str = "",
            workers: int = 1, resume: bool = False, quiet: bool = False) -> Summary:
    """Writes `out`, complete and verified, or raises (UserError, CheckpointError) and leaves OUT.partial."""
    out, summary = Path(out).absolute(), Summary()
    if resume and is_complete(out):
        return summary
    with summary.phase("read headers"):
        source = open_checkpoint(hf, family=family)
        if source.kind != "huggingface":
            raise UserError(f"{hf}: is a Megatron checkpoint; --hf takes a Hugging Face folder")
        layout.require(source.arch)
        summary.warnings = check_companions(source.config_folder, source.arch)
        pieces = PieceMap(source.table, padded_vocab(source.arch.vocab_size, layout.tp))
        dtypes = target_dtypes(source.source, pieces, dtype)
        main = main_dtype(dtypes, pieces)
        summary.warnings += [f"{source.config_folder}/config.json says {key}={said}, the weights are {main}; the "
                             f"result will say {main}" for key, said in stated_dtypes(source.config_folder).items()
                             if dtype is None and said != main]
        files = plan_files(pieces, layout, max(d.itemsize for d in dtypes.values()))
    plan = {"source": str(source.path.absolute()), "files": source_files(source.path), "dtype": dtype,
            "family": family, "layout": dataclasses.asdict(layout)}
    with disk_errors(out), Workspace(out, plan, resume=resume) as space:
        dist = space.out / "dist"
        dist.mkdir(exist_ok=True)
        with summary.phase("convert"):
            parts = _convert(_Context(source.source, pieces, dtypes, files, dist), space, summary, workers, quiet)
        hashes = require_once(pieces, [part["hashes"] for part in parts.values()])
        by_key = {pieces.key(entry.row): dtypes[number] for number, entry in enumerate(pieces.entries)}
        dist_files.write_metadata(dist, pieces.global_shapes(), by_key,
                                  {name: part["chunks"] for name, part in parts.items()})
        carried = carry(source.config_folder, space.out, main, must_say=dtype is not None)
        with summary.phase("verify"):
            check_written(MegatronSource(dist, source.table), pieces, hashes, space.partial, workers, "verify", quiet)
        write_manifest(space.out, "megatron", pieces, dtypes, hashes, carried, dataclasses.asdict(layout))
        _write_state(space.out, out, layout, main, family)
        space.publish()
    return summary


def _convert(context: _Context, space: Workspace, summary: Summary, workers: int, quiet: bool) -> dict[str, Any]:
    pieces, dtypes = context.pieces, context.dtypes
    sizes = {name: sum(pieces.nbytes(pieces.entries[i], dtypes[i].itemsize) for i in numbers)
             for name, numbers in context.files.items()}
    parts = {name: space.recorded(name) for name in context.files}
    todo = [name for name, part in parts.items() if part is None]
    summary.parts, summary.resumed_parts = len(parts), len(parts) - len(todo)
    summary.nbytes, summary.tensors = sum(sizes.values()), len(pieces.table.hf_shapes)
    space.need(sum(sizes[name] for name in todo))
    before = summary.nbytes - sum(sizes[name] for name in todo)

    def finished(task: tuple[Any, ...], result: Any) -> None:
        space.record(task[0], result)

    progress = Progress("convert", summary.nbytes, quiet=quiet)
    with Pool(workers, context) as pool:
        done = pool.run(write_file, [(name,) for name in todo], progress=progress, finished=finished, before=before)
    progress.show(done, last=True)
    # from the records in any case: then a resumed conversion pickles the same objects into .metadata
    return {name: space.recorded(name) for name in parts}


def _write_state(folder: Path, final: Path, layout: Layout, dtype: str, family: str) -> None:
    """What actor/checkpoint.py reads of a checkpoint, for a policy that has not been trained yet."""
    state = {"step": 0, "updates": 0, "weight_version": 1, "converted": True,
             "model": {"hf": str(final), "family": family,
                       "dtype": dtype if dtype in ("float32", "bfloat16") else "float32"},
             "layout": dataclasses.asdict(layout)}
    write_durably(folder / "state.json", json.dumps(state, indent=1).encode())
