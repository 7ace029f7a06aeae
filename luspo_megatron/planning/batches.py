"""The batch plan of a rollout step for assumed response lengths, by the scheduler that the trainer uses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from luspo_megatron.config import Config
from luspo_megatron.data.schedule import plan_batches
from luspo_megatron.errors import UserError
from luspo_megatron.parallel import ParallelLayout


@dataclass(frozen=True)
class BatchPlan:
    """Counts of one rollout step. ``fill``: mean share of the token budget that micro-batches use; ``max_tokens``:
    tokens of the largest one; ``imbalance``: tokens of the fullest data-parallel rank over the mean."""

    prompts: int
    samples: int
    tokens: int
    mean_length: float
    mini_batches: int
    micro_batches_min: int
    micro_batches_max: int
    micro_batches: int
    max_tokens: int
    fill: float
    imbalance: float


def parse_percentiles(text: str, longest: int) -> list[tuple[float, float]]:
    """"50:2000,95:8000" -> [(0, first), (.5, 2000), (.95, 8000), (1, last)], response tokens at shares of the samples.

    Empty: a quarter of ``longest`` at the median, three quarters at 95%, ``longest`` at the end.
    """
    text = text or f"50:{max(1, longest // 4)},95:{max(1, longest * 3 // 4)},100:{longest}"
    points: list[tuple[float, float]] = []
    for part in text.split(","):
        share, colon, tokens = part.partition(":")
        try:
            point = (float(share) / 100, float(tokens))
        except ValueError:
            point = (-1.0, 0.0)
        rises = not points or (point[0] > points[-1][0] and point[1] >= points[-1][1])
        if not colon or not 0 <= point[0] <= 1 or point[1] < 1 or not rises:
            raise UserError(f"--percentiles {text!r}: write rising pairs percent:tokens, e.g. 50:2000,95:8000")
        points.append((point[0], min(point[1], longest)))
    if points[0][0] > 0:
        points.insert(0, (0.0, points[0][1] / 4))
    if points[-1][0] < 1:
        points.append((1.0, points[-1][1]))
    return points


def draw_lengths(points: Sequence[tuple[float, float]], count: int, seed: int = 0) -> list[int]:
    """``count`` response lengths spread evenly over the distribution (linear between its points), shuffled."""
    lengths = []
    for i in range(count):
        share = (i + 0.5) / count
        for (low, a), (high, b) in zip(points, points[1:], strict=False):
            if share <= high:
                lengths.append(max(1, round(a + (b - a) * (share - low) / (high - low) if high > low else b)))
                break
    random.Random(seed).shuffle(lengths)
    return lengths


def batch_plan(config: Config, layout: ParallelLayout, lengths: Sequence[int], prompt_tokens: int) -> BatchPlan:
    """The plan of a step with these response ``lengths`` (prompts x group_size of them)."""
    rollout, algorithm = config.rollout, config.algorithm
    group_ids = [i // rollout.group_size for i in range(len(lengths))]
    totals = [length + prompt_tokens for length in lengths]
    multiple = layout.token_multiple(config.parallel.sequence_parallel)
    budget = config.batch.max_tokens_per_micro_batch
    plans = plan_batches(totals, group_ids, response_lengths=list(lengths), dp=layout.dp,
                         prompts_per_mini_batch=algorithm.prompts_per_mini_batch, epochs=algorithm.epochs,
                         max_tokens=budget, multiple=multiple, seed=config.run.seed, rollout_id=1)
    sizes = [sum(totals[i] for i in micro) for plan in plans for rank in plan.ranks for micro in rank]
    ranks = [sum(totals[i] for plan in plans for micro in plan.ranks[r] for i in micro) for r in range(layout.dp)]
    counts = [plan.num_microbatches for plan in plans]
    return BatchPlan(
        prompts=rollout.prompts_per_step, samples=len(lengths), tokens=sum(totals), mean_length=fmean(lengths),
        mini_batches=len(plans), micro_batches_min=min(counts), micro_batches_max=max(counts),
        micro_batches=sum(counts), max_tokens=max(sizes), fill=fmean(sizes) / budget,
        imbalance=max(ranks) / fmean(ranks))
