"""The table of steps: which columns fit a width, and its lines as text.

A row is printed when its step is over, so columns have fixed widths. Each has a priority; a narrow terminal gets the
columns of highest priority that fit, in the usual order. The widths count terminal cells; all texts here are ASCII.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from luspo_megatron.report.metrics import format_metric


@dataclass(frozen=True)
class Column:
    """``priority`` 0 is shown first; ``width`` is the room of a usual value, an unusual one pushes the rest."""

    metric: str
    title: str
    unit: str
    width: int
    priority: int


COLUMNS = (
    Column("step", "step", "", 5, 0),
    Column("reward_mean", "reward", "", 6, 0),
    Column("pass_rate", "pass", "", 6, 2),
    Column("response_length_mean", "length", "tokens", 6, 0),
    Column("response_length_p95", "p95", "tokens", 6, 0),
    Column("clip_fraction_positive", "clip+", "", 6, 0),
    Column("clip_fraction_negative", "clip-", "", 6, 0),
    Column("kl_rollout", "KL", "nats", 8, 0),
    Column("entropy", "entropy", "nats", 7, 1),
    Column("gradient_norm", "grad", "norm", 7, 0),
    Column("seconds/rollout", "rollout", "s", 7, 5),
    Column("seconds/reward", "score", "s", 6, 7),
    Column("seconds/old_logprobs", "old lp", "s", 6, 7),
    Column("seconds/train", "train", "s", 7, 5),
    Column("seconds/sync", "sync", "s", 6, 6),
    Column("seconds/eval", "eval", "s", 7, 8),
    Column("seconds/save", "save", "s", 6, 8),
    Column("seconds/step", "total", "s", 7, 1),
    Column("tokens_per_second", "speed", "tok/s", 7, 3),
)
GAP = 1


def fitting_columns(width: int) -> list[Column]:
    """The columns for a terminal of ``width`` cells, in table order: taken by priority while they fit.

    Columns of one priority are taken left to right, and the first that does not fit ends the choice, so that a wider
    terminal never loses a column.
    """
    room = width + GAP
    chosen: list[Column] = []
    for column in sorted(COLUMNS, key=lambda column: column.priority):
        room -= column.width + GAP
        if room < 0:
            break
        chosen.append(column)
    return sorted(chosen or [COLUMNS[0]], key=COLUMNS.index)


def header_lines(columns: Sequence[Column]) -> list[str]:
    """Titles, and under them the units."""
    return [_line(columns, [column.title for column in columns]), _line(columns, [column.unit for column in columns])]


def row_line(columns: Sequence[Column], metrics: Mapping[str, Any]) -> str:
    """One step as a line; "-" where a metric is missing."""
    cells = []
    for column in columns:
        value = metrics.get(column.metric)
        cells.append(str(value) if column.metric == "step" and value is not None else
                     _fit(format_metric(column.metric, value), value, column.width))
    return _line(columns, cells)


def _fit(text: str, value: Any, width: int) -> str:
    """A number too wide for its column in fewer digits, so that an outlier does not break the table."""
    if len(text) <= width:
        return text
    short = f"{float(value):.3g}"
    return short if len(short) <= width else f"{float(value):.0e}"


def _line(columns: Sequence[Column], cells: Sequence[str]) -> str:
    gap = " " * GAP
    return gap.join(cell.rjust(column.width) for column, cell in zip(columns, cells, strict=True)).rstrip()
