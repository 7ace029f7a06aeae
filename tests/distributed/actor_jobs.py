"""What worker processes do in the actor tests: build an actor under a layout, take one step, report by global name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from luspo_megatron.config import AlgorithmConfig, BatchConfig, LossConfig, ModelConfig, OptimizerConfig, ParallelConfig
from luspo_megatron.parallel import ParallelLayout


@dataclass(frozen=True)
class Case:
    """A layout and what else the step depends on."""

    world: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    max_tokens: int = 96
    chunk_bytes: int = 65536
    recompute: str = "none"
    family: str = ""
    cache_bytes: int = 0

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(self.world, self.tp, self.pp, self.ep, self.etp)


OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=0, beta1=0.9, beta2=0.98, eps=1e-3, weight_decay=0.01, clip_grad=1.0)


@contextlib.contextmanager
def actor_of(rank: int, case: Case, folder: Any, *, trainable: bool = True, **model: Any) -> Iterator[Any]:
    from luspo_megatron.actor.actor import Actor
    from luspo_megatron.actor.groups import join, leave
    from luspo_megatron.weights.architecture import read_architecture

    ranks = join(case.layout, seed=1)
    try:
        actor = Actor(
            read_architecture(folder, case.family), ranks, trainable=trainable,
            model=ModelConfig(hf=str(folder), family=case.family, recompute=case.recompute, **model),
            parallel=ParallelConfig(sequence_parallel=case.sequence_parallel,
                                    distributed_optimizer=case.distributed_optimizer),
            optimizer=OPTIMIZER, batch=BatchConfig(max_tokens_per_micro_batch=case.max_tokens),
            loss=LossConfig(chunk_bytes=case.chunk_bytes, cache_bytes=case.cache_bytes))
        actor.load_hf(str(folder))
        yield actor
    finally:
        leave()


def shards(actor: Any, tensor_of: Any) -> dict[str, tuple[int, int, np.ndarray]]:
    """global megatron name -> (tensor-parallel size, this rank's part, array); load-only copies left out."""
    from luspo_megatron.weights.load import local_parameters, shard_of

    out = {}
    for entry, parameter in local_parameters(actor.gpt, actor.table, actor.ranks.layout, actor.ranks.rank):
        if not entry.row.load_only:
            out[entry.megatron] = (*shard_of(entry, actor.ranks.layout, actor.ranks.rank),
                                   tensor_of(parameter).detach().float().numpy().copy())
    return out


def plan_of(actor: Any, samples: Any, *, prompts_per_mini_batch: int = 1000) -> Any:
    from luspo_megatron.data.schedule import build_mini_batches, plan_batches

    layout = actor.ranks.layout
    multiple = layout.token_multiple(True)
    plans = plan_batches([s.num_tokens for s in samples], [s.group_id for s in samples],
                         response_lengths=[len(s.response_ids) for s in samples], dp=layout.dp,
                         prompts_per_mini_batch=prompts_per_mini_batch, epochs=1,
                         max_tokens=actor.batch.max_tokens_per_micro_batch, multiple=multiple, seed=0, rollout_id=0)
    return build_mini_batches(plans, samples, actor.ranks.dp_rank, multiple)


def logprobs_of(rank: int, case: Case, folder: Any, samples: Any) -> dict[int, np.ndarray]:
    """{sample index: log-probs of its response} that this rank has, without an optimizer."""
    with actor_of(rank, case, folder, trainable=False) as actor:
        [mini_batch] = plan_of(actor, samples)
        return by_sample(mini_batch.micro_batches, actor.logprobs(mini_batch.micro_batches))


def by_sample(micro_batches: Any, outputs: Any) -> dict[int, np.ndarray]:
    from luspo_megatron.data.collate import unpack

    logprobs = {}
    for micro, (values, _) in zip(micro_batches, outputs or (), strict=False):
        real = [int(i) for i in micro.sample_indices if i >= 0]
        logprobs.update(zip(real, unpack(values.numpy(), micro), strict=True))
    return logprobs


def one_step(rank: int, case: Case, folder: Any, samples: Any, advantages: np.ndarray, old: list[np.ndarray],
             algorithm: AlgorithmConfig, ref: list[np.ndarray] | None = None) -> dict[str, Any]:
    """Log-probs before, statistics, gradients (without the distributed optimizer) and parameters after one step."""
    import torch

    from luspo_megatron.actor.policy_loss import policy_loss
    from luspo_megatron.data.collate import scatter

    with actor_of(rank, case, folder) as actor:
        [mini_batch] = plan_of(actor, samples)
        micro_batches = mini_batch.micro_batches
        logprobs = by_sample(micro_batches, actor.logprobs(micro_batches))
        gradients = {}
        step = actor.optimizer.step

        def step_and_look() -> Any:
            if not case.distributed_optimizer:
                gradients.update(shards(actor, lambda p: p.main_grad))
            return step()

        actor.optimizer.step = step_and_look

        def spread(values: list[np.ndarray]) -> list[Any]:
            return [torch.from_numpy(scatter(values, micro)) for micro in micro_batches]

        objective = policy_loss(algorithm, mini_batch, advantages, old_logprobs=spread(old),
                                ref_logprobs=None if ref is None else spread(ref), max_response_tokens=24)
        result = actor.train_step(mini_batch, objective, OPTIMIZER.lr)
        return {"logprobs": logprobs, "sums": result.sums, "per_sample": result.per_sample,
                "gradient_norm": result.gradient_norm, "gradients": gradients,
                "parameters": shards(actor, lambda p: p), "num_micro_batches": len(micro_batches)}


def assemble(results: list[dict[str, Any]], key: str, table: Any) -> dict[str, np.ndarray]:
    """Shards of all ranks -> whole tensors by Hugging Face name; replicas must agree bitwise."""
    import torch

    parts: dict[str, dict[int, np.ndarray]] = {}
    sizes: dict[str, int] = {}
    for result in results:
        for name, (size, part, array) in result[key].items():
            sizes[name] = size
            known = parts.setdefault(name, {}).setdefault(part, array)
            np.testing.assert_array_equal(known, array, err_msg=f"replicas of {name} differ")
    out = {}
    for entry in table.entries():
        own = parts[entry.megatron]
        merged = entry.row.layout.merge([torch.from_numpy(own[i]) for i in range(sizes[entry.megatron])])
        out.update({name: tensor.numpy() for name, tensor in zip(entry.hf_names, merged, strict=True)})
    return out


def steps_of(actor: Any, samples: Any, advantages: np.ndarray, first: int, count: int) -> list[float]:
    """`count` LUSPO updates, one per prompt group from group `first` on; the loss of each (rank 0)."""
    from luspo_megatron.actor.policy_loss import policy_loss

    mini_batches = plan_of(actor, samples, prompts_per_mini_batch=1)[first : first + count]
    losses = []
    for mini_batch in mini_batches:
        old = actor.logprobs(mini_batch.micro_batches) or []
        # not the same policy: otherwise the loss would hide what the optimizer state changes
        objective = policy_loss(AlgorithmConfig(clip_low=0.5, clip_high=0.5), mini_batch, advantages,
                                old_logprobs=[logp - 0.01 for logp, _ in old], max_response_tokens=24)
        losses.append(actor.train_step(mini_batch, objective, OPTIMIZER.lr).sums.get("loss", 0.0))
    return losses


def save_after(rank: int, case: Case, folder: Any, samples: Any, advantages: np.ndarray, out: Any, count: int,
               total: int) -> Any:
    """`count` steps, save, then the steps up to `total`: their losses and the parameters at the end."""
    from luspo_megatron.actor import checkpoint

    with actor_of(rank, case, folder) as actor:
        steps_of(actor, samples, advantages, 0, count)
        checkpoint.save(actor, out, count, {"weight_version": 7}, keep=2)
        losses = steps_of(actor, samples, advantages, count, total - count)
        return {"losses": losses, "parameters": shards(actor, lambda p: p)}


def resume_from(rank: int, case: Case, folder: Any, samples: Any, advantages: np.ndarray, path: Any, first: int,
                total: int) -> Any:
    from luspo_megatron.actor import checkpoint

    with actor_of(rank, case, folder) as actor:
        state = checkpoint.load(actor, path)
        losses = steps_of(actor, samples, advantages, first, total - first)
        return {"losses": losses, "state": state, "parameters": shards(actor, lambda p: p)}


def checkpoint_keys(rank: int, case: Case, folder: Any) -> list[str]:
    from luspo_megatron.actor.checkpoint import sharded_state

    with actor_of(rank, case, folder) as actor:
        model, _ = sharded_state(actor, is_loading=False, with_optimizer=False)
        return sorted({value.key for value in model.values()})
