"""SGLang's end of a weight push: a plugin (entry point group ``sglang.srt.plugins``) of three hooks.

The HTTP lifecycle is SGLang's own: /init_weights_update_group, /begin_weight_update, /update_weights_from_distributed
(once, with the whole manifest), /end_weight_update. Calls that are not ours go on to SGLang's own code. What travels
inside the calls, because their fields are fixed: the connection as JSON after ``luspo:`` in ``backend``, the manifest
as JSON in ``names[0]``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from luspo_megatron.rollout.inside_engine.push import PushReceiver

GROUP = "luspo"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_receivers: dict[int, PushReceiver] = {}  # by tensor-parallel rank; one per process in practice


def join_group(original: Callable[..., Any], updater: Any, master_address: str, master_port: int, rank_offset: int,
               world_size: int, group_name: str, backend: str = "nccl") -> Any:
    """(success, message), as SGLang's own."""
    if group_name != GROUP:
        return original(updater, master_address, master_port, rank_offset, world_size, group_name, backend)
    receiver = _receivers.setdefault(updater.tp_rank, PushReceiver(updater.device))
    try:
        receiver.connect(json.loads(backend.partition(":")[2]), updater.tp_rank)
    except Exception as error:  # the answer is the only way out of the scheduler's loop
        return False, f"{type(error).__name__}: {error}"
    return True, "joined the weight groups"


def receive(original: Callable[..., Any], updater: Any, *, names: list[str], group_name: str, **rest: Any
            ) -> Iterator[tuple[str, Any]] | Any:
    """Named tensors as they come; SGLang gives them to the model's loader, whose errors it reports."""
    if group_name != GROUP:
        return original(updater, names=names, group_name=group_name, **rest)
    receiver = _receivers.get(updater.tp_rank)
    if receiver is None:
        raise RuntimeError("the weight push came before the weight groups were joined")
    return receiver.tensors(json.loads(names[0]))


def leave_group(original: Callable[..., Any], updater: Any, group_name: str) -> Any:
    if group_name != GROUP:
        return original(updater, group_name)
    receiver = _receivers.pop(updater.tp_rank, None)
    if receiver is not None:
        receiver.close()
    return True, "left the weight groups"


def register() -> None:
    """The entry point; SGLang calls it in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{UPDATER}.init_weights_update_group", join_group, HookType.AROUND)
    HookRegistry.register(f"{UPDATER}.receive_weights_from_distributed", receive, HookType.AROUND)
    HookRegistry.register(f"{UPDATER}.destroy_weights_update_group", leave_group, HookType.AROUND)
    if os.environ.get("LUSPO_SGLANG_CPU"):
        from luspo_megatron.rollout.inside_engine.sglang_cpu import allow_seeds, patch_torch

        patch_torch()
        allow_seeds()
        # its batch-invariant kernels are a GPU's; what a CPU computes for a sequence hardly depends on the others
        HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode",
                              lambda *_: None, HookType.REPLACE)
