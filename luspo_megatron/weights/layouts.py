"""How one Megatron parameter is cut over tensor-parallel ranks and made of Hugging Face tensors.

Each layout is a pair of inverse pure functions: `split` (Hugging Face tensors -> the shard of one rank) and `merge`
(all shards in rank order -> Hugging Face tensors). `blocks` says the same as numbers, without tensors: which elements
of which shard are which elements of one Hugging Face tensor. The weight sync moves those and never holds more than the
part of a tensor that it sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

from luspo_megatron.weights.architecture import padded_vocab

if TYPE_CHECKING:  # the planner reads shapes only, and does without torch
    from torch import Tensor

Shape = tuple[int, ...]


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch

    return torch.cat(list(tensors), dim)


@dataclass(frozen=True)
class Block:
    """`count` runs of `run` elements each: run k goes from element `src + k * src_stride` of the flattened shard to
    element `dst + k * dst_stride` of the flattened Hugging Face tensor."""

    dst: int
    src: int
    run: int
    count: int = 1
    dst_stride: int = 0
    src_stride: int = 0

    @property
    def numel(self) -> int:
        return self.run * self.count

    def clip(self, start: int, stop: int) -> Iterator[Block]:
        """The parts that lie in elements [start, stop) of the tensor: a broken first run, whole runs, a broken last."""
        stride = self.dst_stride or self.run
        first = min(max(0, -(-(start - self.dst) // stride)), self.count)  # first run that begins inside
        last = min(max(first, (stop - self.dst - self.run) // stride + 1), self.count)  # behind the last whole one
        for k in (first - 1, last):
            low = max(self.dst + k * stride, start)
            high = min(self.dst + k * stride + self.run, stop)
            if 0 <= k < self.count and low < high:
                yield Block(low, self.src + k * self.src_stride + low - self.dst - k * stride, high - low)
        if last > first:
            yield Block(self.dst + first * stride, self.src + first * self.src_stride, self.run, last - first,
                        self.dst_stride, self.src_stride)


class Layout(Protocol):
    def split(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor: ...

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]: ...

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape: ...

    def blocks(self, index: int, shapes: Sequence[Shape], size: int) -> list[tuple[int, Block]]:
        """(rank of the shard, block) for tensor `index` of the parameter's tensors; each element exactly once."""


def _divide(extent: int, size: int) -> int:
    if extent % size:
        raise ValueError(f"{extent} does not divide over {size} tensor-parallel ranks")
    return extent // size


@dataclass(frozen=True)
class Replicated:
    """The same tensor on every rank."""

    def split(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        return tensors[0]

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [shards[0]]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        return shapes[0]

    def blocks(self, index: int, shapes: Sequence[Shape], size: int) -> list[tuple[int, Block]]:
        return [(0, Block(0, 0, prod(shapes[0])))]


@dataclass(frozen=True)
class Sharded:
    """Cut along `dim`: 0 for column-parallel weights, 1 for row-parallel ones."""

    dim: int

    def split(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        part = _divide(tensors[0].shape[self.dim], size)
        return tensors[0].narrow(self.dim, rank * part, part)

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [_cat(shards, self.dim)]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        shape = list(shapes[0])
        shape[self.dim] = _divide(shape[self.dim], size)
        return tuple(shape)

    def blocks(self, index: int, shapes: Sequence[Shape], size: int) -> list[tuple[int, Block]]:
        rows = prod(shapes[0][: self.dim])
        stride = prod(shapes[0][self.dim :])
        run = _divide(shapes[0][self.dim], size) * prod(shapes[0][self.dim + 1 :])
        return [(i, Block(i * run, 0, run, rows, stride, run)) for i in range(size)]


@dataclass(frozen=True)
class Vocab:
    """Rows of the vocabulary, padded with zeros so that every rank has the same number."""

    vocab_size: int

    def split(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        part = padded_vocab(self.vocab_size, size) // size
        start, stop = rank * part, min((rank + 1) * part, self.vocab_size)
        own = tensors[0][min(start, self.vocab_size) : stop]
        return _cat([own, own.new_zeros((part - own.shape[0], *own.shape[1:]))])

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [_cat(shards)[: self.vocab_size]]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        return (padded_vocab(self.vocab_size, size) // size, *shapes[0][1:])

    def blocks(self, index: int, shapes: Sequence[Shape], size: int) -> list[tuple[int, Block]]:
        part, row = padded_vocab(self.vocab_size, size) // size, prod(shapes[0][1:])
        rows = [min((i + 1) * part, self.vocab_size) - i * part for i in range(size)]
        return [(i, Block(i * part * row, 0, n * row)) for i, n in enumerate(rows) if n > 0]


@dataclass(frozen=True)
class FusedQKV:
    """q, k, v interleaved by key/value group: [group: its queries, its key, its value], cut into even runs of rows.

    With fewer groups than ranks a cut falls inside a group; megatron's attention gathers what it needs.
    """

    num_kv_heads: int
    head_dim: int

    def split(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        parts = [t.reshape(self.num_kv_heads, -1, *t.shape[1:]) for t in tensors]
        if self.num_kv_heads % size == 0:  # only this rank's groups are copied
            groups = self.num_kv_heads // size
            parts = [part[rank * groups : (rank + 1) * groups] for part in parts]
            size, rank = 1, 0
        return Sharded(0).split([_cat(parts, 1).flatten(0, 1)], size, rank)

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        fused = _cat(shards)
        fused = fused.reshape(self.num_kv_heads, -1, *fused.shape[1:])
        queries = fused.shape[1] - 2 * self.head_dim
        return [part.flatten(0, 1) for part in fused.split([queries, self.head_dim, self.head_dim], 1)]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        return (_divide(sum(s[0] for s in shapes), size), *shapes[0][1:])

    def blocks(self, index: int, shapes: Sequence[Shape], size: int) -> list[tuple[int, Block]]:
        per_group = [prod(s) // self.num_kv_heads for s in shapes]
        run, before, stride = per_group[index], sum(per_group[:index]), sum(per_group)
        if self.num_kv_heads % size == 0:
            groups = self.num_kv_heads // size
            return [(i, Block(i * groups * run, before, run, groups, run, stride)) for i in range(size)]
        shard = prod(self.shard_shape(shapes, size))
        out = []
        for group in range(self.num_kv_heads):  # its run in the fused rows may lie on several ranks
            low, high = group * stride + before, group * stride + before + run
            for i in range(low // shard, -(-high // shard)):
                start, stop = max(low, i * shard), min(high, (i + 1) * shard)
                out.append((i, Block(group * run + start - low, start - i * shard, stop - start)))
        return out


@dataclass(frozen=True)
class GateUp:
    """gate over up (SwiGLU's first linear); each rank holds its part of gate over its part of up."""

    def split(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        return _cat([Sharded(0).split([t], size, rank) for t in tensors])

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [_cat([half[i] for half in halves]) for i in range(2)]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        return (2 * _divide(shapes[0][0], size), *shapes[0][1:])

    def blocks(self, index: int, shapes: Sequence[Shape], size: int) -> list[tuple[int, Block]]:
        run = _divide(shapes[index][0], size) * prod(shapes[index][1:])
        return [(i, Block(i * run, index * run, run)) for i in range(size)]
