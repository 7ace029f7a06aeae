"""The plan of a weight push: who gathers which shards, who sends which bucket. Pure and deterministic, no processes.

A unit is a run of parameters whose shards lie on the same ranks. Its source gathers the shards (over TP for dense
parameters, ETP for experts) as Hugging Face tensors and sends these in buckets of bounded size; a tensor larger than a
bucket is cut, at whole rows where a row fits. Each tensor has one source: data-parallel replica 0 of the pipeline stage
and expert rank that own it, so experts travel from the ranks that hold them and no byte is produced twice. A bucket is
broadcast to every engine worker: engines' own loaders take their slices (weights/plan_report.py counts what a worker
receives and keeps). Units of different sources alternate, so that one source gathers while another sends. Every rank
and every engine walks the buckets in the same order, which is why the push cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from math import prod

from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.weights.layouts import Block, Replicated
from luspo_megatron.weights.manifest import ITEM_SIZES, Bucket, Manifest, TensorSlice
from luspo_megatron.weights.table import Entry, WeightTable

ALIGNMENT = 8  # every slice starts at a multiple, so that any dtype can be viewed in place


@dataclass(frozen=True)
class Receivers:
    """The receiving side: ``engines`` servers with tp x pp x dp worker processes each. ``ep``: over how many workers an
    engine spreads its experts whole; 1: they are cut over tp like everything else."""

    engines: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def workers_per_engine(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def workers(self) -> int:
        return self.engines * self.workers_per_engine

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "ep": self.ep}
        parts = [f"{name}{value}" for name, value in sizes.items() if value > 1]
        return f"{self.engines} x {'x'.join(parts) or 'tp1'}"


ONE_WORKER = Receivers()


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
class Move:
    """Elements of one bucket that come from one shard: ``block`` counts in elements from the slice's own start."""

    member: int  # index into the unit's members
    entry: Entry
    piece: TensorSlice
    block: Block


@dataclass(frozen=True)
class SyncPlan:
    units: tuple[Unit, ...]
    receivers: Receivers = ONE_WORKER

    @property
    def sources(self) -> tuple[int, ...]:
        return tuple(sorted({unit.source for unit in self.units}))

    @property
    def nbytes(self) -> int:
        """Bytes of one push, padding between slices included."""
        return sum(bucket.nbytes for unit in self.units for bucket in unit.buckets)

    def manifest(self, version: int) -> Manifest:
        return Manifest(version, tuple(bucket for unit in self.units for bucket in unit.buckets))


def stages_of(num_layers: int, pp: int, vpp: int = 1, last: int = 0) -> tuple[int, ...]:
    """Pipeline stage of every layer. ``vpp``: chunks per stage, dealt out in turn; ``last``: layers of the last stage
    where it has fewer (or more) than the others, which share the rest evenly."""
    if last:
        if vpp != 1 or pp < 2 or (num_layers - last) % (pp - 1):
            raise ValueError(f"{num_layers} layers with {last} on the last of {pp} stages leave the others uneven")
        each = (num_layers - last) // (pp - 1)
        return tuple(min(layer // each, pp - 1) for layer in range(num_layers))
    if num_layers % (pp * vpp):
        raise ValueError(f"{num_layers} layers do not divide over {pp} pipeline stages of {vpp} chunks; name the last "
                         "stage's number")
    return tuple(layer // (num_layers // (pp * vpp)) % pp for layer in range(num_layers))


def stage_of(entry: Entry, stages: Sequence[int], pp: int) -> int:
    """Pipeline stage that owns a parameter. ``stages``: of every layer."""
    if entry.row.per_layer:
        return stages[entry.layer]
    return 0 if entry.row.megatron.startswith("embedding.") else pp - 1


def members_of(entry: Entry, table: WeightTable, layout: ParallelLayout, stages: Sequence[int]) -> tuple[int, ...]:
    """Ranks of data-parallel replica 0 that hold the shards, in shard order."""
    stage = stage_of(entry, stages, layout.pp)
    if entry.row.per_expert:
        ep = entry.expert // (table.arch.num_experts // layout.ep)
        return tuple(layout.expert_rank(etp=i, ep=ep, pp=stage) for i in range(layout.etp))
    return tuple(layout.dense_rank(tp=i, pp=stage) for i in range(layout.tp))


@lru_cache(maxsize=32)
def plan_sync(table: WeightTable, layout: ParallelLayout, dtype: str, bucket_bytes: int,
              receivers: Receivers = ONE_WORKER, stages: tuple[int, ...] | None = None) -> SyncPlan:
    """The plan for `layout`, made once for the same arguments.

    ``dtype``: the element type that travels; ``bucket_bytes`` bounds every bucket; ``stages``: the pipeline stage of
    every layer (`stages_of`), evenly divided when left out.
    """
    if bucket_bytes < ALIGNMENT:
        raise ValueError(f"bucket_bytes={bucket_bytes} cannot hold one element")
    stages = stages or stages_of(table.arch.num_layers, layout.pp)
    by_owner: dict[tuple[tuple[int, ...], bool], list[Entry]] = defaultdict(list)
    for entry in table.entries():
        by_owner[members_of(entry, table, layout, stages), entry.row.per_expert].append(entry)
    queues = [list(_units(members, entries, dtype, bucket_bytes)) for (members, _), entries in by_owner.items()]
    return SyncPlan(tuple(unit for turn in zip_longest(*queues) for unit in turn if unit is not None), receivers)


def moves_of(unit: Unit, bucket: Bucket) -> Iterator[Move]:
    """What fills a bucket: every element of every slice exactly once, from the shard that holds it."""
    tensors = {name: (entry, i) for entry in unit.entries for i, name in enumerate(entry.hf_names)}
    for piece in bucket.slices:
        entry, index = tensors[piece.name]
        for member, block in entry.row.layout.blocks(index, entry.row.shapes, len(unit.members)):
            for part in block.clip(piece.start, piece.start + piece.numel):
                yield Move(member, entry, piece, Block(part.dst - piece.start, part.src, part.run, part.count,
                                                       part.dst_stride, part.src_stride))


def _nbytes(entry: Entry, dtype: str) -> int:
    return sum(_aligned(prod(shape) * ITEM_SIZES[dtype]) for shape in entry.row.shapes)


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
        start, total, row = 0, prod(shape), prod(shape[1:])
        while start < total:
            room = (bucket_bytes - offset) // item
            if room <= 0 or (start == 0 and room < total and offset > 0):
                flush()  # a tensor that is cut starts a bucket of its own
                continue
            if row <= room < total - start:
                room -= room % row  # whole rows, so that row-parallel shards are gathered in long runs
            numel = min(total - start, room)
            slices.append(TensorSlice(name, dtype, shape, start, numel, offset))
            offset = _aligned(offset + numel * item)
            start += numel
    flush()
    return tuple(buckets)
