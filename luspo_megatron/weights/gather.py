"""Executes a plan's gathers: shards of this rank's unit -> Hugging Face tensors on the unit's source.

`ShardGatherer.fill` serves the weight sync: it brings one bucket together, and holds one more bucket at most while it
does. `ShardGatherer.walk` serves the export: whole tensors of one unit at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from luspo_megatron.ranks import Ranks
from luspo_megatron.weights.layouts import Block
from luspo_megatron.weights.load import local_parameters
from luspo_megatron.weights.manifest import Bucket, TensorSlice
from luspo_megatron.weights.plan import Move, SyncPlan, Unit, moves_of
from luspo_megatron.weights.table import WeightTable


class ShardGatherer:
    """Walks a plan on one rank. Every rank must walk the same plan at the same time."""

    def __init__(self, gpt: Any, table: WeightTable, ranks: Ranks) -> None:
        self.rank, self._ranks = ranks.rank, ranks
        own = local_parameters(gpt, table, ranks.layout, ranks.rank)
        self._shards = {entry.megatron: parameter.data for entry, parameter in own if not entry.row.load_only}

    def _group(self, unit: Unit) -> Any:
        return self._ranks.etp_group if unit.is_expert else self._ranks.tp_group

    # ------------------------------------------------------------------ one bucket
    @torch.no_grad()
    def fill(self, unit: Unit, bucket: Bucket, buffer: Tensor | None, staging: Tensor) -> None:
        """Brings ``bucket`` together in ``buffer`` (uint8 [bucket.nbytes]; None off the source).

        Call it on every member of the unit. ``staging`` (uint8, as long as the bucket) holds what one other member
        contributes while it travels. Gaps between slices keep what was there.
        """
        me = unit.members.index(self.rank)
        by_member: dict[int, list[Move]] = {}
        for move in moves_of(unit, bucket):
            by_member.setdefault(move.member, []).append(move)
        dtype: torch.dtype = getattr(torch, bucket.slices[0].dtype)
        if buffer is None:
            if own := by_member.get(me):
                flat = staging.view(dtype)[: sum(move.block.numel for move in own)]
                for move, part in _parts(own, flat):
                    part.copy_(_strided(self._shards[move.entry.megatron].reshape(-1), move.block, source=True))
                dist.send(flat, dst=unit.source, group=self._group(unit))
            return
        for move in by_member.get(me, ()):
            _target(buffer, move, dtype).copy_(
                _strided(self._shards[move.entry.megatron].reshape(-1), move.block, source=True))
        for member, moves in sorted(by_member.items()):
            if member == me:
                continue
            flat = staging.view(dtype)[: sum(move.block.numel for move in moves)]
            dist.recv(flat, src=unit.members[member], group=self._group(unit))
            for move, part in _parts(moves, flat):
                _target(buffer, move, dtype).copy_(part)

    # ------------------------------------------------------------------ whole tensors
    def walk(self, plan: SyncPlan, dtype: torch.dtype) -> Iterator[tuple[Unit, dict[str, Tensor] | None]]:
        """Each unit this rank has part in; its tensors by Hugging Face name on the source, None on other members."""
        for unit in plan.units:
            if self.rank in unit.members:
                yield unit, self._gather(unit, dtype)

    @torch.no_grad()
    def _gather(self, unit: Unit, dtype: torch.dtype) -> dict[str, Tensor] | None:
        parts: dict[str, list[Tensor]] = {e.megatron: [self._shards[e.megatron].to(dtype)] for e in unit.entries}
        if len(unit.members) > 1 and unit.gathered:
            own = torch.cat([parts[e.megatron][0].reshape(-1) for e in unit.gathered])
            is_source = self.rank == unit.source
            every = [torch.empty_like(own) for _ in unit.members] if is_source else None
            dist.gather(own, every, dst=unit.source, group=self._group(unit))
            if every is None:
                return None
            sizes = [parts[e.megatron][0].numel() for e in unit.gathered]
            for entry, *shards in zip(unit.gathered, *(flat.split(sizes) for flat in every), strict=True):
                shape = parts[entry.megatron][0].shape
                parts[entry.megatron] = [shard.view(shape) for shard in shards]
        elif self.rank != unit.source:
            return None
        tensors: dict[str, Tensor] = {}
        for entry in unit.entries:
            merged = entry.row.layout.merge(parts[entry.megatron])
            tensors.update(zip(entry.hf_names, merged, strict=True))
        return tensors


def fill_bucket(buffer: Tensor, tensors: Mapping[str, Tensor], slices: Iterable[TensorSlice]) -> None:
    """Copies slices of whole tensors into `buffer` (uint8), each at its offset; gaps keep what was there."""
    for piece in slices:
        flat = tensors[piece.name].reshape(-1)[piece.start : piece.start + piece.numel]
        buffer[piece.offset : piece.offset + piece.nbytes].view(flat.dtype).copy_(flat)


def _strided(flat: Tensor, block: Block, *, source: bool) -> Tensor:
    """View [count, run] of the block's elements, on the shard's side or on the tensor's."""
    first, stride = (block.src, block.src_stride) if source else (block.dst, block.dst_stride)
    return flat.as_strided((block.count, block.run), (stride or block.run, 1), flat.storage_offset() + first)


def _target(buffer: Tensor, move: Move, dtype: torch.dtype) -> Tensor:
    raw = buffer[move.piece.offset : move.piece.offset + move.piece.nbytes]
    return _strided(raw.view(dtype), move.block, source=False)


def _parts(moves: Iterable[Move], flat: Tensor) -> Iterator[tuple[Move, Tensor]]:
    """Each move with its stretch [count, run] of the flattened message of one member."""
    start = 0
    for move in moves:
        yield move, flat[start : start + move.block.numel].view(move.block.count, move.block.run)
        start += move.block.numel
