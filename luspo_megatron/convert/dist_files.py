"""Megatron's torch_dist folders (megatron.core.dist_checkpointing), read and written a few rows at a time.

Layout of such a folder: `*.distcp` files are torch.save'd chunks one after the other, `.metadata` (a pickled
torch.distributed.checkpoint Metadata) says which chunk lies where, `metadata.json` names the format, and `common.pt`
holds what is not a tensor. megatron-core's own writer builds the data of all chunks before it writes the first; here
each chunk is made when it is written. Tests load the result with megatron.core.dist_checkpointing.load. Only such
parts of a folder are read as hold model weights; optimizer state is passed over.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from luspo_megatron.convert.pieces import PieceMap, Region
from luspo_megatron.convert.tensors import CheckpointError, listed, write_durably
from luspo_megatron.weights.layouts import Shape

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "rerun_state")

Record = list[Any]
"""One written chunk, as JSON data: [key, offset, shape, byte offset in the file, length]."""


class DistFolder:
    """Reads regions of the model's tensors, under whatever layout they were saved."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            metadata = FileSystemReader(str(self.folder)).read_metadata()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{self.folder}/.metadata: cannot be read ({error}); not a complete torch_dist "
                                  "checkpoint") from error
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: value for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata) and not key.startswith(NOT_WEIGHTS)}
        self._where: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        self._leading: dict[str, int] = {}
        self._near: dict[tuple[str, Shape], list[ChunkStorageMetadata]] = {}
        self._last: tuple[MetadataIndex, Tensor] | None = None
        self._check_sizes()

    def _check_sizes(self) -> None:
        ends: dict[str, int] = defaultdict(int)
        for info in self._where.values():
            ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
        missing = sorted(name for name in ends if not (self.folder / name).is_file())
        if missing:
            raise CheckpointError(f"{self.folder}: files are missing: {listed(missing)}")
        short = [f"{name} has {size} bytes, needs {end}" for name, end in sorted(ends.items())
                 if (size := (self.folder / name).stat().st_size) < end]
        if short:
            raise CheckpointError(f"{self.folder}: truncated files: {listed(short)}")

    def fit(self, pieces: PieceMap) -> None:
        """CheckpointError unless exactly the model's tensors are here, each covered exactly once by its chunks."""
        want = pieces.global_shapes()
        have = {key: tuple(value.size) for key, value in self.tensors.items()}
        wrong = [f"{key} {have[key]} instead of {want[key]}" for key in want if key in have and have[key] != want[key]]
        problems = [f"{title}: {listed(names)}" for title, names in (
            ("missing", sorted(set(want) - set(have))), ("unexpected", sorted(set(have) - set(want))),
            ("wrong shape", wrong)) if names]
        if problems:
            raise CheckpointError(f"{self.folder}: tensors do not fit the config.json; " + "; ".join(problems))
        for row in pieces.table.rows:
            if not row.load_only:
                self._index(pieces.key(row), len(want[pieces.key(row)]) - len(row.shapes[0]))
        if holes := [key for key in want if not self._tiled(key)]:
            raise CheckpointError(f"{self.folder}: chunks missing or overlapping in: {listed(holes)}")

    def _index(self, key: str, leading: int) -> None:
        """Chunks by layer and expert, so that a region finds its own at once."""
        self._leading[key] = leading
        for chunk in self.tensors[key].chunks:
            axes = (range(o, o + s) for o, s in zip(chunk.offsets[:leading], chunk.sizes[:leading], strict=True))
            for at in product(*axes):
                self._near.setdefault((key, at), []).append(chunk)

    def _tiled(self, key: str) -> bool:
        chunks = self.tensors[key].chunks
        if sum(prod(c.sizes) for c in chunks) != prod(self.tensors[key].size):
            return False
        boxes = {(tuple(c.offsets), tuple(c.sizes)) for c in chunks}
        near = (group for (k, _), group in self._near.items() if k == key)
        return len(boxes) == len(chunks) and not any(
            _overlap(a.offsets, a.sizes, b.offsets, b.sizes) for group in near
            for i, a in enumerate(group) for b in group[i + 1 :])

    def read(self, region: Region) -> Tensor:
        """The region as one tensor. CheckpointError names the key where chunks are missing."""
        found = []
        for chunk in self._candidates(region):
            box = _overlap(chunk.offsets, chunk.sizes, region.offset, region.shape)
            if box is not None:
                found.append((chunk, box))
        if len(found) == 1 and tuple(found[0][0].offsets) == region.offset and tuple(found[0][0].sizes) == region.shape:
            return self._chunk(region.key, found[0][0], keep=False)
        if sum(prod(size for _, size in box) for _, box in found) != prod(region.shape):
            raise CheckpointError(f"{self.folder}: {region.key} at {region.offset}: chunks are missing")
        out = torch.empty(region.shape, dtype=self.tensors[region.key].properties.dtype)
        for chunk, box in found:
            source = self._chunk(region.key, chunk, keep=True)
            source = source[tuple(slice(a - o, a - o + n) for (a, n), o in zip(box, chunk.offsets, strict=True))]
            out[tuple(slice(a - o, a - o + n) for (a, n), o in zip(box, region.offset, strict=True))] = source
        return out

    def _candidates(self, region: Region) -> Iterator[ChunkStorageMetadata]:
        leading = self._leading[region.key]
        axes = zip(region.offset[:leading], region.shape[:leading], strict=True)
        for at in product(*(range(o, o + s) for o, s in axes)):
            yield from self._near.get((region.key, at), ())

    def _chunk(self, key: str, chunk: ChunkStorageMetadata, keep: bool) -> Tensor:
        """A whole chunk; the last one is kept where several regions lie in it."""
        index = MetadataIndex(key, chunk.offsets)
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        self._last = None  # before the next one is read: one chunk in memory, not two
        info = self._where[index]
        path = self.folder / info.relative_path
        with open(path, "rb", buffering=0) as file:
            try:
                view = io.BufferedReader(_Slice(file, info.offset, info.length))
                value = torch.load(view, map_location="cpu", weights_only=True)
            except Exception as error:  # torch raises many kinds for damaged bytes
                raise CheckpointError(f"{path}: the chunk of {key} at byte {info.offset} is damaged ({error}); "
                                      "copy the file again") from error
        if tuple(value.shape) != tuple(chunk.sizes):
            raise CheckpointError(f"{path}: the chunk of {key} at byte {info.offset} has shape {tuple(value.shape)} "
                                  f"instead of {tuple(chunk.sizes)}")
        if keep:
            self._last = (index, value)
        return value  # type: ignore[no-any-return]

    def file_of(self, region: Region) -> Path:
        """The first file that holds a part of the region."""
        chunk = next(iter(self._candidates(region)))
        return self.folder / self._where[MetadataIndex(region.key, chunk.offsets)].relative_path

    def dtype(self, key: str) -> torch.dtype:
        return self.tensors[key].properties.dtype


