"""Planning one rollout's optimizer steps: which samples, on which data-parallel rank, in which micro-batch.

Pure and deterministic, numpy only: every rank computes the same plan from the same lengths, and tests need no
processes. Rules:

- a mini-batch is a set of whole prompt groups, drawn by (seed, rollout id, epoch) alone. Its samples do not depend on
  the layout, so neither do the results;
- every sample exactly once per epoch;
- every data-parallel rank gets the same number of micro-batches (ranks meet in expert all-to-alls and pipeline
  schedules: an unequal count hangs), with fillers where there are fewer samples than micro-batches;
- no micro-batch above the token budget, and micro-batch j is of nearly the same size on every rank.

Forward-only passes over all samples take the same function with one mini-batch of all prompts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from luspo_megatron.data.collate import SampleLike, pack
from luspo_megatron.errors import UserError
from luspo_megatron.types import MiniBatch


@dataclass(frozen=True)
class MiniBatchPlan:
    """One optimizer step. ``ranks[dp_rank][j]`` are the sample indices of micro-batch j; () is a filler."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    global_num_sequences: int
    global_num_tokens: int

    @property
    def num_microbatches(self) -> int:
        return len(self.ranks[0])

    @property
    def sample_indices(self) -> tuple[int, ...]:
        """Every sample of the mini-batch over all ranks, ascending."""
        return tuple(sorted(i for rank in self.ranks for micro_batch in rank for i in micro_batch))


def plan_batches(
    lengths: Sequence[int],
    group_ids: Sequence[int],
    *,
    response_lengths: Sequence[int],
    dp: int,
    prompts_per_mini_batch: int,
    epochs: int,
    max_tokens: int,
    multiple: int,
    seed: int,
    rollout_id: int,
    microbatch_multiple: int = 1,
) -> list[MiniBatchPlan]:
    """The mini-batches of one rollout, in order, ``epochs`` passes.

    ``lengths`` are total tokens (prompt + response) per sample, ``response_lengths`` those that the loss counts.
    ``max_tokens`` bounds a packed micro-batch including its padding to ``multiple``. ``microbatch_multiple`` makes the
    number of micro-batches divisible (interleaved pipelines need that). When the prompts do not divide into
    mini-batches of ``prompts_per_mini_batch`` they are spread evenly over as many as needed, none larger: no update
    rests on a lone left-over prompt. Raises UserError when a sample is longer than the budget.
    """
    if not len(lengths) == len(group_ids) == len(response_lengths):
        raise ValueError(f"{len(lengths)} lengths, {len(response_lengths)} of responses, {len(group_ids)} group ids")
    settings = {"dp": dp, "prompts_per_mini_batch": prompts_per_mini_batch, "multiple": multiple,
                "microbatch_multiple": microbatch_multiple}  # fmt: skip
    for name, value in settings.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, it must be at least 1")
    if not lengths:
        return []
    budget = max_tokens // multiple * multiple
    longest = max(range(len(lengths)), key=lambda i: lengths[i])
    if lengths[longest] > budget:
        needed = -(-lengths[longest] // multiple) * multiple
        raise UserError(
            f"batch.max_tokens_per_micro_batch: sample {longest} has {lengths[longest]} tokens (prompt and response), "
            f"the budget is {max_tokens}; raise it to at least {needed}, or shorten rollout.max_response_tokens or "
            "data.max_prompt_tokens"
        )
    members: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids):
        members.setdefault(int(group), []).append(index)
    plans = []
    for epoch in range(epochs):
        groups = np.random.default_rng([seed, rollout_id, epoch]).permutation(sorted(members))
        for chosen in np.array_split(groups, -(-len(groups) // prompts_per_mini_batch)):
            samples = sorted(i for group in chosen for i in members[int(group)])
            rows = _micro_batches(samples, lengths, dp, budget, microbatch_multiple)
            plans.append(
                MiniBatchPlan(
                    ranks=_deal(rows, lengths, dp),
                    global_num_sequences=len(samples),
                    global_num_tokens=sum(int(response_lengths[i]) for i in samples),
                )
            )
    return plans


def _micro_batches(
    samples: list[int], lengths: Sequence[int], dp: int, budget: int, microbatch_multiple: int
) -> list[list[tuple[int, ...]]]:
    """Rows of ``dp`` micro-batches, largest first: the fewest rows for which balanced filling keeps to the budget.

    Longest sample first, each into the emptiest micro-batch. With one micro-batch per sample this always fits, so
    the search ends.
    """
    ordered = sorted(samples, key=lambda i: (-lengths[i], i))
    rows = -(-sum(lengths[i] for i in samples) // (dp * budget))
    while True:
        rows = -(-max(rows, 1) // microbatch_multiple) * microbatch_multiple
        bins: list[list[int]] = [[] for _ in range(dp * rows)]
        heap = [(0, b) for b in range(len(bins))]
        for index in ordered:
            load, b = heapq.heappop(heap)
            bins[b].append(index)
            heapq.heappush(heap, (load + lengths[index], b))
        if max(load for load, _ in heap) <= budget:
            break
        rows += 1
    order = [b for _, b in sorted(heap, key=lambda entry: (-entry[0], entry[1]))]
    packed = [tuple(sorted(bins[b])) for b in order]
    return [packed[j * dp : (j + 1) * dp] for j in range(rows)]


def _deal(
    rows: list[list[tuple[int, ...]]], lengths: Sequence[int], dp: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Rows of micro-batches to ranks: of each row, the largest goes to the rank with the fewest tokens so far."""
    ranks: list[list[tuple[int, ...]]] = [[] for _ in range(dp)]
    totals = [0] * dp
    for row in rows:
        for rank, micro_batch in zip(sorted(range(dp), key=lambda r: (totals[r], r)), row, strict=True):
            ranks[rank].append(micro_batch)
            totals[rank] += sum(lengths[i] for i in micro_batch)
    return tuple(tuple(rank) for rank in ranks)


def build_mini_batches(
    plans: Sequence[MiniBatchPlan], samples: Sequence[SampleLike], dp_rank: int, multiple: int
) -> list[MiniBatch]:
    """The packed share of one data-parallel rank. ``multiple`` as given to `plan_batches`."""
    return [
        MiniBatch(
            micro_batches=[pack(samples, indices, multiple) for indices in plan.ranks[dp_rank]],
            global_num_sequences=plan.global_num_sequences,
            global_num_tokens=plan.global_num_tokens,
        )
        for plan in plans
    ]
