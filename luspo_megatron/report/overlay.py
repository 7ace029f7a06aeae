"""One metric of several runs in one chart: a line per run, or per group of runs with a band from lowest to highest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luspo_megatron.report.binning import Bin, Point, bins, number
from luspo_megatron.report.charts import MAX_BINS, framed
from luspo_megatron.report.metrics import METRICS, format_metric
from luspo_megatron.report.svg import Series, dash, line_chart

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Line:
    """A label and the rows (metrics with "step") of each run behind it."""

    label: str
    runs: Sequence[Sequence[Row]]


def overlay_figure(metric: str, lines: Sequence[Line], *, title: str = "", note: str = "", from_zero: bool = True,
                   may_log: bool = False, limit: int = MAX_BINS) -> str:
    """The metric of all lines over the same steps as a figure; "" when no run has it."""
    spec = METRICS[metric]
    title = title or spec.description
    # evaluations happen in few steps: only those are on their axis, so that neighbouring points are joined
    steps = sorted({row["step"] for line in lines for run in line.runs for row in run
                    if number(row.get(metric)) is not None})
    if not steps:
        return ""
    groups = bins([{"step": step} for step in steps], limit)
    # a line without the metric keeps its place, so that a run has one colour on the whole page
    series = [Series(line.label, _points(line, metric, groups), lambda value: format_metric(metric, value))
              for line in lines]
    drawing = line_chart(groups, series, title=title, percent=spec.unit == "fraction", from_zero=from_zero,
                         may_log=may_log)
    legend = [(item.label + ("" if any(item.points) else " (not recorded)"), dash(index, len(groups)))
              for index, item in enumerate(series)]
    if any(len(group.rows) > 1 for group in groups):
        note += f" Points are means of up to {len(groups[0].rows)} steps."
    return framed(title, "%" if spec.unit == "fraction" else spec.unit, legend, drawing, note)


def _points(line: Line, metric: str, groups: Sequence[Bin]) -> list[Point | None]:
    """Per bin: the mean over the runs of each run's mean, and the lowest and highest run."""
    where = {row["step"]: index for index, group in enumerate(groups) for row in group.rows}
    per_bin: list[list[float]] = [[] for _ in groups]
    for run in line.runs:
        sums: dict[int, list[float]] = {}
        for row in run:
            value = number(row.get(metric))
            if value is not None:
                sums.setdefault(where[row["step"]], []).append(value)
        for index, values in sums.items():
            per_bin[index].append(math.fsum(values) / len(values))
    return [Point(math.fsum(values) / len(values), min(values), max(values)) if values else None for values in per_bin]
