"""What a plan costs as numbers and text: bytes per link, per sender, per engine worker; seconds at given link rates.

Pure, and no weights are allocated: the plan of a 235-billion-parameter model is counted in about a second.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.weights.layouts import Replicated
from luspo_megatron.weights.manifest import ITEM_SIZES
from luspo_megatron.weights.plan import ONE_WORKER, Receivers, SyncPlan, moves_of, plan_sync, stages_of
from luspo_megatron.weights.table import WeightTable


@dataclass(frozen=True)
class PlanCounts:
    """Bytes of one push.

    gathered: {(trainer rank that holds a shard, source): bytes between them}; sent: {source: bytes that leave it, once
    for all workers where the transport broadcasts}; received: by each engine worker; kept: most that one engine worker
    stores of it.
    """

    gathered: dict[tuple[int, int], int]
    sent: dict[int, int]
    received: int
    kept: int
    buckets: int
    largest_bucket: int
    tensors: int
    cut: int

    def seconds(self, link_rate: float, gather_rate: float) -> float:
        """A lower bound at ``link_rate`` (source to engine) and ``gather_rate`` (between trainer ranks), bytes/s each
        way. A worker takes all bytes through its own link; sources gather while others send, and a source's own
        gathering overlaps its sending, so the slower of the two counts."""
        into: Counter[int] = Counter()
        for (_, source), nbytes in self.gathered.items():
            into[source] += nbytes
        gathering = max(into.values(), default=0) / gather_rate
        sending = max(max(self.sent.values()), self.received) / link_rate
        return max(gathering, sending)


def count(plan: SyncPlan, table: WeightTable) -> PlanCounts:
    gathered: Counter[tuple[int, int]] = Counter()
    sent: Counter[int] = Counter()
    sizes: list[int] = []
    pieces: Counter[str] = Counter()
    for unit in plan.units:
        for bucket in unit.buckets:
            sent[unit.source] += bucket.nbytes
            sizes.append(bucket.nbytes)
            pieces.update(piece.name for piece in bucket.slices)
            if len(unit.members) > 1:
                for move in moves_of(unit, bucket):
                    if move.member:
                        gathered[unit.members[move.member], unit.source] += (
                            move.block.numel * ITEM_SIZES[move.piece.dtype])
    dtype = plan.units[0].buckets[0].slices[0].dtype
    return PlanCounts(dict(gathered), dict(sent), sum(sizes), _kept(table, plan.receivers, dtype), len(sizes),
                      max(sizes), len(pieces), sum(n > 1 for n in pieces.values()))


def _kept(table: WeightTable, receivers: Receivers, dtype: str) -> int:
    """Most bytes that one worker stores: its pipeline stage's tensors, whole (replicated), or its part of them."""
    stages = stages_of(table.arch.num_layers, receivers.pp, last=_last(table.arch.num_layers, receivers.pp))
    by_stage: Counter[int] = Counter()
    for entry in table.entries():
        row = entry.row
        over = 1 if isinstance(row.layout, Replicated) else receivers.tp
        if row.per_expert:
            over = max(receivers.ep, receivers.tp)
        size = sum(-(-_product(shape) // over) for shape in row.shapes) * ITEM_SIZES[dtype]
        by_stage[stages[entry.layer] if row.per_layer else
                 0 if row.megatron.startswith("embedding.") else receivers.pp - 1] += size
    return max(by_stage.values())


def _last(num_layers: int, pp: int) -> int:
    """Layers of the last stage where an engine divides them unevenly (the others take one more)."""
    return num_layers - (pp - 1) * -(-num_layers // pp) if num_layers % pp else 0


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def describe(plan: SyncPlan, table: WeightTable, layout: ParallelLayout, *, link_rate: float = 0.0,
             gather_rate: float = 0.0) -> str:
    """The plan for a person, as `luspo plan` prints it. With rates (bytes/s) also the seconds of a push."""
    counts = count(plan, table)
    receivers = plan.receivers
    lines = [
        f"weight sync: {layout} ({layout.world_size} ranks) -> {receivers} ({receivers.workers} workers)",
        f"  {counts.tensors} tensors, {_size(counts.received)} in {counts.buckets} buckets of at most "
        f"{_size(counts.largest_bucket)}; {counts.cut} tensors are cut",
        f"  sources: {len(counts.sent)} ranks, each sends {_range(counts.sent.values())}, once for all workers",
    ]
    if counts.gathered:
        lines.append(f"  gathered first: {_size(sum(counts.gathered.values()))} over {len(counts.gathered)} links, "
                     f"{_range(counts.gathered.values())} each")
    else:
        lines.append("  gathered first: nothing, every source holds whole tensors")
    lines.append(f"  every engine worker receives {_size(counts.received)} and keeps at most {_size(counts.kept)}")
    if link_rate and gather_rate:
        lines.append(f"  about {counts.seconds(link_rate, gather_rate):.2f} s at {_size(int(link_rate))}/s per link to "
                     f"the engines and {_size(int(gather_rate))}/s between ranks")
    return "\n".join(lines)


def describe_sync(table: WeightTable, layout: ParallelLayout, dtype: str, bucket_bytes: int,
                  receivers: Receivers = ONE_WORKER, stages: tuple[int, ...] | None = None, *, link_rate: float = 0.0,
                  gather_rate: float = 0.0) -> str:
    """`describe` of the plan for these arguments (plan_sync's)."""
    plan = plan_sync(table, layout, dtype, bucket_bytes, receivers, stages)
    return describe(plan, table, layout, link_rate=link_rate, gather_rate=gather_rate)


def _range(values: object) -> str:
    numbers = sorted(values)  # type: ignore[call-overload]
    low, high = _size(numbers[0]), _size(numbers[-1])
    return low if low == high else f"{low} to {high}"


def _size(nbytes: int) -> str:
    for unit, step in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= step:
            return f"{nbytes / step:.2f} {unit}"
    return f"{nbytes} B"
