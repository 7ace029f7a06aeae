"""megatron-core's DDP, optimizer and learning-rate schedule for the actor."""

from __future__ import annotations

from typing import Any

import torch

from luspo_megatron.config import OptimizerConfig
from luspo_megatron.platform import platform


def wrap_ddp(gpt: Any, distributed_optimizer: bool) -> Any:
    """DDP with fp32 gradient buffers; sums are averaged over the data-parallel group (see actor/loss_stage.py)."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    for name, parameter in gpt.named_parameters():
        if ".experts." in name:
            # Experts always get an optimizer of their own, also where EP = 1 and ETP = TP would put them with the dense
            # parameters: a checkpoint then has the same optimizers under every layout.
            parameter.allreduce = False
    return DistributedDataParallel(
        gpt.config, DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer, overlap_grad_reduce=False,
            overlap_param_gather=False, average_in_collective=False), gpt)


def build_optimizer(ddp: Any, settings: OptimizerConfig, distributed_optimizer: bool) -> Any:
    """The (chained) megatron optimizer. Weight decay spares norms and biases (one-dimensional parameters)."""
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer import get_megatron_optimizer, get_standard_config_overrides

    platform().prepare_optimizer()
    dtype = ddp.config.params_dtype
    config = MegatronOptimizerConfig(
        optimizer="adam", lr=settings.lr, min_lr=0.0, weight_decay=settings.weight_decay, adam_beta1=settings.beta1,
        adam_beta2=settings.beta2, adam_eps=settings.eps, clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16, params_dtype=dtype, use_distributed_optimizer=distributed_optimizer,
        optimizer_cpu_offload=settings.cpu_offload, optimizer_offload_fraction=1.0 if settings.cpu_offload else 0.0)
    return get_megatron_optimizer(config, [ddp], config_overrides=get_standard_config_overrides(config))


def learning_rate(settings: OptimizerConfig, update: int, total_updates: int) -> float:
    """Rate of optimizer update number `update` (from 0): linear warm-up to lr, then constant or linear to 0."""
    warm = min(1.0, (update + 1) / settings.warmup_steps) if settings.warmup_steps else 1.0
    if settings.decay == "linear":
        warm *= max(0.0, 1.0 - update / max(1, total_updates))
    return settings.lr * warm


def set_rates(optimizer: Any, lr: float, weight_decay: float) -> None:
    """Learning rate and weight decay of every parameter group, with the groups' multipliers (norms: no decay)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