def _overlap(a: Any, a_size: Any, b: Any, b_size: Any) -> list[tuple[int, int]] | None:
    """Common box as (start, extent) per axis; None where there is none."""
    box = []
    for start, extent, other, other_extent in zip(a, a_size, b, b_size, strict=True):
        first, last = max(start, other), min(start + extent, other + other_extent)
        if first >= last:
            return None
        box.append((first, last - first))
    return box


class _Slice(io.RawIOBase):
    """Read-only view of bytes [start, start + length) of an open file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._fd, self._start, self._length, self._at = file.fileno(), start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], self._start + self._at)
            if count == 0:
                break
            done, self._at = done + count, self._at + count
        return done


class ChunkFile:
    """Writes one .distcp file: chunks one after the other, fsynced when closed."""

    def __init__(self, path: Path) -> None:
        # Checksums of the zip members take four fifths of torch.save's time; the manifest has better ones.
        torch.serialization.set_crc32_options(False)
        self._file = open(path, "wb", buffering=2**20)  # noqa: SIM115
        self.records: list[Record] = []

    def write(self, region: Region, value: Tensor) -> None:
        start = self._file.tell()
        torch.save(value, self._file)
        self.records.append([region.key, list(region.offset), list(region.shape), start, self._file.tell() - start])

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def write_metadata(folder: Path, shapes: dict[str, Shape], dtypes: dict[str, torch.dtype],
                   files: dict[str, list[Record]]) -> None:
    """`.metadata`, `metadata.json` and `common.pt` of the chunks in `files` (file name -> its records)."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {key: [] for key in shapes}
    where = {}
    for name, records in files.items():
        for key, offset, shape, start, length in records:
            chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
            chunks[key].append(chunk)
            where[MetadataIndex(key, chunk.offsets)] = _StorageInfo(name, start, length)
    tensors: dict[str, Any] = {
        key: TensorStorageMetadata(TensorProperties(dtype=dtypes[key]), torch.Size(shape), chunks[key])
        for key, shape in shapes.items()}
    common = io.BytesIO()
    torch.save({}, common)
    write_durably(folder / "common.pt", common.getvalue())
    write_durably(folder / "metadata.json", json.dumps(FORMAT).encode())
    write_durably(folder / ".metadata", pickle.dumps(Metadata(tensors, storage_data=where)))
