"""Executes a plan's gathers: shards of this rank's unit -> whole Hugging Face tensors on the unit's source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from luspo_megatron.ranks import Ranks
from luspo_megatron.weights.load import local_parameters
from luspo_megatron.weights.plan import SyncPlan, Unit
from luspo_megatron.weights.table import WeightTable


class ShardGatherer:
    """Walks a plan on one rank. Every rank must walk the same plan at the same time."""

    def __init__(self, gpt: Any, table: WeightTable, ranks: Ranks) -> None:
        self.rank, self._ranks = ranks.rank, ranks
        own = local_parameters(gpt, table, ranks.layout, ranks.rank)
        self._shards = {entry.megatron: parameter.data for entry, parameter in own if not entry.row.load_only}

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
            group = self._ranks.etp_group if unit.is_expert else self._ranks.tp_group
            dist.gather(own, every, dst=unit.source, group=group)
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


def fill_bucket(buffer: Tensor, tensors: dict[str, Tensor], slices: Any) -> None:
    """Copies the slices into `buffer` (uint8), each at its offset; gaps between them keep what was there."""
    for piece in slices:
        flat = tensors[piece.name].reshape(-1)[piece.start : piece.start + piece.numel]
        buffer[piece.offset : piece.offset + piece.nbytes].view(flat.dtype).copy_(flat)
