"""What worker processes do in the memory tests: one optimizer step of a model of about 100 M parameters, with every
live tensor's bytes counted: the storages that torch's dispatcher sees, not the planner's shapes."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from luspo_megatron.weights.architecture import Architecture
from tests.distributed.actor_jobs import OPTIMIZER, Case, plan_of

MODEL = Architecture(
    family="qwen3_moe", num_layers=6, hidden=512, num_heads=8, num_kv_heads=4, head_dim=64, ffn=1024, vocab_size=32001,
    norm_eps=1e-6, rope_theta=1e6, max_positions=2048, tied=False, num_experts=16, top_k=2, moe_ffn=448)


def _counter() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class LiveBytes(TorchDispatchMode):
        """Bytes of the storages that operations have made and that are still alive; ``peak`` of them and the rest."""

        def __init__(self) -> None:
            super().__init__()
            self.known: dict[int, int] = {}
            self.now = self.peak = 0

        def see(self, tensor: Any) -> None:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self.known or not storage.nbytes():
                return
            self.known[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

        def _gone(self, key: int) -> None:
            self.now -= self.known.pop(key, 0)

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            import torch

            out = function(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    self.see(leaf)
            return out

    return LiveBytes()


def measure(rank: int, case: Case, samples: Any, dtype: str) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state, the peak of one step, and the micro-batches' sizes."""
    import numpy as np
    import torch

    from luspo_megatron.actor.actor import Actor
    from luspo_megatron.actor.groups import join, leave
    from luspo_megatron.actor.policy_loss import policy_loss
    from luspo_megatron.config import AlgorithmConfig, BatchConfig, LossConfig, ModelConfig, ParallelConfig

    ranks = join(case.layout, seed=1)
    try:
        actor = Actor(
            MODEL, ranks, model=ModelConfig(recompute=case.recompute, dtype=dtype), optimizer=OPTIMIZER,  # type: ignore[arg-type]
            parallel=ParallelConfig(distributed_optimizer=case.distributed_optimizer),
            batch=BatchConfig(max_tokens_per_micro_batch=case.max_tokens), loss=LossConfig(chunk_bytes=2**21))

        def step(samples: Any) -> list[Any]:
            [mini_batch] = plan_of(actor, samples)
            old = actor.logprobs(mini_batch.micro_batches) or []
            objective = policy_loss(AlgorithmConfig(clip_low=0.5, clip_high=0.5), mini_batch, np.ones(len(samples)),
                                    old_logprobs=[logp - 0.01 for logp, _ in old], max_response_tokens=2048)
            actor.train_step(mini_batch, objective, OPTIMIZER.lr)
            return mini_batch.micro_batches

        step(samples[:2])  # makes the optimizer's state
        gc.collect()
        counter = _counter()
        parameters = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in actor.gpt.parameters()}
        buffers = [b for b in (*actor.model.buffers, *actor.model.expert_parallel_buffers)]
        gradients = sum(b.grad_data.untyped_storage().nbytes() for b in buffers)
        optimizers = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
        states = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for one in optimizers
                  for state in one.optimizer.state.values() for t in state.values() if torch.is_tensor(t)}
        if dtype == "bfloat16":
            states |= {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for one in optimizers
                       for group in one.optimizer.param_groups for p in group["params"]}
        held = sum(parameters.values()) + gradients + sum(states.values())
        known = {*parameters, *states, *(b.grad_data.untyped_storage()._cdata for b in buffers)}
        counter.known = dict.fromkeys(known, 0)  # counted exactly above
        with counter:
            tokens = [len(micro.token_ids) for micro in step(samples)]
        return {"parameters": sum(parameters.values()), "gradients": gradients, "optimizer": sum(states.values()),
                "peak": held + counter.peak, "tokens": max(tokens), "micro_batches": len(tokens)}
    finally:
        leave()
