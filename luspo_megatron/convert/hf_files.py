"""Hugging Face safetensors folders, read and written a few rows at a time.

The safetensors library maps whole files when it reads and wants whole files in memory when it writes. The format is a
length, a JSON header and raw tensors, so rows can be read and written in place; tests compare with the library.
Experts that transformers 5 fuses in memory (`experts.gate_up_proj` [E, 2I, H]) are seen under their names on disk.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from luspo_megatron.convert.tensors import (
    SAFETENSORS_DTYPES,
    SAFETENSORS_NAMES,
    CheckpointError,
    listed,
    pread,
    xxh3,
)
from luspo_megatron.weights.layouts import Shape
from luspo_megatron.weights.table import WeightTable

INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100 * 2**20  # the library's own limit
FUSED = re.compile(r"(?P<prefix>.*\.mlp\.experts\.)(?P<kind>gate_up_proj|down_proj)")
IGNORED = "rotary_emb.inv_freq"  # a buffer that old checkpoints hold


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: bytes [start, ...) of a file."""

    file: Path
    dtype: torch.dtype
    shape: Shape
    start: int


class HfFolder:
    """A folder of safetensors, with or without an index. Opening it reads the headers and checks them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, Stored] = {}
        self._handles: dict[Path, int] = {}
        for file in self._files():
            for name, stored in read_header(file).items():
                if name in self.tensors:
                    raise CheckpointError(f"{self.folder}: tensor {name} is in both {self.tensors[name].file.name} "
                                          f"and {file.name}")
                self.tensors[name] = stored
        self._check_index()

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        files = sorted(self.folder.glob("*.safetensors"))
        if index.is_file():
            named = sorted(set(_weight_map(index).values()))
            if missing := [name for name in named if not (self.folder / name).is_file()]:
                raise CheckpointError(f"{self.folder}: files named by {INDEX} are missing: {listed(missing)}")
            files = [self.folder / name for name in named]
        if not files:
            raise CheckpointError(f"{self.folder}: no .safetensors files; convert the model to safetensors first")
        return files

    def _check_index(self) -> None:
        """The index must name exactly the tensors on disk, each in its file."""
        index = self.folder / INDEX
        if not index.is_file():
            return
        named, on_disk = _weight_map(index), {name: stored.file.name for name, stored in self.tensors.items()}
        problems = [(title, names) for title, names in (
            ("in the index but in no file", sorted(set(named) - set(on_disk))),
            ("in a file but not in the index", sorted(set(on_disk) - set(named))),
            ("in another file than the index says",
             sorted(n for n in set(named) & set(on_disk) if named[n] != on_disk[n])),
        ) if names]
        if problems:
            raise CheckpointError(f"{index}: " + "; ".join(f"{title}: {listed(names)}" for title, names in problems))

    def fit(self, table: WeightTable) -> None:
        """Renames fused experts to their names on disk; CheckpointError unless exactly the model's tensors are here.

        A tied head that was written all the same must equal the embedding; rotary buffers are ignored.
        """
        for name in [n for n in self.tensors if FUSED.fullmatch(n)]:
            self._split_fused(name, table)
        want = table.hf_shapes
        for name in [n for n in self.tensors if n.endswith(IGNORED)]:
            del self.tensors[name]
        if table.arch.tied and "lm_head.weight" in self.tensors:
            self._drop_tied_head()
        have = {name: stored.shape for name, stored in self.tensors.items()}
        wrong = [f"{n} {have[n]} instead of {want[n]}" for n in want if n in have and have[n] != want[n]]
        odd = [f"{n} is {self.tensors[n].dtype}" for n in want
               if n in have and not self.tensors[n].dtype.is_floating_point]
        problems = [f"{title}: {listed(names)}" for title, names in (
            ("missing", [n for n in want if n not in have]), ("unexpected", [n for n in have if n not in want]),
            ("wrong shape", wrong), ("not floating point", odd)) if names]
        if problems:
            raise CheckpointError(f"{self.folder}: tensors do not fit its config.json; " + "; ".join(problems))

    def _split_fused(self, name: str, table: WeightTable) -> None:
        match = FUSED.fullmatch(name)
        assert match is not None
        arch, stored = table.arch, self.tensors[name]
        gate_up = match["kind"] == "gate_up_proj"
        want = (arch.num_experts, 2 * arch.moe_ffn, arch.hidden) if gate_up else (
            arch.num_experts, arch.hidden, arch.moe_ffn)
        if stored.shape != want:
            raise CheckpointError(f"{stored.file}: fused experts {name} have shape {stored.shape} instead of {want}")
        del self.tensors[name]
        parts = ("gate_proj", "up_proj") if gate_up else ("down_proj",)
        rows = want[1] // len(parts)
        nbytes = rows * want[2] * stored.dtype.itemsize
        for expert in range(want[0]):
            for i, part in enumerate(parts):
                start = stored.start + (expert * len(parts) + i) * nbytes
                target = f"{match['prefix']}{expert}.{part}.weight"
                if target in self.tensors:
                    raise CheckpointError(f"{self.folder}: {target} is there by itself and in {name}")
                self.tensors[target] = Stored(stored.file, stored.dtype, (rows, want[2]), start)

    def _drop_tied_head(self) -> None:
        head, embedding = self.tensors["lm_head.weight"], self.tensors.get("model.embed_tokens.weight")
        if embedding is not None and head.shape == embedding.shape:
            step = max(1, 2**26 // max(1, prod(head.shape[1:]) * head.dtype.itemsize))
            for start in range(0, head.shape[0], step):
                stop = min(start + step, head.shape[0])
                if not torch.equal(self.read("lm_head.weight", start, stop),
                                   self.read("model.embed_tokens.weight", start, stop)):
                    raise CheckpointError(f"{head.file}: lm_head.weight differs from model.embed_tokens.weight "
                                          "although config.json ties them; set tie_word_embeddings to false "
                                          "if that is meant")
            del self.tensors["lm_head.weight"]

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) as a new tensor."""
        stored = self.tensors[name]
        if stored.file not in self._handles:
            self._handles[stored.file] = os.open(stored.file, os.O_RDONLY)
        row = prod(stored.shape[1:]) * stored.dtype.itemsize
        data = pread(self._handles[stored.file], (stop - start) * row, stored.start + start * row, stored.file)
        return data.view(stored.dtype).reshape(stop - start, *stored.shape[1:])

    def file_of(self, name: str) -> Path:
        return self.tensors[name].file

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error!r}); fetch it again") from error
    return found


