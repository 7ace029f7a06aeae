"""Elements of parameters, gradient buffers and optimizer shards of every pipeline stage, exact.

The shapes are the weight table's, so they are those that loading and weight sync use. The padding is that of
megatron-core 0.19's distributed optimizer (optimizer/param_layout.py, one bucket per buffer, because gradients are not
reduced in overlap): each parameter starts at a multiple of 64 elements, each buffer ends at a multiple of
lcm(data-parallel size, 128). Dense and expert parameters have buffers of their own. All tensor- and expert-parallel
ranks of a stage hold the same numbers.

    padded(buffer) = ceil(... ceil(ceil(n1, 64) + n2, 64) ... + nk, lcm(dp, 128))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.weights.table import Row, WeightTable

PARAMETER_ALIGNMENT = 64  # elements
BUFFER_ALIGNMENT = 128


@dataclass(frozen=True)
class BufferSizes:
    """Elements of one buffer on one rank. ``numel``: parameters; ``padded``: with the padding; ``shard``: optimizer
    elements of the rank with most, ``shards`` of every data-parallel rank."""

    numel: int
    padded: int
    shards: tuple[int, ...]

    @property
    def shard(self) -> int:
        return max(self.shards, default=0)


@dataclass(frozen=True)
class StageSizes:
    """One pipeline stage. ``frozen``: elements of parameters that do not train."""

    stage: int
    layers: int
    dense: BufferSizes
    expert: BufferSizes
    frozen: int

    @property
    def numel(self) -> int:
        return self.dense.numel + self.expert.numel + self.frozen


def whole_model(table: WeightTable) -> tuple[int, int]:
    """(parameters, Hugging Face tensors) of the model; a tied head is counted once."""
    layers, experts = table.arch.num_layers, table.arch.num_experts
    rows = [(row, (layers if row.per_layer else 1) * (experts if row.per_expert else 1))
            for row in table.rows if not row.load_only]
    return sum(n * sum(map(prod, row.shapes)) for row, n in rows), sum(n * len(row.hf) for row, n in rows)


def stage_sizes(table: WeightTable, layout: ParallelLayout, *, distributed_optimizer: bool,
                frozen_router: bool = False) -> list[StageSizes]:
    """Every stage of ``layout``; layers must divide by pp."""
    arch = table.arch
    layers = arch.num_layers // layout.pp
    stages = []
    for stage in range(layout.pp):
        dense: list[int] = []
        expert: list[int] = []
        frozen = 0
        for row in table.rows:
            count = _count(row, table, layout, stage, layers)
            if not count:
                continue
            numel = prod(row.layout.shard_shape(row.shapes, layout.etp if row.per_expert else layout.tp))
            if frozen_router and ".router." in row.megatron:
                frozen += count * numel
            else:
                (expert if row.per_expert else dense).extend([numel] * count)
        stages.append(StageSizes(stage, layers, _buffer(dense, layout.dp * layout.cp, distributed_optimizer),
                                 _buffer(expert, layout.edp, distributed_optimizer), frozen))
    return stages


def _count(row: Row, table: WeightTable, layout: ParallelLayout, stage: int, layers: int) -> int:
    """How often a rank of the stage holds the row's parameter."""
    if row.per_layer:
        return layers * (table.arch.num_experts // layout.ep if row.per_expert else 1)
    if row.load_only and layout.pp == 1:
        return 0  # the tied head is the embedding itself
    return int(stage == (0 if row.megatron.startswith("embedding.") else layout.pp - 1))


def _buffer(sizes: Sequence[int], ranks: int, distributed: bool) -> BufferSizes:
    """Laid out one after the other; each rank of the distributed optimizer owns an equal part of the buffer."""
    total = sum(sizes)
    if not distributed:
        return BufferSizes(total, total, (total,) * ranks)
    spans = []
    end = 0
    for size in sizes:
        start = _up(end, PARAMETER_ALIGNMENT)
        end = start + size
        spans.append((start, end))
    padded = _up(end, math.lcm(ranks, BUFFER_ALIGNMENT))
    part = padded // ranks
    shards = [0] * ranks
    for start, stop in spans:
        for rank in range(start // part, -(-stop // part)):
            shards[rank] += min(stop, (rank + 1) * part) - max(start, rank * part)
    return BufferSizes(total, padded, tuple(shards))


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
