"""How one Megatron parameter is cut over tensor-parallel ranks and made of Hugging Face tensors.

Each layout is a pair of inverse pure functions: `split` (Hugging Face tensors -> the shard of one rank) and `merge`
(all shards in rank order -> Hugging Face tensors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from luspo_megatron.weights.architecture import padded_vocab

Shape = tuple[int, ...]


class Layout(Protocol):
    def split(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor: ...

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]: ...

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape: ...


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


@dataclass(frozen=True)
class Sharded:
    """Cut along `dim`: 0 for column-parallel weights, 1 for row-parallel ones."""

    dim: int

    def split(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        part = _divide(tensors[0].shape[self.dim], size)
        return tensors[0].narrow(self.dim, rank * part, part)

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards), self.dim)]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        shape = list(shapes[0])
        shape[self.dim] = _divide(shape[self.dim], size)
        return tuple(shape)


@dataclass(frozen=True)
class Vocab:
    """Rows of the vocabulary, padded with zeros so that every rank has the same number."""

    vocab_size: int

    def split(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        part = padded_vocab(self.vocab_size, size) // size
        start, stop = rank * part, min((rank + 1) * part, self.vocab_size)
        own = tensors[0][min(start, self.vocab_size) : stop]
        return torch.cat([own, own.new_zeros((part - own.shape[0], *own.shape[1:]))])

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards))[: self.vocab_size]]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        return (padded_vocab(self.vocab_size, size) // size, *shapes[0][1:])


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
        return Sharded(0).split([torch.cat(parts, 1).flatten(0, 1)], size, rank)

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        fused = torch.cat(list(shards))
        fused = fused.reshape(self.num_kv_heads, -1, *fused.shape[1:])
        queries = fused.shape[1] - 2 * self.head_dim
        return [part.flatten(0, 1) for part in fused.split([queries, self.head_dim, self.head_dim], 1)]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        return (_divide(sum(s[0] for s in shapes), size), *shapes[0][1:])


@dataclass(frozen=True)
class GateUp:
    """gate over up (SwiGLU's first linear); each rank holds its part of gate over its part of up."""

    def split(self, tensors: Sequence[Tensor], size: int, rank: int) -> Tensor:
        return torch.cat([Sharded(0).split([t], size, rank) for t in tensors])

    def merge(self, shards: Sequence[Tensor]) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]

    def shard_shape(self, shapes: Sequence[Shape], size: int) -> Shape:
        return (2 * _divide(shapes[0][0], size), *shapes[0][1:])
