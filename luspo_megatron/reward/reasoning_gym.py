"""Reward ``reasoning_gym``: the task's own scorer on the extracted answer.

The row is the task's entry (question, answer, metadata) plus ``task`` and, where the task was configured,
``task_args``. Scorers give partial credit to wrong answers (``-9`` for ``9`` gets 0.5), so a binary reward needs the
threshold 1. The answer is the last match of ``reward.answer_pattern``, or the whole text without a pattern.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from luspo_megatron.config import RewardConfig
from luspo_megatron.errors import UserError
from luspo_megatron.reward.base import RewardInput

_TUPLE_TASKS = {"arc_agi", "rearc"}
"""Tasks whose scorer compares with tuples of tuples, which JSON files hold as lists."""


def extract_answer(pattern: str, text: str) -> str | None:
    """The last match's first group (the whole match without a group); None without a match; "" takes all the text."""
    if not pattern:
        return text.strip()
    match = None
    for match in re.finditer(pattern, text):  # noqa: B007 (the last one is wanted)
        pass
    if match is None:
        return None
    return match.group(1) if match.re.groups else match.group(0)


class ReasoningGymReward:
    """See the module."""

    def __init__(self, config: RewardConfig) -> None:
        self.pattern = config.answer_pattern
        _package()

    def score(self, item: RewardInput) -> float:
        answer = extract_answer(self.pattern, item.response_text)
        if not answer:
            return 0.0  # some scorers pay a little for no answer at all
        task, arguments = _task_of(item.row)
        entry = {key: _tuples(value) for key, value in item.row.items()} if task in _TUPLE_TASKS else dict(item.row)
        return float(_scorer(task, arguments)(answer, entry))


def _task_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """Task name and its arguments as JSON. A composite task's rows name their own task in the metadata."""
    named = row.get("task")
    metadata = row.get("metadata")
    source = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
    task = source if named in (None, "composite") else named
    if not task:
        raise UserError("reward.terms: reasoning_gym needs rows with a column 'task' (or metadata.source_dataset)")
    arguments = row.get("task_args") if named == task else None
    return str(task), json.dumps(arguments or {}, sort_keys=True)


@lru_cache(maxsize=256)
def _scorer(task: str, arguments: str) -> Callable[[str, dict[str, Any]], float]:
    dataset = _package().create_dataset(task, **json.loads(arguments))
    scorer: Callable[[str, dict[str, Any]], float] = dataset.score_answer
    return scorer


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _tuples(inner) for key, inner in value.items()}
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list | tuple) else value


@lru_cache(maxsize=1)
def _package() -> Any:
    try:
        import reasoning_gym
    except ImportError:
        raise UserError("reward.terms: reasoning_gym needs its package; pip install reasoning-gym") from None
    return reasoning_gym
