"""The plan of a weight push: who gathers which shards, who sends which bucket. Pure and deterministic, no processes.

A unit is a run of parameters whose shards lie on the same ranks. Its source gathers the shards (over TP for dense
parameters, ETP for experts), merges them into Hugging Face tensors and sends these in buckets of bounded size; a tensor
larger than a bucket is cut. Each tensor has one source: data-parallel replica 0 of the pipeline stage and expert rank
that own it, so experts travel from the ranks that hold them and no byte is produced twice. Units of different sources
alternate, so that one source gathers while another sends. Every rank and every engine walks the buckets in the same
order, which is why the push cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from math import prod

from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.weights.layouts import Replicated
from luspo_megatron.weights.manifest import ITEM_SIZES, Bucket, Manifest, TensorSlice
from luspo_megatron.weights.table import Entry, WeightTable

ALIGNMENT = 8  # every slice starts at a multiple, so that any dtype can be viewed in place


@dataclass(frozen=True)
class Unit:
    """Parameters gathered together: shard i lies on ``members[i]``, the source is ``members[0]``."""

    members: tuple[int, ...]
    entries: tuple[Entry, ...]
    buckets: tuple[Bucket, ...]

    @property
    def source(self) -> int:
        return self.members[0]

    @property
    def is_expert(self) -> bool:
        return self.entries[0].row.per_expert

    @property
    def gathered(self) -> tuple[Entry, ...]:
        """Entries whose shards differ; the source has its own copy of the others."""
        return tuple(e for e in self.entries if not isinstance(e.row.layout, Replicated))


@dataclass(frozen=True)
class SyncPlan:
    units: tuple[Unit, ...]

    @property
    def sources(self) -> tuple[int, ...]:
        return tuple(sorted({unit.source for unit in self.units}))

    def manifest(self, version: int) -> Manifest:
        return Manifest(version, tuple(bucket for unit in self.units for bucket in unit.buckets))


def stage_of(entry: Entry, num_layers: int, pp: int) -> int:
    """Pipeline stage that owns a parameter, for layers divided evenly."""
    if entry.row.per_layer:
        return entry.layer // (num_layers // pp)
    return 0 if entry.row.megatron.startswith("embedding.") else pp - 1


def members_of(entry: Entry, table: WeightTable, layout: ParallelLayout) -> tuple[int, ...]:
    """Ranks of data-parallel replica 0 that hold the shards, in shard order."""
    stage = stage_of(entry, table.arch.num_layers, layout.pp)
    if entry.row.per_expert:
        ep = entry.expert // (table.arch.num_experts // layout.ep)
        return tuple(layout.expert_rank(etp=i, ep=ep, pp=stage) for i in range(layout.etp))
    return tuple(layout.dense_rank(tp=i, pp=stage) for i in range(layout.tp))


def plan_sync(table: WeightTable, layout: ParallelLayout, dtype: str, bucket_bytes: int) -> SyncPlan:
    """The plan for `layout`; ``dtype`` is the element type that travels, ``bucket_bytes`` bounds every bucket."""
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes={bucket_bytes} cannot hold one element")
    by_owner: dict[tuple[tuple[int, ...], bool], list[Entry]] = defaultdict(list)
    for entry in table.entries():
        by_owner[members_of(entry, table, layout), entry.row.per_expert].append(entry)
    queues = [list(_units(members, entries, dtype, bucket_bytes)) for (members, _), entries in by_owner.items()]
    return SyncPlan(tuple(unit for turn in zip_longest(*queues) for unit in turn if unit is not None))


def _nbytes(entry: Entry, dtype: str) -> int:
    return sum(_aligned(prod(shape) * ITEM_SIZES[dtype]) for _, shape in entry.hf_tensors)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _units(members: tuple[int, ...], entries: list[Entry], dtype: str, bucket_bytes: int) -> Iterator[Unit]:
    """Consecutive entries up to one bucket; an entry larger than that is a unit of its own, with several buckets."""
    current: list[Entry] = []
    size = 0
    for entry in entries:
        if current and size + _nbytes(entry, dtype) > bucket_bytes:
            yield Unit(members, tuple(current), _cut(members[0], current, dtype, bucket_bytes))
            current, size = [], 0
        current.append(entry)
        size += _nbytes(entry, dtype)
    yield Unit(members, tuple(current), _cut(members[0], current, dtype, bucket_bytes))


def _cut(source: int, entries: list[Entry], dtype: str, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Slices of the entries' tensors, in order, into buckets; a tensor that does not fit whole is cut."""
    item = ITEM_SIZES[dtype]
    buckets: list[Bucket] = []
    slices: list[TensorSlice] = []
    offset = 0

    def flush() -> None:
        nonlocal offset
        if slices:
            last = slices[-1]
            buckets.append(Bucket(source, last.offset + last.nbytes, tuple(slices)))
            slices.clear()
            offset = 0

    for name, shape in (tensor for entry in entries for tensor in entry.hf_tensors):
        start, total = 0, prod(shape)
        while start < total:
            room = (bucket_bytes - offset) // item
            if room <= 0 or (start == 0 and room < total and offset > 0):
                flush()  # a tensor that is cut starts a bucket of its own
                continue
            numel = min(total - start, room)
            slices.append(TensorSlice(name, dtype, shape, start, numel, offset))
            offset = _aligned(offset + numel * item)
            start += numel
    flush()
    return tuple(buckets)
