"""conversion.json: what a conversion wrote, so that the result can be checked again at any time.

    {"format": 1, "kind": "megatron", "version": ..., "architecture": {...}, "layout": {...},
     "tensors": {hf name: [dtype, shape, xxh3_64 of its bytes]}, "files": {carried file: xxh3_64}}

Hashes are of the Hugging Face tensors in both kinds of folder, so that the two sides can be compared by their
manifests. It holds no time and no path: the same conversion gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from luspo_megatron import __version__
from luspo_megatron.convert.hf_files import file_hash
from luspo_megatron.convert.pieces import PieceMap
from luspo_megatron.convert.sources import Hashes, Source, blocks
from luspo_megatron.convert.tensors import CheckpointError, dtype_name, listed, write_durably
from luspo_megatron.convert.workspace import MANIFEST


def write_manifest(folder: Path, kind: str, pieces: PieceMap, dtypes: dict[int, torch.dtype], hashes: dict[str, str],
                   carried: list[str], layout: dict[str, int] | None) -> None:
    tensors = {name: [dtype_name(dtypes[number]), list(shape), hashes[name]]
               for number, entry in enumerate(pieces.entries) for name, shape in entry.hf_tensors}
    data: dict[str, Any] = {
        "format": 1, "kind": kind, "version": __version__, "architecture": dataclasses.asdict(pieces.table.arch),
        "layout": layout, "tensors": tensors, "files": {name: file_hash(folder / name) for name in carried}}
    write_durably(folder / MANIFEST, json.dumps(data, indent=0).encode())


def read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        assert data["format"] == 1 and isinstance(data["tensors"], dict)
    except (ValueError, KeyError, AssertionError) as error:
        raise CheckpointError(f"{path}: not a manifest of this program ({error!r})") from error
    return data


def hash_entries(context: tuple[Source, PieceMap], first: int, last: int) -> dict[str, str]:
    """Task: the hashes of the entries [first, last) as they lie on disk."""
    from luspo_megatron.convert.pool import advance

    source, pieces = context
    out: dict[str, str] = {}
    for entry in pieces.entries[first:last]:
        hashes = Hashes()
        for piece, tensors in blocks(source, pieces, entry):
            hashes.update(piece, tensors)
            advance(sum(t.numel() * t.element_size() for t in tensors))
        out.update(hashes.digests())
    return out


def differences(want: dict[str, str], got: dict[str, str]) -> list[str]:
    """Tensors that are missing, extra, or have other bytes; empty when both are the same."""
    out = [f"{name}: missing" for name in want if name not in got]
    out += [f"{name}: unexpected" for name in got if name not in want]
    return out + [f"{name}: bytes differ" for name in want if name in got and want[name] != got[name]]


def require_equal(where: Path, want: dict[str, str], got: dict[str, str]) -> None:
    if wrong := differences(want, got):
        raise CheckpointError(f"{where}: what was written is not what was read: {listed(wrong)}; remove the folder and "
                              "convert again")
