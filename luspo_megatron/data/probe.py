"""Prompts without a data set, for `luspo parity`: random text in the model's own vocabulary, and a reward of nothing.

Used through the plugs (`module:attribute`), so that the controller needs to know nothing of parity.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from luspo_megatron.config import DataConfig
from luspo_megatron.data.tokenizer import TextTokenizer

SOURCE = f"{__name__}:random_prompts"
REWARD = f"{__name__}:no_reward:1.0"
LENGTH = 12  # tokens before they are written as text and read again


def random_prompts(config: DataConfig, tokenizer: TextTokenizer, split: str, seed: int) -> Iterator[Mapping[str, Any]]:
    """``config.size`` prompts; the same for the same seed."""
    vocabulary = len(tokenizer.hf)
    special = set(tokenizer.hf.all_special_ids) | set(tokenizer.eos_ids)
    ordinary = [token for token in range(min(vocabulary, 50_000)) if token not in special]
    draw = random.Random(seed)
    while True:
        length = draw.randint(2, LENGTH)
        text = tokenizer.decode([draw.choice(ordinary) for _ in range(length)])
        if text.strip() and tokenizer.encode(text):
            yield {"prompt": text, "answer": ""}


def no_reward(item: Any) -> float:
    return 0.0
