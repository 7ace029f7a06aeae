"""What has become of the response length, in words: collapse and explosion, and what in the metrics may explain them.

Compares the mean of a run's first steps with that of its last steps. The causes named are those that the metrics of
the same steps show; whether a change is wanted (a task may need longer or shorter responses) is left to the reader,
so the change of the pass rate is said beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from luspo_megatron.report.binning import number

WINDOW = 5
COLLAPSE = 0.6
EXPLOSION = 1.8
UNEVEN_WEIGHTS = 1.2
UNEVEN_CLIP = 0.05
CUT_OFF = 0.05
DIFFERENT = 0.05

Row = Mapping[str, Any]


@dataclass(frozen=True)
class LengthChange:
    """Mean response length (tokens) of the first and the last WINDOW steps."""

    start: float
    now: float
    kind: Literal["", "collapse", "explosion"]

    @property
    def text(self) -> str:
        """from 34.2 to 18.1 tokens (-47%)"""
        return f"from {self.start:.1f} to {self.now:.1f} tokens ({self.share})"

    @property
    def share(self) -> str:
        """-47%"""
        return f"{self.now / self.start - 1:+.0%}"


def length_change(first: Sequence[Row], last: Sequence[Row]) -> LengthChange | None:
    """``first`` and ``last`` are steps' metrics; None without a length in either, or with lengths of 0 at the start."""
    start, now = mean_of(first, "response_length_mean"), mean_of(last, "response_length_mean")
    if start is None or now is None or start <= 0:
        return None
    kind: Literal["", "collapse", "explosion"] = ""
    if now < COLLAPSE * start:
        kind = "collapse"
    elif now > EXPLOSION * start:
        kind = "explosion"
    return LengthChange(start, now, kind)


def change_over(training: Sequence[Row]) -> LengthChange | None:
    """From the first to the last WINDOW of a run's training steps."""
    return length_change(training[:WINDOW], training[-WINDOW:])


def story(training: Sequence[Row]) -> str:
    """`describe` of a whole run; "" for one too short to tell."""
    change = change_over(training) if len(training) >= 2 * WINDOW else None
    return describe(change, training[:WINDOW], training[-WINDOW:]) if change is not None else ""


def describe(change: LengthChange, first: Sequence[Row], last: Sequence[Row]) -> str:
    """The change and what the metrics say about it, as plain sentences."""
    opening = {"": "response length went ", "collapse": "length collapse: responses shrank ",
               "explosion": "length explosion: responses grew "}[change.kind]
    sentences = [f"{opening}{change.text}", _pass_rate(first, last), _reward(first, last),
                 _weights(last), _clip(last), _cut_off(last)]
    return ". ".join(sentence for sentence in sentences if sentence)


def mean_of(rows: Sequence[Row], metric: str) -> float | None:
    """Mean of a metric over the rows that have it."""
    values = [value for row in rows if (value := number(row.get(metric))) is not None]
    return math.fsum(values) / len(values) if values else None


def _pass_rate(first: Sequence[Row], last: Sequence[Row]) -> str:
    before, after = mean_of(first, "pass_rate"), mean_of(last, "pass_rate")
    if before is None or after is None:
        return ""
    return f"The pass rate in training went from {before:.1%} to {after:.1%}"


def _reward(first: Sequence[Row], last: Sequence[Row]) -> str:
    """Whether the reward itself had a wish: correct responses of another length than wrong ones."""
    rows = (*first, *last)
    correct, wrong = mean_of(rows, "response_length_correct"), mean_of(rows, "response_length_wrong")
    if correct is None or wrong is None or not wrong or abs(correct / wrong - 1) < DIFFERENT:
        return ""
    wish = "shorter" if correct < wrong else "longer"
    return (f"Correct responses are {wish} than wrong ones ({correct:.1f} against {wrong:.1f} tokens in these steps), "
            f"so the reward itself asks for {wish} ones")


def _weights(last: Sequence[Row]) -> str:
    short, long = mean_of(last, "token_weight_q1"), mean_of(last, "token_weight_q4")
    if short is None or long is None:
        return ""
    if long <= 0 or short / long > UNEVEN_WEIGHTS:
        times = "" if long <= 0 else f" ({short / long:.1f} times as much)"
        return (f"A token of the shortest quarter of the responses weighs more than one of the longest{times}: with an "
                "objective that divides by the response length (gspo, grpo) the objective does that, whatever the "
                "reward; with luspo only the clip can, where it takes more of the long ones")
    if short <= 0 or long / short > UNEVEN_WEIGHTS:
        return ("A token of the longest quarter of the responses weighs more than one of the shortest: the clip takes "
                "more of the short ones")
    return ""


def _clip(last: Sequence[Row]) -> str:
    kappa = mean_of(last, "drift_kappa")
    positive, negative = mean_of(last, "clip_fraction_positive"), mean_of(last, "clip_fraction_negative")
    if kappa is None or positive is None or negative is None or max(positive, negative) < 0.01:
        return ""
    text = f"The clip takes {positive:.1%} of the positive and {negative:.1%} of the negative advantages"
    spared = {half: _spared(last, half) for half in ("short", "long")}
    if spared["short"] is not None and spared["long"] is not None and spared["short"] > spared["long"] + UNEVEN_CLIP:
        text += ("; among the short responses it spares the wrong ones more, which shortens all with any objective: "
                 "bring algorithm.clip_low and clip_high closer together, or take fewer updates per rollout")
    return text


def _spared(last: Sequence[Row], half: str) -> float | None:
    """By how much more of the negative advantages the clip takes than of the positive ones, in a half by length."""
    negative = mean_of(last, f"clip_fraction_negative_{half}")
    positive = mean_of(last, f"clip_fraction_positive_{half}")
    return None if negative is None or positive is None else negative - positive


def _cut_off(last: Sequence[Row]) -> str:
    share = mean_of(last, "truncated_fraction")
    return f"{share:.1%} of the responses are cut off at the limit" if share is not None and share > CUT_OFF else ""
