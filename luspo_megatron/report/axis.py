"""Axes of the report's charts: round ticks, their labels, linear and logarithmic scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DECADES = 6
HUGE, TINY = 1e100, 1e-100  # beyond these, values are drawn at the border: sums and powers must not overflow


@dataclass(frozen=True)
class Axis:
    """A scale from ``low``..``high`` (data) to ``start``..``end`` (pixels) with its ticks (data)."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float]
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value; values outside the range stick to the border."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def linear_axis(values: Sequence[float], start: float, end: float, *, from_zero: bool, count: int = 5) -> Axis:
    """Round ticks around all values; ``from_zero`` puts 0 on the axis."""
    low, high = (min(max(value, -HUGE), HUGE) for value in (min(values), max(values)))
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= max(1e-9 * max(abs(low), abs(high)), TINY):  # constant: room around it, or above where 0 is wanted
        pad = abs(high) * 0.5 if abs(high) > TINY else 1.0
        low, high = (low if from_zero and low == 0 else low - pad), high + pad
    step = nice_step((high - low) / count)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [index * step for index in range(first, last + 1)]
    return Axis(ticks[0], ticks[-1], start, end, ticks)


def log_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """Decades around all (positive) values, at most the highest MAX_DECADES: lower values stick to the border."""
    low, high = math.floor(math.log10(max(min(values), TINY))), math.ceil(math.log10(min(max(*values, TINY), HUGE)))
    high = max(high, low + 1)
    low = max(low, high - MAX_DECADES)
    return Axis(10.0**low, 10.0**high, start, end, [10.0**power for power in range(low, high + 1)], log=True)


def step_axis(first: float, last: float, start: float, end: float, count: int = 5) -> Axis:
    """The axis of steps: whole numbers only, and the data touches both ends."""
    step = max(1, round(nice_step((last - first) / count))) if last > first else 1
    ticks = [index * step for index in range(math.ceil(first / step), math.floor(last / step) + 1)]
    return Axis(first, last, start, end, ticks or [first])


def nice_step(raw: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least ``raw``."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def tick_labels(axis: Axis, percent: bool) -> list[str]:
    """Short labels with the same number of digits for all ticks of a linear axis."""
    if axis.log:
        return [_scientific(tick, 0) for tick in axis.ticks]
    scale = 100.0 if percent else 1.0
    ticks = [tick * scale for tick in axis.ticks]
    step = ticks[1] - ticks[0] if len(ticks) > 1 else abs(ticks[0]) or 1.0
    largest = max(abs(tick) for tick in ticks)
    suffix = "%" if percent else ""
    if largest >= 1e4 and not percent:
        unit, name = (1e6, "M") if largest >= 1e6 else (1e3, "k")
        digits = _digits(step / unit)
        return ["0" if not tick else f"{tick / unit:.{digits}f}{name}" for tick in ticks]
    if largest < 1e-2:
        digits = max(0, math.floor(math.log10(largest) + 1e-9) - math.floor(math.log10(step) + 1e-9))
        return [_scientific(tick, digits) + suffix for tick in ticks]
    return [f"{tick:.{_digits(step)}f}{suffix}".replace("-0" + suffix, "0" + suffix)
            if abs(tick) < step / 2 else f"{tick:.{_digits(step)}f}{suffix}" for tick in ticks]


def _digits(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def _scientific(value: float, digits: int) -> str:
    """2e-4, 1.5e-6, 0"""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"
