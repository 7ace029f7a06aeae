"""What one weight push consists of, as plain data: which bytes of which tensor lie where, in which bucket, from whom.

A push is a list of buckets in send order. Each bucket is a flat byte buffer that one trainer rank (its ``source``)
produces and broadcasts to every engine worker. It holds slices of Hugging Face tensors under their on-disk names; a
tensor larger than a bucket is cut into several slices. The planner (weights/plan.py) builds a manifest without any
process; engines check it before the first byte arrives. JSON-able; imports no torch, so the controller can carry it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

# Bytes of one element, by torch dtype name. Only what a Hugging Face checkpoint of a policy holds.
ITEM_SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int64": 8, "int32": 4,
              "uint8": 1}


@dataclass(frozen=True)
class TensorSlice:
    """Elements [start, start + numel) of the flattened tensor ``name``, at byte ``offset`` of its bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    numel: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_SIZES[self.dtype]

    @property
    def whole(self) -> bool:
        """True when the slice is the tensor."""
        return self.start == 0 and self.numel == prod(self.shape)

    def __str__(self) -> str:
        return self.name if self.whole else f"{self.name}[{self.start}:{self.start + self.numel}]"


@dataclass(frozen=True)
class Bucket:
    """One broadcast: ``nbytes`` bytes from ``source`` (a trainer rank)."""

    source: int
    nbytes: int
    slices: tuple[TensorSlice, ...]


@dataclass(frozen=True)
class Manifest:
    """One push, in send order. ``version`` is the weight version the engines have afterwards."""

    version: int
    buckets: tuple[Bucket, ...]

    def violations(self) -> list[str]:
        """Every inconsistency of the data itself: unknown dtypes, slices outside their bucket or tensor, tensors
        that are not covered exactly once. Empty when the manifest is sound."""
        out: list[str] = []
        spans: dict[str, list[tuple[int, int]]] = {}
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for number, bucket in enumerate(self.buckets):
            for piece in bucket.slices:
                where = f"bucket {number} (source {bucket.source}), {piece}"
                if piece.dtype not in ITEM_SIZES:
                    out.append(f"{where}: dtype {piece.dtype} is unknown")
                    continue
                if piece.offset < 0 or piece.offset + piece.nbytes > bucket.nbytes:
                    out.append(f"{where}: lies outside the bucket's {bucket.nbytes} bytes")
                if tensors.setdefault(piece.name, (piece.dtype, piece.shape)) != (piece.dtype, piece.shape):
                    out.append(f"{where}: dtype or shape differs from an earlier slice of the tensor")
                spans.setdefault(piece.name, []).append((piece.start, piece.start + piece.numel))
        for name, pieces in spans.items():
            total, end = prod(tensors[name][1]), 0
            for first, last in sorted(pieces):
                if first != end:
                    out.append(f"{name}: elements {min(first, end)} to {max(first, end)} are "
                               f"{'missing' if first > end else 'sent twice'}")
                    break
                end = last
            else:
                if end != total:
                    out.append(f"{name}: {end} of {total} elements are sent")
        return out

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "buckets": [
                {
                    "source": bucket.source,
                    "nbytes": bucket.nbytes,
                    "slices": [[s.name, s.dtype, list(s.shape), s.start, s.numel, s.offset] for s in bucket.slices],
                }
                for bucket in self.buckets
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        buckets = tuple(
            Bucket(
                source=int(bucket["source"]),
                nbytes=int(bucket["nbytes"]),
                slices=tuple(
                    TensorSlice(name, dtype, tuple(shape), start, numel, offset)
                    for name, dtype, shape, start, numel, offset in bucket["slices"]
                ),
            )
            for bucket in data["buckets"]
        )
        return cls(version=int(data["version"]), buckets=buckets)


@dataclass(frozen=True)
class EngineConnection:
    """What an engine worker needs to join the weight groups of a run.

    ``generation`` counts the connections of a run (a new one after an engine was replaced); ``sources`` are the
    trainer ranks that send; ``world_size`` counts the source and all workers; ``rank`` is this worker's (1-based);
    ``timeout`` is in seconds; ``transport`` says how the bytes come (weights/transports), ``folder`` where the files of
    the disk transport lie.
    """

    host: str
    port: int
    generation: int
    sources: tuple[int, ...]
    world_size: int
    rank: int
    timeout: float = 600.0
    transport: str = "process_group"
    folder: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "sources": list(self.sources)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineConnection:
        return cls(**{**data, "sources": tuple(data["sources"])})
