"""AdamW with the state layout of the fused kernels (`exp_avg`, `exp_avg_sq`, step in the param group).

megatron-core's distributed optimizer can save and load reshardable checkpoints only for that layout; torch's AdamW
keeps a step tensor per parameter and cannot be loaded after resharding. Used where neither Transformer Engine's nor
NVIDIA Apex's FusedAdam is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class PlainAdam(torch.optim.Optimizer):
    """Adam (decoupled weight decay when `adam_w_mode`), constructor and state as in the fused kernels."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
                 eps: float = 1e-8, weight_decay: float = 0.0, adam_w_mode: bool = True, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            correction1, correction2 = 1 - beta1 ** group["step"], 1 - beta2 ** group["step"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                grad = p.grad
                if self.adam_w_mode:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                elif group["weight_decay"]:
                    grad = grad.add(p, alpha=group["weight_decay"])
                state["exp_avg"].lerp_(grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                denominator = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
                p.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / correction1)


def install() -> str:
    """Makes megatron's optimizers use the best Adam there is; returns its name."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.distrib_optimizer as distributed

    if optimizers.Adam is PlainAdam:
        return "PlainAdam"
    if not optimizers.USING_PYTORCH_OPTIMIZER:
        return "TE FusedAdam" if optimizers.Adam.__module__.startswith("transformer_engine") else "Apex FusedAdam"
    optimizers.Adam = distributed.Adam = PlainAdam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    # "Apex" is how the distributed optimizer names the layout without a step tensor per parameter
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
    return "PlainAdam"
