"""Reward `last_number:LastNumber`: 1 when the last number of the response is the reference answer's, else 0.

A small model seldom puts its answer into a box, which the built-in `math` reward asks for. References may be worked
solutions that end in `#### 42`. Also an example of a reward of one's own: any class with this constructor and `score`.
"""

from __future__ import annotations

import re

from luspo_megatron.config import RewardConfig
from luspo_megatron.reward.base import RewardInput

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """The last number of a text, thousands separators allowed; None without one."""
    found = NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3})", "", text))
    return float(found[-1]) if found else None


class LastNumber:
    """See the module."""

    def __init__(self, config: RewardConfig) -> None:
        del config

    def score(self, item: RewardInput) -> float:
        given = last_number(item.response_text)
        return float(given is not None and given == last_number(str(item.row["answer"])))
