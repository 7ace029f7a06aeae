"""Rows of metrics gathered into at most N bins, so that charts of 10,000 steps stay small and tell no lies.

Each bin holds neighbouring rows; a point is their mean, with the lowest and highest value beside it, so that a spike
in one step stays visible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Bin:
    """Neighbouring rows, by step."""

    rows: Sequence[Row]

    @property
    def first(self) -> int:
        return int(self.rows[0]["step"])

    @property
    def last(self) -> int:
        return int(self.rows[-1]["step"])

    @property
    def x(self) -> float:
        return (self.first + self.last) / 2

    @property
    def label(self) -> str:
        if len(self.rows) == 1:
            return f"step {self.first}"
        return f"steps {self.first} to {self.last}, mean of {len(self.rows)}"


@dataclass(frozen=True)
class Point:
    """Mean, lowest and highest value of a metric in a bin. ``error`` is half the length of an error bar, if any."""

    mean: float
    low: float
    high: float
    error: float | None = None


def bins(rows: Sequence[Row], limit: int) -> list[Bin]:
    """At most ``limit`` bins of (nearly) equal numbers of rows, every row in exactly one."""
    size = max(1, math.ceil(len(rows) / limit))
    return [Bin(rows[start:start + size]) for start in range(0, len(rows), size)]


def number(value: Any) -> float | None:
    """A finite number as float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def points(groups: Sequence[Bin], metric: str, error_metric: str | None = None,
           error_scale: float = 1.0) -> list[Point | None]:
    """A metric's point in each bin, None where no row of the bin has it.

    The error bar is ``error_scale`` times ``error_metric``, in bins of one row only: a mean of several rows has no
    error that could be read off theirs.
    """
    out: list[Point | None] = []
    for group in groups:
        values = [value for row in group.rows if (value := number(row.get(metric))) is not None]
        if not values:
            out.append(None)
            continue
        error = number(group.rows[0].get(error_metric)) if error_metric and len(group.rows) == 1 else None
        out.append(Point(math.fsum(values) / len(values), min(values), max(values),
                         None if error is None else error * error_scale))
    return out
