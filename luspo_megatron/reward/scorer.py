"""RewardScorer: the weighted sum of ``reward.terms``, and what counts as correct. Runs inside a reward worker."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from luspo_megatron.config import RewardConfig
from luspo_megatron.errors import UserError
from luspo_megatron.plugin import is_plugin_name, load_plugin
from luspo_megatron.reward.base import Reward, RewardInput, RewardResult
from luspo_megatron.reward.math import MathReward
from luspo_megatron.reward.reasoning_gym import ReasoningGymReward
from luspo_megatron.reward.shape import FormatReward, OverlongReward

BUILT_IN: dict[str, Callable[[RewardConfig], Reward]] = {
    "math": MathReward,
    "reasoning_gym": ReasoningGymReward,
    "format": FormatReward,
    "overlong": OverlongReward,
}


@dataclass(frozen=True)
class Term:
    """One entry of ``reward.terms``: a built-in name or ``module:attribute``, and its weight."""

    name: str
    weight: float


def parse_term(text: str) -> Term:
    """``name:weight`` or ``module:attribute:weight``. Raises UserError."""
    name, _, weight_text = text.strip().rpartition(":")
    try:
        weight = float(weight_text)
    except ValueError:
        weight = math.nan
    if not name or not math.isfinite(weight):
        raise UserError(f"reward.terms: {text!r} does not end in a weight; write it as {text.strip()}:1.0")
    if name not in BUILT_IN and not is_plugin_name(name):
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"reward.terms: no reward {name!r}; {hint}use {', '.join(BUILT_IN)} or module:attribute")
    return Term(name, weight)


def reward_violations(config: RewardConfig, max_response_tokens: int | None = None) -> list[str]:
    """Everything that is wrong with the reward settings, empty when they are sound. Imports no plug-in."""
    out: list[str] = []
    terms: list[Term] = []
    for text in config.terms:
        try:
            terms.append(parse_term(text))
        except UserError as error:
            out.append(str(error))
    names = [term.name for term in terms]
    if not config.terms:
        out.append("reward.terms is empty; give at least one, e.g. math:1.0")
    twice = sorted({name for name in names if names.count(name) > 1})
    out += [f"reward.terms: {name!r} is there twice; add up its weights" for name in twice]
    if config.correct_term and config.correct_term not in names:
        out.append(f"reward.correct_term={config.correct_term!r} is not among the terms {names}; name one of them")
    if "overlong" in names:
        if config.overlong_buffer < 1:
            out.append("reward.overlong_buffer must be at least 1 token for the term overlong (the paper takes 4096)")
        elif max_response_tokens is not None and config.overlong_buffer > max_response_tokens:
            out.append(
                f"reward.overlong_buffer={config.overlong_buffer} is above rollout.max_response_tokens="
                f"{max_response_tokens}; every response would be punished: lower it"
            )
    try:
        re.compile(config.answer_pattern)
    except re.error as error:
        out.append(f"reward.answer_pattern={config.answer_pattern!r} is not a regular expression: {error}")
    if config.workers < 1:
        out.append(f"reward.workers={config.workers} must be at least 1")
    if config.timeout <= 0:
        out.append(f"reward.timeout={config.timeout} must be above 0 seconds")
    if config.memory_mb < 0:
        out.append(f"reward.memory_mb={config.memory_mb} must be 0 (none) or more")
    return out


class _Function:
    """A plain function as a Reward."""

    def __init__(self, function: Callable[[RewardInput], float]) -> None:
        self.score = function


def build_reward(name: str, config: RewardConfig) -> Reward:
    """The term's Reward. ``module:attribute``: a function, an object with ``score``, or a class taking the config."""
    if name in BUILT_IN:
        return BUILT_IN[name](config)
    plugin = load_plugin(name, "reward.terms")
    if isinstance(plugin, type):
        plugin = plugin(config)
    if callable(getattr(plugin, "score", None)):
        reward: Reward = plugin
        return reward
    if callable(plugin):
        return _Function(plugin)
    raise UserError(f"reward.terms: {name!r} is neither a function nor has a method score(item)")


class RewardScorer:
    """Grades one response at a time, in this process and thread, without a time limit.

    ``reward = sum(weight * value)`` in float64. With ``reward.binary`` the correct term's value becomes 1 or 0 first.
    An error in one term gives the whole sample 0: a partly graded response would teach the wrong thing.
    """

    def __init__(self, config: RewardConfig) -> None:
        violations = reward_violations(config)
        if violations:
            raise UserError("\n".join(violations))
        self.config = config
        self.terms = [parse_term(text) for text in config.terms]
        self.rewards = {term.name: build_reward(term.name, config) for term in self.terms}
        self.correct_term = config.correct_term or self.terms[0].name

    def score(self, item: RewardInput) -> RewardResult:
        """Never raises for a term's error (MemoryError apart: the process is then not to be trusted)."""
        parts: dict[str, float] = {}
        for term in self.terms:
            try:
                value = float(self.rewards[term.name].score(item))
            except MemoryError:
                raise
            except Exception as error:
                return self.failure(f"error in {term.name}: {type(error).__name__}: {str(error)[:300]}")
            if not math.isfinite(value):
                return self.failure(f"error in {term.name}: its value is {value}")
            parts[term.name] = value
        correct = parts[self.correct_term] >= self.config.correct_threshold
        if self.config.binary:
            parts[self.correct_term] = float(correct)
        return RewardResult(sum(term.weight * parts[term.name] for term in self.terms), parts, correct)

    def failure(self, reason: str) -> RewardResult:
        return failure(self.config, reason)


def failure(config: RewardConfig, reason: str) -> RewardResult:
    """The result of a sample that could not be graded: 0 in every term."""
    return RewardResult(0.0, {parse_term(text).name: 0.0 for text in config.terms}, False, reason)
