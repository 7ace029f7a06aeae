"""Where each Hugging Face tensor lies in a Megatron checkpoint. Pure: no files, no processes.

A torch_dist checkpoint has one tensor per kind of parameter: layers (and experts) are its leading axes. A `Piece` is a
box of such a tensor together with the rows of the Hugging Face tensors it is made of. Pieces of one checkpoint tile
every tensor of both sides exactly once, whatever the layout; large tensors are cut by rows, which bounds memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from luspo_megatron.weights.layouts import GateUp, Replicated, Shape, Sharded, Vocab
from luspo_megatron.weights.table import Entry, Row, WeightTable

PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Region:
    """The box [offset, offset + shape) of the checkpoint tensor `key`."""

    key: str
    offset: Shape
    shape: Shape


@dataclass(frozen=True)
class Piece:
    """One region and its Hugging Face side: rows [start, stop) of `names[0]`, or several whole tensors that are fused.

    `padding` rows of zeros follow in the region (the vocabulary's). `whole`: the row's layout says how the tensors
    make the region; otherwise the region is the rows as they are.
    """

    row: Row
    names: tuple[str, ...]
    start: int
    stop: int
    padding: int
    region: Region
    whole: bool

    def to_megatron(self, tensors: list[Tensor]) -> Tensor:
        """Hugging Face blocks -> a contiguous tensor of region.shape."""
        value = self.row.layout.split(tensors, 1, 0) if self.whole else tensors[0]
        if self.padding:
            value = torch.cat([value, value.new_zeros((self.padding, *value.shape[1:]))])
        return value.contiguous().reshape(self.region.shape)

    def to_hf(self, value: Tensor) -> list[Tensor]:
        """The inverse."""
        value = value.reshape(value.shape[len(self.region.shape) - self.rank :])
        if self.whole:
            return [t.contiguous() for t in self.row.layout.merge([value])]
        return [value[: self.stop - self.start].contiguous()]

    @property
    def rank(self) -> int:
        return len(self.row.shapes[0])


def checkpoint_key(row: Row, is_moe: bool) -> str:
    """The key that megatron-core's Transformer Engine spec writes, without layer and expert numbers.

    A norm goes by its fused name (the row's alias) wherever the TE spec fuses it into the next linear layer: always
    for attention, before the MLP only in dense layers.
    """
    name = row.megatron
    if row.aliases and not (is_moe and ".pre_mlp_layernorm." in name):
        name = row.aliases[0]
    name = name.replace(".layers.{layer}.", ".layers.")
    return re.sub(r"\.experts\.(linear_fc\d\.weight)\{expert\}$", r".experts.experts.\1", name)


def leading_axes(row: Row, table: WeightTable) -> Shape:
    """Layers and experts: the axes that the checkpoint tensor has in front of the parameter's own."""
    return ((table.arch.num_layers,) if row.per_layer else ()) + ((table.arch.num_experts,) if row.per_expert else ())


class PieceMap:
    """All pieces of a model whose vocabulary is padded to `vocab_rows`."""

    def __init__(self, table: WeightTable, vocab_rows: int) -> None:
        self.table, self.vocab_rows = table, vocab_rows
        self.entries = list(table.entries())

    def key(self, row: Row) -> str:
        return checkpoint_key(row, self.table.arch.is_moe)

    def global_shapes(self) -> dict[str, Shape]:
        """key -> shape of the whole checkpoint tensor."""
        return {self.key(row): leading_axes(row, self.table) + self._shape(row)
                for row in self.table.rows if not row.load_only}

    def _shape(self, row: Row) -> Shape:
        if isinstance(row.layout, Vocab):
            return (self.vocab_rows, *row.shapes[0][1:])
        return row.layout.shard_shape(row.shapes, 1)

    def pieces(self, entry: Entry, itemsize: int) -> Iterator[Piece]:
        """In order; the pieces of one tensor are consecutive and its rows ascend."""
        row, layout = entry.row, entry.row.layout
        at = tuple(i for i in (entry.layer, entry.expert) if i >= 0)
        key, shape = self.key(row), self._shape(row)

        def region(first: int, rows: int) -> Region:
            return Region(key, (*at, first, *(0 for _ in shape[1:])), (*(1 for _ in at), rows, *shape[1:]))

        if not isinstance(layout, Replicated | Sharded | Vocab | GateUp):
            yield Piece(row, entry.hf_names, 0, row.shapes[0][0], 0, region(0, shape[0]), whole=True)
            return
        first = 0
        for name, hf_shape in entry.hf_tensors:
            step = max(1, PIECE_BYTES // (itemsize * max(1, prod(hf_shape[1:]))))
            for start in range(0, hf_shape[0], step):
                stop = min(start + step, hf_shape[0])
                is_last = stop == hf_shape[0]
                rows = shape[0] - first if is_last and isinstance(layout, Vocab) else stop - start
                yield Piece(row, (name,), start, stop, rows - (stop - start), region(first, rows), whole=False)
                first += rows

    def nbytes(self, entry: Entry, itemsize: int) -> int:
        """Bytes of the entry's Hugging Face tensors."""
        return sum(prod(shape) for shape in entry.row.shapes) * itemsize
