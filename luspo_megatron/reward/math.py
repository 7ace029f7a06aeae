r"""Reward ``math``: 1 when the last ``\boxed{}`` of the response equals ``row["answer"]``, else 0.

Equality is math-verify's (``1/2`` = ``0.5`` = ``\frac12``). Three of its habits are kept out:
its time limits use SIGALRM, which works in the main thread only, so they are off and the pool bounds the time;
several boxes in one text parse as a set, so only the last box is passed on; a bare letter does not parse, so both sides
are boxed before parsing. Left out: answers outside a box count as no answer.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from luspo_megatron.config import RewardConfig
from luspo_megatron.errors import UserError
from luspo_megatron.reward.base import RewardInput

_BOX = re.compile(r"\\boxed\s*\{")
_SOLUTION_ANSWER = re.compile(r"^####\s*(.+?)\s*$", re.MULTILINE)

MAX_ANSWER_CHARACTERS = 2000
"""A longer box is no answer to anything, and costs the parser more than linear time."""


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` holds, braces balanced; None without a box or when the last one is unclosed."""
    openings = list(_BOX.finditer(text))
    if not openings:
        return None
    start = openings[-1].end()
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":  # an escaped brace is a set's, not a group's
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start:position]
        position += 1
    return None


def gold_answer(answer: Any) -> str:
    r"""The reference answer as text: itself, or the ``####`` line or last box of a worked solution."""
    text = str(answer).strip()
    lines = _SOLUTION_ANSWER.findall(text)
    if lines:
        return str(lines[-1])
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def answers_equal(gold: str, prediction: str) -> bool:
    """math-verify's equality of two bare answers; unbounded in time, so call it in a reward worker."""
    parse, verify = _math_verify()
    parsed_gold = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
    parsed_prediction = parse(f"\\boxed{{{prediction}}}", parsing_timeout=None)
    if not parsed_gold or not parsed_prediction:
        return False
    return bool(verify(parsed_gold, parsed_prediction, timeout_seconds=None))


class MathReward:
    """See the module."""

    def __init__(self, config: RewardConfig) -> None:
        _math_verify()  # a missing package is found at the start, not as zeros later

    def score(self, item: RewardInput) -> float:
        prediction = last_boxed(item.response_text)
        if prediction is None or not prediction.strip() or len(prediction) > MAX_ANSWER_CHARACTERS:
            return 0.0
        if item.row.get("answer") is None:
            raise ValueError("the row has no answer")
        gold = gold_answer(item.row["answer"])
        if prediction.strip() == gold:
            return 1.0
        return float(answers_equal(gold, prediction.strip()))


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify
    except ImportError:
        mend = "pip install 'math-verify[antlr4_13_2]'"
        raise UserError(f"reward.terms: math needs the package math-verify; {mend}") from None
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns once per process that its limits are off
    return parse, verify
