"""What workers do in the tests of micro-batches and of gathers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from luspo_megatron.config import AlgorithmConfig
from tests.distributed.actor_jobs import Case, actor_of, shards


@dataclass(frozen=True)
class Split:
    """ranks[dp_rank][j]: sample indices of micro-batch j, in pack order. Every rank has the same number.

    masked: samples whose response mask is cleared. spoil_old: NaN and inf in the old log-probs wherever the mask is
    False. spoil_advantages: samples whose advantage is NaN.
    """

    ranks: Sequence[Sequence[Sequence[int]]]
    multiple: int = 1
    masked: Sequence[int] = ()
    spoil_old: bool = False
    spoil_advantages: Sequence[int] = ()


def split_steps(rank: int, case: Case, folder: Path, samples: Any, advantages: np.ndarray, old: list[np.ndarray],
                algorithm: AlgorithmConfig, splits: Sequence[Split], num_sequences: int,
                num_tokens: int) -> list[dict[str, Any]]:
    """Loss and gradients of the same mini-batch under each split, with the denominators given."""
    import torch

    from luspo_megatron.actor.policy_loss import policy_loss
    from luspo_megatron.data.collate import pack, scatter
    from luspo_megatron.types import MiniBatch

    out = []
    with actor_of(rank, dataclasses.replace(case, distributed_optimizer=False), folder) as actor:
        gradients: dict[str, Any] = {}
        step = actor.optimizer.step

        def step_and_look() -> Any:
            gradients.update(shards(actor, lambda p: p.main_grad))
            return step()

        actor.optimizer.step = step_and_look
        for split in splits:
            micro_batches = [pack(samples, part, split.multiple) for part in split.ranks[actor.ranks.dp_rank]]
            olds = []
            for j, micro in enumerate(micro_batches):
                values = scatter(old, micro)
                off = np.isin(np.repeat(micro.sample_indices, np.diff(micro.cu_seqlens)), split.masked)
                micro_batches[j] = micro = dataclasses.replace(micro, response_mask=micro.response_mask & ~off)
                if split.spoil_old:
                    holes = np.flatnonzero(~micro.response_mask)
                    values[holes] = np.resize([np.nan, np.inf, -np.inf], len(holes))
                olds.append(torch.from_numpy(values))
            spoilt = advantages.copy()
            spoilt[list(split.spoil_advantages)] = np.nan
            mini_batch = MiniBatch(micro_batches, num_sequences, num_tokens)
            objective = policy_loss(algorithm, mini_batch, spoilt, old_logprobs=olds, max_response_tokens=24)
            result = actor.train_step(mini_batch, objective, 0.0)  # rate 0: the next split sees the same weights
            out.append({"sums": result.sums, "per_sample": result.per_sample, "gradients": dict(gradients),
                        "gradient_norm": result.gradient_norm})
    return out


def gather_weights(rank: int, case: Case, folder: Path, bucket_bytes: int, out: Path) -> dict[str, Any]:
    """What this rank would send, by Hugging Face name; and the model is exported to `out`."""
    import torch

    from luspo_megatron.weights.export import export_hf
    from luspo_megatron.weights.gather import ShardGatherer
    from luspo_megatron.weights.plan import plan_sync

    with actor_of(rank, case, folder) as actor:
        plan = plan_sync(actor.table, case.layout, "float32", bucket_bytes)
        sent: dict[str, Any] = {}
        for _, tensors in ShardGatherer(actor.gpt, actor.table, actor.ranks).walk(plan, torch.float32):
            for name, value in (tensors or {}).items():
                assert name not in sent
                sent[name] = value.numpy().copy()
        export_hf(actor.gpt, actor.table, actor.ranks, source_folder=folder, out=out, dtype="float32",
                  shard_bytes=50_000)
        return sent
