"""The reward plug: one method, plain data in, a float out.

A reward sees text, never token ids, and the data set's own row. It may be slow or crash: it runs in a worker process
(pool.py) under a time limit. Everything here pickles and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class RewardInput:
    """One response to grade. Lengths are in tokens and count the eos token where there is one."""

    prompt_text: str
    response_text: str
    row: Mapping[str, Any] = field(default_factory=dict)
    response_length: int = 0
    truncated: bool = False
    max_response_tokens: int = 0


@dataclass(frozen=True)
class RewardResult:
    """The weighted sum, each term's value before its weight, and whether the answer counts as correct.

    ``failed`` is None, or why the sample got 0: its first word is the kind (timeout, died, memory, error).
    """

    reward: float
    parts: dict[str, float]
    correct: bool
    failed: str | None = None


class Reward(Protocol):
    """One term. ``module:attribute`` may also name a plain function with the signature of ``score``."""

    def score(self, item: RewardInput) -> float:
        """The value of one response; must be finite."""
        ...
