"""Group-relative advantages: each reward against the other samples of its prompt.

Groups are told apart by id, never by position or size: samples may have been dropped, and groups may differ in size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from luspo_megatron.algorithm.packed import PerSequence

EQUAL_REWARDS = 1e-6
"""Rewards of a group that differ by less than this, relative to the largest, are the same reward.

It is above the rounding of sums of float32 terms and far below any real difference of rewards. Without it the spread
of a group that got the same reward by different sums is noise, and dividing by it makes noise a signal."""


def group_advantages(
    rewards: Sequence[float] | PerSequence,
    group_ids: Sequence[int] | Tensor,
    *,
    std: bool = True,
    ddof: int = 1,
    eps: float = 1e-6,
) -> PerSequence:
    """``(r - mean) / (std + eps)`` within each group, float64 on the CPU; ``r - mean`` when ``std`` is False.

    ``ddof`` is 1 (sample) or 0 (population standard deviation). A group whose rewards are all equal up to float noise,
    and so a group of one, has advantage exactly 0. Raises ValueError for unequal lengths, another ddof, or a reward
    that is not finite.
    """
    r = torch.as_tensor(rewards, dtype=torch.float64, device="cpu")
    ids = torch.as_tensor(group_ids, dtype=torch.int64, device="cpu")
    if r.ndim != 1 or r.shape != ids.shape:
        raise ValueError(f"{tuple(r.shape)} rewards and {tuple(ids.shape)} group ids: both must be [n]")
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof}, it must be 0 or 1")
    if not bool(torch.isfinite(r).all()):
        raise ValueError(f"reward of sample {int((~torch.isfinite(r)).nonzero()[0])} is not finite")
    if r.numel() == 0:
        return r
    _, group = torch.unique(ids, return_inverse=True)
    n_groups = int(group.max()) + 1

    def total(values: Tensor) -> Tensor:
        return torch.zeros(n_groups, dtype=torch.float64).index_add(0, group, values)

    def extreme(values: Tensor, which: str) -> Tensor:
        return torch.zeros(n_groups, dtype=torch.float64).scatter_reduce(0, group, values, which, include_self=False)

    size = total(torch.ones_like(r))
    centred = r - (total(r) / size)[group]
    spread, largest = extreme(r, "amax") - extreme(r, "amin"), extreme(r.abs(), "amax")
    equal = spread <= EQUAL_REWARDS * largest + 1e-12
    if std:
        deviation = (total(centred**2) / (size - ddof).clamp(min=1)).sqrt()
        centred = centred / torch.where(equal, 1.0, deviation + eps)[group]
    return torch.where(equal[group], 0.0, centred)
