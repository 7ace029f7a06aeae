"""One view of both kinds of checkpoint: pieces read as rows of Hugging Face tensors, and their hashes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from luspo_megatron.convert.dist_files import DistFolder
from luspo_megatron.convert.hf_files import HfFolder
from luspo_megatron.convert.pieces import Piece, PieceMap
from luspo_megatron.convert.tensors import CheckpointError, listed, raw
from luspo_megatron.errors import UserError
from luspo_megatron.weights.architecture import Architecture, padded_vocab, read_architecture
from luspo_megatron.weights.table import Entry, WeightTable

EMBEDDING = "embedding.word_embeddings.weight"


class Source(Protocol):
    """A checkpoint whose tensors have been checked against its config.json."""

    def read(self, piece: Piece) -> list[Tensor]:
        """The piece's rows of each of its Hugging Face tensors, in new memory."""

    def dtype(self, entry: Entry) -> torch.dtype:
        """As stored."""

    def file_of(self, entry: Entry, name: str) -> Path:
        """The file that holds (the beginning of) a Hugging Face tensor of the entry."""


class HfSource:
    def __init__(self, folder: Path, table: WeightTable) -> None:
        self.files = HfFolder(folder)
        self.files.fit(table)

    def read(self, piece: Piece) -> list[Tensor]:
        if len(piece.names) == 1:
            return [self.files.read(piece.names[0], piece.start, piece.stop)]
        return [self.files.read(name, 0, shape[0]) for name, shape in zip(piece.names, piece.row.shapes, strict=True)]

    def dtype(self, entry: Entry) -> torch.dtype:
        dtypes = {self.files.tensors[name].dtype for name in entry.hf_names}
        if len(dtypes) > 1:
            raise CheckpointError(f"{self.files.folder}: {listed(list(entry.hf_names))} are fused but have different "
                                  "dtypes; choose one with --dtype")
        return dtypes.pop()

    def file_of(self, entry: Entry, name: str) -> Path:
        return self.files.file_of(name)


class MegatronSource:
    def __init__(self, folder: Path, table: WeightTable) -> None:
        self.files = DistFolder(folder)
        known = self.files.tensors.get(EMBEDDING)
        self.pieces = PieceMap(table, known.size[0] if known else padded_vocab(table.arch.vocab_size, 1))
        if known and known.size[0] < table.arch.vocab_size:
            raise CheckpointError(f"{folder}: {EMBEDDING} has {known.size[0]} rows, config.json says "
                                  f"vocab_size={table.arch.vocab_size}")
        self.files.fit(self.pieces)

    def read(self, piece: Piece) -> list[Tensor]:
        return piece.to_hf(self.files.read(piece.region))

    def dtype(self, entry: Entry) -> torch.dtype:
        return self.files.dtype(self.pieces.key(entry.row))

    def file_of(self, entry: Entry, name: str) -> Path:
        pieces = self.pieces.pieces(entry, self.dtype(entry).itemsize)
        return self.files.file_of(next(piece.region for piece in pieces if name in piece.names))


@dataclass(frozen=True)
class Checkpoint:
    """A folder of either kind, opened. `config_folder` holds config.json and tokenizer."""

    path: Path
    kind: str  # "huggingface" | "megatron"
    config_folder: Path
    arch: Architecture
    table: WeightTable
    pieces: PieceMap
    source: Source
    weights: Path  # the folder of the weight files

    @property
    def num_bytes(self) -> int:
        return sum(self.pieces.nbytes(e, self.source.dtype(e).itemsize) for e in self.pieces.entries)


