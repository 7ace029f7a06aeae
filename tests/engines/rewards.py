"""A reward that depends on the policy, and remembers what it was asked about."""

from __future__ import annotations

import os

from luspo_megatron.reward.base import RewardInput

SHORT = 6


def short(item: RewardInput) -> float:
    """1 for a response of few tokens. Each call adds its prompt to the file GRADED, one line in one write."""
    line = f"{item.prompt_text}\n".encode()
    file = os.open(os.environ["GRADED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line)
    os.close(file)
    return float(item.response_length <= SHORT)
