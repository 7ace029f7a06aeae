r"""Rewards that look at the form of a response only: ``format`` and ``overlong`` (arXiv 2602.05261, section 4).

``format``: 0.5 for ``<think>...</think> <answer>... \boxed{...} ...</answer>``, begun and ended so, each tag once;
else 0. Chat templates that open ``<think>`` in the prompt are heard: the tag then counts as the response's.
``overlong``: min(0, ((L_max - L_buf) - length) / L_buf * factor), lengths in tokens: 0 up to L_max - L_buf, then
falling linearly to -factor at L_max.
"""

from __future__ import annotations

from luspo_megatron.config import RewardConfig
from luspo_megatron.reward.base import RewardInput
from luspo_megatron.reward.math import last_boxed

FORMAT_REWARD = 0.5
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def follows_format(text: str) -> bool:
    """True for exactly one think block, then exactly one answer block that holds a closed box, nothing around them."""
    text = text.strip()
    if any(text.count(tag) != 1 for tag in _TAGS) or not text.startswith("<think>") or not text.endswith("</answer>"):
        return False
    between, _, body = text.partition("</think>")[2].partition("<answer>")
    return not between.strip() and last_boxed(body) is not None


class FormatReward:
    """See the module."""

    def __init__(self, config: RewardConfig) -> None:
        del config

    def score(self, item: RewardInput) -> float:
        opened = "<think>" if item.prompt_text.rstrip().endswith("<think>") else ""
        return FORMAT_REWARD if follows_format(opened + item.response_text) else 0.0


class OverlongReward:
    """See the module."""

    def __init__(self, config: RewardConfig) -> None:
        self.buffer = config.overlong_buffer
        self.factor = config.overlong_factor

    def score(self, item: RewardInput) -> float:
        allowed = item.max_response_tokens - self.buffer
        return min(0.0, (allowed - item.response_length) / self.buffer * self.factor)
