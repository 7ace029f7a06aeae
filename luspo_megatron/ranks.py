"""Ranks: this process in the grid, with the groups that code outside the actor talks over.

A leaf that knows torch.distributed and the layout, so that weights and the front desk need not import the actor;
actor/groups.py makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from luspo_megatron.parallel import ParallelLayout


@dataclass(frozen=True)
class Ranks:
    """`control` is a gloo group over the world with a long time-out; `tp_group` and `etp_group` hold the ranks that
    share the shards of a dense parameter and of an expert.

    No rank may wait for a rollout inside an NCCL collective: its watchdog would abort the job.
    """

    layout: ParallelLayout
    rank: int
    control: Any
    tp_group: Any
    etp_group: Any

    @property
    def dp_rank(self) -> int:
        return self.layout.dense_coordinate(self.rank)["dp"]

    @property
    def stage(self) -> int:
        """Pipeline stage."""
        return self.layout.dense_coordinate(self.rank)["pp"]

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.layout.pp - 1

    def gather(self, value: Any) -> list[Any] | None:
        """Any picklable object of every rank, in rank order on rank 0, None elsewhere; over the control plane."""
        box: list[Any] | None = [None] * self.layout.world_size if self.rank == 0 else None
        dist.gather_object(value, box, dst=0, group=self.control)
        return box

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Any picklable object from `source` to all ranks, over the control plane."""
        box = [value]
        dist.broadcast_object_list(box, src=source, group=self.control)
        return box[0]
