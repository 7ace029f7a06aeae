"""The parts of examples/smollm2 that need no model: its settings and its reward."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from luspo_megatron.config import Config, RewardConfig
from luspo_megatron.config_checks import validate
from luspo_megatron.config_io import load_config
from luspo_megatron.reward.base import RewardInput
from luspo_megatron.reward.reasoning_gym import extract_answer

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"


@pytest.fixture(scope="module")
def settings() -> Config:
    return load_config(Config, ["--config", str(EXAMPLE / "smollm2.yaml")])


def test_the_settings_lack_only_the_model(settings: Config) -> None:
    assert [violation.flag for violation in validate(settings)] == ["--model.hf"]


@pytest.mark.parametrize(("response", "answer"), [
    ("The sum of 4 and 3 is 7.", "7"), ("4 - 9 = -5", "-5"), ("**7**", "7"), ("seven", None)])
def test_the_answer_is_the_last_number(response: str, answer: str | None, settings: Config) -> None:
    assert extract_answer(settings.reward.answer_pattern, response) == answer


@pytest.mark.parametrize(("response", "answer", "score"), [
    ("10 + 1,150 = 1,160 dollars.", "So it is <<10+1150=1160>>1160.\n#### 1,160", 1.0), ("It costs $18", "18", 1.0),
    ("18, no, 19", "18", 0.0), ("I do not know", "18", 0.0), ("2.50", "#### 2.5", 1.0), ("x = -3", "3", 0.0)])
def test_last_number(response: str, answer: Any, score: float) -> None:
    reward = runpy.run_path(str(EXAMPLE / "last_number.py"))["LastNumber"](RewardConfig())
    assert reward.score(RewardInput("", response, {"answer": answer})) == score
