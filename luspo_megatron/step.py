"""The numbers of one training step, on rank 0: from samples, advantages and update results to the metrics table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from luspo_megatron.actor.actor import TrainResult
from luspo_megatron.algorithm.statistics import reduce_statistics, step_statistics
from luspo_megatron.data.collate import unpack
from luspo_megatron.ranks import Ranks
from luspo_megatron.report.metrics import STATISTICS_NAMES
from luspo_megatron.types import MiniBatch, Sample


def gather_old_logprobs(ranks: Ranks, mini_batches: Sequence[MiniBatch],
                        old: Sequence[Sequence[tuple[Any, Any]]]) -> dict[int, np.ndarray]:
    """{sample index: old log-probs of its response} on rank 0, from the last stage's data-parallel ranks."""
    own: dict[int, np.ndarray] = {}
    for mini_batch, outputs in zip(mini_batches, old, strict=True):
        for micro, (logprobs, _) in zip(mini_batch.micro_batches, outputs, strict=False):
            real = [int(i) for i in micro.sample_indices if i >= 0]
            own.update(zip(real, unpack(logprobs.float().cpu().numpy(), micro), strict=True))
    parts = ranks.gather(own)
    return {index: values for part in parts or () for index, values in part.items()}


def step_metrics(samples: Sequence[Sample], advantages: np.ndarray, results: Sequence[TrainResult],
                 old_logprobs: dict[int, np.ndarray], *, lr: float, weight_version: int) -> dict[str, Any]:
    """Metrics by the names of report/metrics.py, all but timings. Rank 0 only."""
    order = range(len(samples))
    clipped, token_weights = np.zeros(len(samples)), np.zeros(len(samples))
    for result in results:  # with several epochs a sample counts by its last update
        for name, values in (("clipped", clipped), ("token_weight", token_weights)):
            for index, value in result.per_sample.get(name, {}).items():
                values[index] = value
    rollout = step_statistics(
        lengths=[len(s.response_ids) for s in samples], rewards=[s.reward for s in samples],
        correct=[s.correct for s in samples], truncated=[s.truncated for s in samples],
        group_ids=[s.group_id for s in samples], advantages=advantages, clipped=clipped,
        token_weights=token_weights,
        rollout_logprobs=[s.rollout_logprobs for s in samples], old_logprobs=[old_logprobs[i] for i in order])
    updates = reduce_statistics([result.sums for result in results], mini_batches=len(results))
    metrics: dict[str, Any] = {ours: rollout[theirs] for ours, theirs in STATISTICS_NAMES.items() if theirs in rollout}
    for ours, theirs in (("clip_fraction_positive",) * 2, ("clip_fraction_negative",) * 2, ("loss",) * 2,
                         ("kl_ref", "kl_ref_mean"), ("entropy", "entropy_mean"), ("ratio_mean",) * 2,
                         ("ratio_deviation_mean",) * 2, ("overflow_fraction",) * 2):
        if theirs in updates:
            metrics[ours] = updates[theirs]
    return metrics | {
        "gradient_norm": float(np.mean([result.gradient_norm for result in results])), "lr": lr,
        "num_updates": len(results), "rollout_digest": rollout_digest(samples),
        "tokens": sum(s.num_tokens for s in samples), "weight_version": weight_version,
    }


def rollout_digest(samples: Sequence[Sample]) -> int:
    """48 bits (exact as a float) over every prompt and response token of the step, in order.

    Equal digests mean the same rollout: a resumed run compares with an uninterrupted one, sample for sample, from
    metrics.jsonl alone.
    """
    digest = xxhash.xxh3_64()
    for sample in samples:
        for ids in (sample.prompt_ids, sample.response_ids):
            digest.update(np.asarray([len(ids), *ids], np.int64).tobytes())
    return digest.intdigest() & (2**48 - 1)