def open_checkpoint(path: str | Path, hf_config: str | Path | None = None, family: str = "") -> Checkpoint:
    """A Hugging Face folder, a converted folder, a training checkpoint (step-000010), a run folder, or a bare
    torch_dist folder. `family` is model.family; a Megatron checkpoint remembers its own. UserError where it is none of
    these, CheckpointError where its tensors are not those of its config.json."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    weights = _dist_of(path)
    if weights is None:
        if not any(path.glob("*.safetensors")):
            raise UserError(f"{path}: neither a Hugging Face folder (*.safetensors) nor a Megatron checkpoint "
                            "(dist/.metadata)")
        arch = read_architecture(path, family)
        table = WeightTable(arch)
        pieces = PieceMap(table, padded_vocab(arch.vocab_size, 1))
        return Checkpoint(path, "huggingface", path, arch, table, pieces, HfSource(path, table), path)
    config_folder = Path(hf_config) if hf_config else _config_of(weights)
    arch = read_architecture(config_folder, family or _model_of(weights).get("family", ""))
    table = WeightTable(arch)
    source = MegatronSource(weights, table)
    return Checkpoint(path, "megatron", config_folder, arch, table, source.pieces, source, weights)


def _dist_of(path: Path) -> Path | None:
    """The torch_dist folder of a checkpoint, or of the newest checkpoint of a run."""
    steps = [p / "dist" for p in sorted(path.glob("checkpoints/step-??????")) if (p / "state.json").is_file()]
    for folder in (path, path / "dist", *reversed(steps)):
        if (folder / ".metadata").is_file():
            return folder
    return None


def _config_of(weights: Path) -> Path:
    """Where the config.json of a torch_dist folder is: beside it, or in the model that the training started from."""
    for folder in (weights, weights.parent):
        if (folder / "config.json").is_file():
            return folder
    known = _model_of(weights).get("hf")
    if not known or not (Path(known) / "config.json").is_file():
        seen = f" (its state.json names {known})" if known else ""
        raise UserError(f"{weights.parent}: no config.json{seen}; name the folder of the Hugging Face model with "
                        "--hf-config")
    return Path(known)


def _model_of(weights: Path) -> dict[str, Any]:
    """What the state.json of a training checkpoint or of a converted folder says of the model."""
    state = weights.parent / "state.json"
    return json.loads(state.read_text()).get("model", {}) if state.is_file() else {}


class Hashes:
    """xxh3_64 of Hugging Face tensors whose rows come one block after the other."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    def update(self, piece: Piece, tensors: list[Tensor]) -> None:
        for name, tensor in zip(piece.names, tensors, strict=True):
            self._states.setdefault(name, xxhash.xxh3_64()).update(raw(tensor))

    def digests(self) -> dict[str, str]:
        return {name: state.hexdigest() for name, state in self._states.items()}


def blocks(source: Source, pieces: PieceMap, entry: Entry, dtype: torch.dtype | None = None,
           ) -> Iterator[tuple[Piece, list[Tensor]]]:
    """(piece, its rows of each Hugging Face tensor in `dtype`) of a whole entry."""
    target = dtype or source.dtype(entry)
    for piece in pieces.pieces(entry, target.itemsize):
        yield piece, [tensor.to(target) for tensor in source.read(piece)]


def runs(pieces: PieceMap, entries: range, itemsize: int, most_bytes: int = 64 * 2**20,
         most_entries: int = 512) -> list[tuple[int, int]]:
    """Cuts a range of entry numbers into consecutive (first, last) runs of about `most_bytes`."""
    sizes = [pieces.nbytes(pieces.entries[number], itemsize) for number in entries]
    return [(entries.start + first, entries.start + last) for first, last in cuts(sizes, most_bytes, most_entries)]


def cuts(sizes: Sequence[int], most_bytes: int, most_items: int | None = None) -> list[tuple[int, int]]:
    """Consecutive (first, last) positions whose sizes add up to at most `most_bytes`; a larger one stands alone."""
    out: list[tuple[int, int]] = []
    first, size = 0, 0
    for at, nbytes in enumerate(sizes):
        if at > first and (size + nbytes > most_bytes or at - first == most_items):
            out.append((first, at))
            first, size = at, 0
        size += nbytes
    if sizes:
        out.append((first, len(sizes)))
    return out
