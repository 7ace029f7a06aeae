"""The checks of prompts, rollout, reward and algorithm settings (see config_checks.py for the whole).

Names that may be ``module:attribute`` are checked for their form only: importing a person's module is the business of
the process that uses it.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from luspo_megatron.config import AlgorithmConfig, DataConfig, Objective, RewardConfig, RolloutConfig

ENGINES = ("hf", "vllm", "sglang")
REWARDS = ("math", "reasoning_gym", "format", "overlong")
SEQUENCE_OBJECTIVES = ("luspo", "gspo")
TOKEN_OBJECTIVES = ("grpo", "drgrpo", "dapo", "cispo")
LARGE_SEQUENCE_CLIP = 0.05  # a sequence ratio is a geometric mean over tokens: it hardly ever leaves 1 +- 0.05
SMALL_TOKEN_CLIP = 0.01


@dataclass(frozen=True)
class Violation:
    """One setting that cannot stay: the flag, its value, and what to do about it."""

    flag: str
    value: Any
    mend: str

    def __str__(self) -> str:
        shown = repr(self.value) if isinstance(self.value, str) else str(self.value)
        return f"{self.flag} {shown}: {self.mend}"


def at_least(flag: str, value: float, least: int) -> Iterator[Violation]:
    if not value >= least:  # also catches not-a-number
        yield Violation(flag, value, f"take at least {least}")


def is_reference(text: str) -> bool:
    """Whether ``text`` has the form module:attribute."""
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])


def check_prompts(data: DataConfig, name: str, required: bool) -> Iterator[Violation]:
    """``name`` is the field: prompts or eval_prompts."""
    flag, source = f"--data.{name}", getattr(data, name)
    size_name = "size" if name == "prompts" else "eval_size"
    forms = "a .jsonl or .parquet file, reasoning_gym:TASK or module:attribute"
    if not source:
        if required:
            yield Violation(flag, source, f"name {forms}")
    elif source.endswith((".jsonl", ".parquet")):
        if not Path(source).is_file():
            yield Violation(flag, source, "there is no such file; check the path")
    elif not is_reference(source):
        what = "has no known ending" if Path(source).exists() else "is not a prompt source"
        yield Violation(flag, source, f"{what}; name {forms}")
    if name == "prompts" or required:
        yield from json_object("--data.task_args", data.task_args, '{"max_terms": 4}')
        yield from json_object("--data.chat_template_args", data.chat_template_args, '{"enable_thinking": false}')
        yield from at_least("--data.max_prompt_tokens", data.max_prompt_tokens, 1)
    yield from at_least(f"--data.{size_name}", getattr(data, size_name), 0)


def json_object(flag: str, text: str, example: str) -> Iterator[Violation]:
    try:
        good = isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        good = False
    if not good:
        yield Violation(flag, text, f"give a JSON object, e.g. {example}")


def check_rollout(rollout: RolloutConfig) -> Iterator[Violation]:
    if rollout.engine not in ENGINES and not is_reference(rollout.engine):
        yield Violation("--rollout.engine", rollout.engine, f"take {', '.join(ENGINES)} or module:attribute")
    for url in rollout.urls:
        if not re.match(r"https?://[^/\s]+", url):
            yield Violation("--rollout.urls", url, "give URLs such as http://node1:8000")
    yield from _engine_flags(rollout)
    for name in ("prompts_per_step", "group_size", "max_response_tokens", "batch_size", "threads"):
        yield from at_least(f"--rollout.{name}", getattr(rollout, name), 1)
    if not rollout.urls:
        yield from at_least("--rollout.num_engines", rollout.num_engines, 1)
    engines = len(rollout.urls) or rollout.num_engines
    if not 1 <= rollout.min_engines <= engines:
        yield Violation("--rollout.min_engines", rollout.min_engines, f"there are {engines} engines; take 1 to "
                        f"{engines}")
    if rollout.hand_over == "on" and rollout.in_flight_updates:
        yield Violation("--rollout.in_flight_updates", True, "engines that sleep between rollouts have nothing in "
                        "flight; take --rollout.hand_over off for engines with GPUs of their own")
    yield from at_least("--rollout.restart_timeout", rollout.restart_timeout, 0)
    for name in ("max_retries", "max_extra_rounds"):
        yield from at_least(f"--rollout.{name}", getattr(rollout, name), 0)
    for name in ("request_timeout", "start_timeout"):
        if not getattr(rollout, name) > 0:
            yield Violation(f"--rollout.{name}", getattr(rollout, name), "take more than 0 seconds")
    if not (rollout.temperature > 0 and math.isfinite(rollout.temperature)):
        mend = "take a number above 0 (usually 1); a greedy rollout has no group to learn from"
        yield Violation("--rollout.temperature", rollout.temperature, mend)
    if not 0 < rollout.top_p <= 1:
        yield Violation("--rollout.top_p", rollout.top_p, "take more than 0 and at most 1")


def _engine_flags(rollout: RolloutConfig) -> Iterator[Violation]:
    real = rollout.engine != "hf"
    for name in ("engine_args", "engine_python", "in_flight_updates", "routed_experts"):
        value = getattr(rollout, name)
        if value and not real:
            yield Violation(f"--rollout.{name}", value, "the embedded engine (hf) has none; take vllm or sglang")
    for words in rollout.engine_args:
        try:
            shlex.split(words)
        except ValueError as error:
            yield Violation("--rollout.engine_args", words, f"cannot be split into flags: {error}")
    if rollout.engine_python and real and shutil.which(rollout.engine_python) is None:
        yield Violation("--rollout.engine_python", rollout.engine_python, "there is no such program; check the path")
    for pair in rollout.engine_env:
        if not re.match(r"[A-Za-z_]\w*=", pair):
            yield Violation("--rollout.engine_env", pair, "write NAME=value")


def check_reward(reward: RewardConfig, rollout: RolloutConfig) -> Iterator[Violation]:
    names = []
    if not reward.terms:
        yield Violation("--reward.terms", "", "name at least one, e.g. math:1.0")
    for term in reward.terms:
        name, _, weight = term.rpartition(":")
        names.append(name)
        if not _is_finite(weight):
            yield Violation("--reward.terms", term, "write name:weight, e.g. math:1.0")
        elif name not in REWARDS and not is_reference(name):
            yield Violation("--reward.terms", term, f"take {', '.join(REWARDS)} or module:attribute, then :weight")
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Violation("--reward.terms", name, "is named twice; add the weights up")
    if reward.correct_term and reward.correct_term not in names:
        yield Violation("--reward.correct_term", reward.correct_term, f"take one of the terms: {', '.join(names)}")
    if "overlong" in names and not 0 < reward.overlong_buffer < rollout.max_response_tokens:
        mend = f"the overlong term needs more than 0 and less than max_response_tokens = {rollout.max_response_tokens}"
        yield Violation("--reward.overlong_buffer", reward.overlong_buffer, mend)
    yield from _answer_pattern(reward.answer_pattern)
    yield from at_least("--reward.workers", reward.workers, 1)
    yield from at_least("--reward.memory_mb", reward.memory_mb, 0)
    if not reward.timeout > 0:
        yield Violation("--reward.timeout", reward.timeout, "take more than 0 seconds")
    for name in ("overlong_factor", "correct_threshold"):
        if not math.isfinite(getattr(reward, name)):
            yield Violation(f"--reward.{name}", getattr(reward, name), "take a finite number")


def _answer_pattern(pattern: str) -> Iterator[Violation]:
    if not pattern:
        return
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        yield Violation("--reward.answer_pattern", pattern, f"is not a regular expression: {error}")
        return
    if groups < 1:
        yield Violation("--reward.answer_pattern", pattern, "put the answer into a group, e.g. answer: (.*)")


def check_algorithm(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[Violation]:
    known = get_args(Objective)
    if algorithm.objective not in known and not is_reference(algorithm.objective):
        yield Violation("--algorithm.objective", algorithm.objective, f"take {', '.join(known)} or module:attribute")
    if rollout.group_size == 1:
        mend = "group advantages compare the samples of one prompt; take at least 2"
        yield Violation("--rollout.group_size", rollout.group_size, mend)
    if not 0 < algorithm.clip_low <= 1:
        yield Violation("--algorithm.clip_low", algorithm.clip_low, "take more than 0 and at most 1")
    if not (algorithm.clip_high > 0 and math.isfinite(algorithm.clip_high)):
        yield Violation("--algorithm.clip_high", algorithm.clip_high, "take a number above 0")
    for name in ("kl_coef", "entropy_coef", "advantage_eps", "advantage_ddof"):
        yield from at_least(f"--algorithm.{name}", getattr(algorithm, name), 0)
    if algorithm.advantage_std and rollout.group_size >= 2 and algorithm.advantage_ddof >= rollout.group_size:
        mend = f"take less than rollout.group_size = {rollout.group_size}"
        yield Violation("--algorithm.advantage_ddof", algorithm.advantage_ddof, mend)
    yield from at_least("--algorithm.epochs", algorithm.epochs, 1)
    mini, step = algorithm.prompts_per_mini_batch, rollout.prompts_per_step
    yield from at_least("--algorithm.prompts_per_mini_batch", mini, 1)
    if mini >= 1 and step >= 1 and step % mini:
        mend = f"does not divide rollout.prompts_per_step = {step}; take a divisor of it"
        yield Violation("--algorithm.prompts_per_mini_batch", mini, mend)


def suspicious_clips(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Clip distances of the other kind of ratio than the objective's."""
    clips = f"clip_low {algorithm.clip_low:g}, clip_high {algorithm.clip_high:g}"
    largest = max(algorithm.clip_low, algorithm.clip_high)
    if algorithm.objective in SEQUENCE_OBJECTIVES and largest >= LARGE_SEQUENCE_CLIP:
        yield f"{clips}: {algorithm.objective} clips a sequence ratio, which hardly ever gets that far; 2e-3 is usual"
    elif algorithm.objective in TOKEN_OBJECTIVES and largest <= SMALL_TOKEN_CLIP:
        yield f"{clips}: {algorithm.objective} clips token ratios, most of which are farther from 1; 0.2 is usual"


def _is_finite(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
