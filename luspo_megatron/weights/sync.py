"""Weight sync: the actor's shards -> every engine, as one push with one version.

The trainer ranks that own weights are the sources; the engines receive over one process group per source. Rank 0 tells
the controller, which walks the engines through pause, load, flush, version and resume while the sources send. Two
buffers alternate, so that gathering the next bucket overlaps sending this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from luspo_megatron.config import WeightSyncConfig
from luspo_megatron.ranks import Ranks
from luspo_megatron.weights.gather import ShardGatherer, fill_bucket
from luspo_megatron.weights.plan import plan_sync
from luspo_megatron.weights.table import WeightTable
from luspo_megatron.weights.transports.base import SendHandle
from luspo_megatron.weights.transports.process_group import ProcessGroupSender, host_store


class EngineSide(Protocol):
    """What rank 0 needs of the controller (rollout/client.py). Two calls return handles: this rank sends meanwhile."""

    def weights_status(self) -> Any: ...

    def connect_weights(self, store_host: str, store_port: int, generation: int, sources: tuple[int, ...], *,
                        world_size: int, timeout: float) -> Any: ...

    def update_weights_async(self, manifest: Mapping[str, Any]) -> Any: ...


class WeightSync:
    """Owns the whole transfer. Every rank makes one; only rank 0 passes the controller's client."""

    def __init__(self, gpt: Any, table: WeightTable, ranks: Ranks, settings: WeightSyncConfig, *, dtype: str,
                 device: torch.device, engines: EngineSide | None, timeout: float = 600.0) -> None:
        self._ranks, self._settings, self._engines = ranks, settings, engines
        self._dtype, self._device, self._timeout = getattr(torch, dtype), device, timeout
        self.plan = plan_sync(table, ranks.layout, dtype, settings.bucket_bytes)
        self._gatherer = ShardGatherer(gpt, table, ranks)
        self._largest = max((b.nbytes for u in self.plan.units if u.source == ranks.rank for b in u.buckets), default=0)
        self._sender: ProcessGroupSender | None = None
        self._store: Any = None

    def _connect(self) -> None:
        """Joins the engines' groups when they are new: at the start, and after an engine was replaced."""
        place, handle = None, None
        if self._engines is not None:
            status = self._engines.weights_status()
            if status.needs_connect:
                self._store, host, port = host_store(timeout=self._timeout)
                place = (host, port, status.generation + 1, status.num_workers + 1)
                handle = self._engines.connect_weights(host, port, place[2], self.plan.sources, world_size=place[3],
                                                       timeout=self._timeout)
        place = self._ranks.broadcast(place)
        if place is None:
            return
        self.close()
        if self._ranks.rank in self.plan.sources:
            host, port, generation, world_size = place
            self._sender = ProcessGroupSender(host, port, generation, self._ranks.rank, world_size, self._timeout,
                                              verify=self._settings.verify, device=self._device)
        if handle is not None:
            handle.result()

    def push(self, version: int) -> None:
        """Sends all weights as `version`; returns when every engine has taken them and resumed."""
        self._connect()
        handle = None
        if self._engines is not None:
            handle = self._engines.update_weights_async(self.plan.manifest(version).to_dict())
        buffers = [torch.zeros(self._largest, dtype=torch.uint8, device=self._device) for _ in range(2)]
        in_flight: list[SendHandle | None] = [None, None]
        turn = 0
        for unit, tensors in self._gatherer.walk(self.plan, self._dtype):
            if tensors is None:
                continue
            for bucket in unit.buckets:
                turn ^= 1
                if (busy := in_flight[turn]) is not None:
                    busy.wait()
                buffer: Tensor = buffers[turn][: bucket.nbytes]
                fill_bucket(buffer, tensors, bucket.slices)
                assert self._sender is not None
                in_flight[turn] = self._sender.send(bucket, buffer)
        for last in in_flight:
            if last is not None:
                last.wait()
        if handle is not None:
            handle.result()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
