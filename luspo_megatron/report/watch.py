"""Warnings about runs that go wrong in silence: rewards that never differ, answers all cut off, a collapsing length.

A reward that is always 0 (a wrong column, an answer pattern that matches nothing) leaves no error and no gradient, so
someone has to say it. Pure bookkeeping on the step metrics; thresholds are stated in each message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from luspo_megatron.report.length_change import WINDOW, describe, length_change

REPEAT_EVERY = 50


class MetricWatch:
    """``observe`` each training step's metrics; ``warn`` gets a message after ``patience`` bad steps in a row."""

    def __init__(self, warn: Callable[[str], None], patience: int = 3) -> None:
        self._warn = warn
        self._patience = patience
        self._streaks: dict[str, int] = {}
        self._first: list[Mapping[str, Any]] = []
        self._last: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """The steps before a resume, without warnings, so that the length is still compared with the run's start."""
        for row in rows:
            if row.get("response_length_mean") is not None:
                self._remember(row)

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        if len(self._first) < WINDOW:
            self._first.append(metrics)
        self._last.append(metrics)

    def observe(self, metrics: Mapping[str, Any]) -> None:
        """Metrics of one training step; a missing metric leaves its count as it is."""
        n = self._patience
        if self._lasts("no_signal", metrics, "zero_variance_fraction", lambda value: value >= 1):
            reward = metrics.get("reward_mean")
            self._warn(f"the rewards of every group were all equal for {n} steps or more (mean reward {reward}): "
                       "the policy gets no gradient. Check that the reward fits the data: reward.terms, "
                       "reward.answer_pattern, the answer column; `luspo doctor` grades the data set's own answers")
        if self._lasts("truncated", metrics, "truncated_fraction", lambda value: value > 0.9):
            self._warn(f"more than 90% of the responses were cut off for {n} steps or more: raise "
                       "rollout.max_response_tokens, or check that the model ends its answers with its eos token")
        if self._lasts("mismatch", metrics, "kl_rollout", lambda value: value > 0.1):
            self._warn(f"kl_rollout (engine against actor) was above 0.1 nats for {n} steps or more: "
                       "engine and actor do not run the same policy. Check model.dtype and weight_sync.verify")
        self._observe_length(metrics)

    def _observe_length(self, metrics: Mapping[str, Any]) -> None:
        if metrics.get("response_length_mean") is None:
            return
        self._remember(metrics)
        change = length_change(self._first, tuple(self._last))
        for kind in ("collapse", "explosion"):
            seen = {kind: float(change is not None and change.kind == kind)}
            if self._lasts(kind, seen, kind, lambda value: value > 0) and change is not None:
                self._warn(describe(change, self._first, tuple(self._last)))

    def _lasts(self, key: str, metrics: Mapping[str, Any], name: str, bad: Callable[[float], bool]) -> bool:
        """True at the ``patience``-th bad step in a row, and each REPEAT_EVERY steps after it."""
        value = metrics.get(name)
        if value is None:
            return False
        streak = self._streaks.get(key, 0) + 1 if bad(float(value)) else 0
        self._streaks[key] = streak
        return streak >= self._patience and (streak - self._patience) % REPEAT_EVERY == 0