def read_header(file: Path) -> dict[str, Stored]:
    """Tensor name -> where it lies. CheckpointError names a file whose header or size is wrong."""
    size = file.stat().st_size
    fd = os.open(file, os.O_RDONLY)
    try:
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if size < 8 or length > min(LARGEST_HEADER, size - 8):
            raise CheckpointError(f"{file}: not a safetensors file, or truncated ({size} bytes); copy it again")
        header: dict[str, Any] = json.loads(os.pread(fd, length, 8))
        header.pop("__metadata__", None)
        out = {}
        end = 0
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])
            if last - first != prod(shape) * dtype.itemsize:
                raise CheckpointError(f"{file}: tensor {name} has {last - first} bytes for shape {shape}")
            out[name] = Stored(file, dtype, shape, 8 + length + first)
            end = max(end, last)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: its safetensors header is damaged ({error!r}); copy the file again") from error
    finally:
        os.close(fd)
    if size != 8 + length + end:
        raise CheckpointError(f"{file}: has {size} bytes, its header says {8 + length + end}; it is truncated or "
                              "damaged, copy it again")
    return out


def make_header(tensors: dict[str, tuple[torch.dtype, Shape]]) -> tuple[bytes, dict[str, int], int]:
    """(header bytes, tensor name -> byte offset in the file, file size) of a shard that holds `tensors` in order."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = prod(shape) * dtype.itemsize
        table[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape),
                       "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    base = 8 + len(text)
    starts = {name: base + table[name]["data_offsets"][0] for name in tensors}
    return len(text).to_bytes(8, "little") + text, starts, base + offset


def file_hash(path: Path) -> str:
    """Of a small file (config, tokenizer)."""
    return xxh3(path.read_bytes())
