"""Buckets through files: the transport that always works, where trainer and engines share a folder.

A push is a folder of safetensors, one file per bucket, each written under another name and renamed, so that a file is
whole or absent:

    <folder>/weights-000012/source0-00000.safetensors ...
                            model.safetensors.index.json     last of all, by `finish`

Tensors have their Hugging Face names and shapes; a tensor that is cut lies as flat slices `name[start:stop]`. Without
cut tensors (the sync plans for that) a finished folder is what engines load from disk. Checksums travel in the files'
metadata. A buffer is free as soon as its file is written. Left out: the model's config and tokenizer files.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from luspo_megatron.errors import RunError
from luspo_megatron.weights.manifest import Bucket, EngineConnection, Manifest
from luspo_megatron.weights.transports.base import TransferError, Verify, check_trailer, make_trailer

INDEX = "model.safetensors.index.json"


def push_folder(folder: str | Path, version: int) -> Path:
    return Path(folder) / f"weights-{version:06d}"


def _file(folder: Path, source: int, number: int) -> Path:
    return folder / f"source{source}-{number:05d}.safetensors"


class _Written:
    def wait(self) -> None:
        return None


class DiskSender:
    """One source's end."""

    def __init__(self, folder: str | Path, source: int, *, verify: Verify = "full") -> None:
        self.folder, self.source, self.verify = Path(folder), source, verify
        self._here, self._number, self._turn = self.folder, 0, 0

    def begin(self, manifest: Manifest) -> None:
        self._here, self._number, self._turn = push_folder(self.folder, manifest.version), 0, manifest.version

    def send(self, bucket: Bucket, buffer: Tensor) -> _Written:
        """Writes ``buffer``, uint8 [bucket.nbytes], and returns when the file is there."""
        host = buffer.cpu()
        tensors: dict[str, Tensor] = {}
        for piece in bucket.slices:
            values = host[piece.offset : piece.offset + piece.nbytes].view(getattr(torch, piece.dtype))
            tensors[str(piece)] = values.view(piece.shape) if piece.whole else values
        trailer = make_trailer(bucket, host, self.verify, self._turn)
        path = _file(self._here, self.source, self._number)
        partial = path.with_suffix(".partial")
        try:
            self._here.mkdir(parents=True, exist_ok=True)
            # one storage under several names is not allowed, and slices share the buffer
            save_file({name: tensor.clone() for name, tensor in tensors.items()}, partial,
                      metadata={"format": "pt", "checksums": json.dumps(trailer.tolist())})
            os.replace(partial, path)
        except (OSError, SafetensorError) as error:
            raise TransferError(f"weight bucket {self._number} from source {self.source} could not be written to "
                                f"{path}: {error}") from error
        self._number += 1
        return _Written()

    def close(self) -> None:
        return None


def finish(folder: str | Path, manifest: Manifest) -> Path:
    """Rank 0, after all sources: writes the index and removes older pushes. The push's folder."""
    here = push_folder(folder, manifest.version)
    numbers: dict[int, int] = {}
    weight_map: dict[str, str] = {}
    for bucket in manifest.buckets:
        number = numbers[bucket.source] = numbers.get(bucket.source, -1) + 1
        weight_map.update({str(piece): _file(here, bucket.source, number).name for piece in bucket.slices})
    index = {"metadata": {"total_size": sum(s.nbytes for b in manifest.buckets for s in b.slices)},
             "weight_map": weight_map}
    partial = here / f"{INDEX}.partial"
    try:
        partial.write_text(json.dumps(index))
        os.replace(partial, here / INDEX)
        for old in Path(folder).glob("weights-??????"):
            if old.name < here.name:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise RunError(f"{here}: the index of the push could not be written: {error}") from error
    return here


class DiskReceiver:
    """An engine worker's end. Files are complete before the engine is told of a push."""

    def __init__(self, connection: EngineConnection) -> None:
        self.folder = Path(connection.folder)
        self._here, self._numbers = self.folder, dict.fromkeys(connection.sources, 0)

    def begin(self, manifest: Manifest) -> None:
        self._here, self._numbers = push_folder(self.folder, manifest.version), dict.fromkeys(self._numbers, 0)

    def receive(self, bucket: Bucket) -> Tensor:
        """The next bucket of its source, uint8 [bucket.nbytes], checksums compared. Raises TransferError."""
        number = self._numbers[bucket.source]
        self._numbers[bucket.source] += 1
        path = _file(self._here, bucket.source, number)
        buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        try:
            with safe_open(path, framework="pt") as file:
                metadata: dict[str, Any] = file.metadata() or {}
                for piece in bucket.slices:
                    raw = file.get_tensor(str(piece)).reshape(-1).view(torch.uint8)
                    buffer[piece.offset : piece.offset + piece.nbytes].copy_(raw)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise TransferError(f"weight bucket {number} from source {bucket.source} cannot be read from {path}: "
                                f"{error}") from error
        check_trailer(bucket, buffer, torch.tensor(json.loads(metadata["checksums"]), dtype=torch.int64), number)
        return buffer

    def close(self) -> None:
        return None
