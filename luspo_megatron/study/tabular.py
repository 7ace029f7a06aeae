"""A tabular policy and two tasks in which the response length can move freely.

A response is some thinking tokens (STEP or one of three fillers), STOP, and one of ten answers. The policy holds one
row of logits per position for the thinking tokens and one row per hint for the answer; every response starts at the
same mean length. Tasks:

- neutral: the hint reveals the answer with a fixed probability, whatever the response: length does not matter.
- need: the hint reveals the answer exactly when enough STEP tokens were written (how many differs between prompts):
  longer responses are right more often, with no end to it but the limit.

A response that reaches the last position is stopped there; that forced STOP is not the policy's choice and has no
token. Uniform numbers are drawn in a fixed amount per step, so that all objectives of a seed see the same prompts and
the same luck. Left out: prompts that the policy could tell apart, and any model of text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

THINKING, STOP = 5, 4  # STEP, three fillers, STOP
STEP = 0
ANSWERS, NO_HINT = 10, 10
REVEALED = 0.5  # neutral task: how often the hint reveals the answer
STEPS_NEEDED = (2, 16)  # need task: lowest and highest number of STEP tokens that a prompt asks for
COPY_LOGIT = 2.0  # at the start the policy follows a hint with probability e^2 / (e^2 + 9) = 0.45

Task = Literal["neutral", "need"]


class TabularPolicy:
    """Logits: ``stop`` [5] for all positions, ``position`` [limit, 5] beside it, ``answer`` [11 hints, 10]."""

    def __init__(self, limit: int, start_length: float) -> None:
        self.limit = limit  # positions; also the longest response: limit - 1 thinking tokens with STOP, one answer
        hazard = 1 / (start_length - 1)
        even = [(1 - hazard) / (THINKING - 1)] * (THINKING - 1)
        self.stop = torch.tensor([*even, hazard], dtype=torch.float64).log().requires_grad_(True)
        self.position = torch.zeros(limit, THINKING, dtype=torch.float64, requires_grad=True)
        hints = torch.zeros(NO_HINT + 1, ANSWERS, dtype=torch.float64)
        hints[:ANSWERS] = COPY_LOGIT * torch.eye(ANSWERS)
        self.answer = hints.requires_grad_(True)

    def parameters(self) -> Iterator[Tensor]:
        yield from (self.stop, self.position, self.answer)

    def table(self) -> Tensor:
        """All log-probs in one row [limit * 5 + 11 * 10]; samples hold indices into it."""
        thinking = torch.log_softmax(self.stop + self.position, -1)
        return torch.cat([thinking.flatten(), torch.log_softmax(self.answer, -1).flatten()])


@dataclass(frozen=True)
class Rollout:
    """[n] sequences in prompt order. ``tokens`` holds table indices, [n, limit + 1]; ``mask`` where they count."""

    tokens: Tensor
    mask: Tensor
    lengths: Tensor  # [n] counted tokens
    correct: Tensor  # [n] bool
    truncated: Tensor  # [n] bool

    def pack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(table indices of the counted tokens [T], cu_seqlens) of some sequences."""
        lengths = self.lengths[rows]
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return self.tokens[rows][self.mask[rows]], cu_seqlens


@torch.no_grad()
def sample(policy: TabularPolicy, task: Task, prompts: int, group_size: int, generator: torch.Generator) -> Rollout:
    """``group_size`` responses to each of ``prompts`` new prompts, group after group."""
    n, limit = prompts * group_size, policy.limit
    luck = torch.rand(n, limit + 2, generator=generator, dtype=torch.float64)
    answers = torch.randint(ANSWERS, (prompts,), generator=generator).repeat_interleave(group_size)
    low, high = STEPS_NEEDED
    needed = torch.randint(low, high + 1, (prompts,), generator=generator).repeat_interleave(group_size)

    thinking = torch.softmax(policy.stop + policy.position, -1)
    tokens = _draw(thinking, luck[:, :limit])  # [n, limit]
    tokens[:, -1] = STOP
    positions = torch.arange(limit)
    first_stop = (tokens == STOP).int().argmax(1)
    truncated = first_stop == limit - 1
    mask = (positions <= first_stop[:, None]) & ~(truncated[:, None] & (positions == limit - 1))

    if task == "neutral":
        revealed = luck[:, limit] < REVEALED
    else:
        revealed = ((tokens == STEP) & (positions < first_stop[:, None])).sum(1) >= needed
    hints = torch.where(revealed, answers, NO_HINT)
    given = _draw(torch.softmax(policy.answer, -1)[hints], luck[:, limit + 1])
    indices = torch.cat([positions * THINKING + tokens, (limit * THINKING + hints * ANSWERS + given)[:, None]], 1)
    mask = torch.cat([mask, torch.ones(n, 1, dtype=torch.bool)], 1)
    return Rollout(indices, mask, mask.sum(1), given == answers, truncated)


def _draw(probabilities: Tensor, luck: Tensor) -> Tensor:
    """Inverse of the distribution function: [..., K] probabilities and [...] uniform numbers -> choices [...]."""
    edges = probabilities.cumsum(-1)[..., :-1]
    return (luck[..., None] >= edges).sum(-1)


def start_accuracy() -> float:
    """Share of right answers at the start of the neutral task."""
    follow = math.exp(COPY_LOGIT) / (math.exp(COPY_LOGIT) + ANSWERS - 1)
    return REVEALED * follow + (1 - REVEALED) / ANSWERS
