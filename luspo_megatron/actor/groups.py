"""Process groups: the world, megatron's model-parallel groups, and the control plane."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from luspo_megatron.parallel import ParallelLayout
from luspo_megatron.platform import platform
from luspo_megatron.ranks import Ranks


def join(layout: ParallelLayout, *, seed: int, timeout_minutes: float = 120.0, store: dist.Store | None = None,
         rank: int | None = None) -> Ranks:
    """Joins the world (environment of torchrun, or an explicit store and rank) and makes every group of `layout`."""
    here = platform()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    timeout = timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        where: dict[str, Any] = {"store": store, "rank": rank, "world_size": layout.world_size} if store else {}
        dist.init_process_group(here.backend, timeout=timeout, **where)
    if dist.get_world_size() != layout.world_size:
        raise RuntimeError(f"{dist.get_world_size()} processes were started for a layout of {layout.world_size}")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp, expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp, order="tp-cp-ep-dp-pp",
        distributed_timeout_minutes=int(timeout_minutes))
    model_parallel_cuda_manual_seed(seed)
    control = dist.group.WORLD if here.backend == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(layout, dist.get_rank(), control, parallel_state.get_tensor_model_parallel_group(),
                 parallel_state.get_expert_tensor_parallel_group())


def leave() -> None:
    """Takes the model-parallel groups down; the world stays (a test pool builds the next layout in it)."""
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    groups = {id(group): group for group in parallel_state._global_process_group_list or [] if group is not None}
    known = dist.distributed_c10d._world.pg_map  # without groups that are gone already, or never were of this rank
    parallel_state.destroy_model_parallel()
    # megatron only forgets its groups; each would keep its gloo threads (dozens of groups per layout)
    for group in groups.values():
        if group in known and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    destroy_rerun_state_machine()


def local_world() -> tuple[int, int]:
    """(rank, world size) from the launcher's environment; (0, 1) without one."""
    env = os.environ
    return int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))


def memory_peak_mb() -> float:
    """Peak resident (CPU) or allocated (CUDA) memory of this process, MB."""
    if platform().name == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
