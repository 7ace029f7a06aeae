"""The end of a run: pass rate before and after, where everything is, how to go on. On screen and in summary.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from luspo_megatron.report.metrics import METRICS_FILE
from luspo_megatron.report.progress import Progress
from luspo_megatron.report.records import read_json, read_lines, step_of, write_json
from luspo_megatron.report.text import duration

SUMMARY_FILE = "summary.json"
Z95 = 1.959963984540054  # two-sided 95% quantile of the normal distribution


@dataclass(frozen=True)
class RunSummary:
    """What summary.json holds; None where a thing was not measured or not written. Rates are fractions.

    ``difference_se`` is the standard error of after minus before, where the caller knows it (same prompts: see
    ``paired_difference_se``); None: the two standard errors are taken as independent.
    """

    pass_rate_before: float | None = None
    pass_rate_before_se: float | None = None
    pass_rate_after: float | None = None
    pass_rate_after_se: float | None = None
    greedy_before: float | None = None
    greedy_after: float | None = None
    pass_at_k_before: float | None = None
    pass_at_k_after: float | None = None
    difference_se: float | None = None
    k: int | None = None
    seconds: float | None = None
    steps: int | None = None
    finished: bool = True
    layout: str = ""
    seed: int | None = None
    cold_start: str | None = None
    checkpoint: str | None = None
    export: str | None = None
    prompts: str | None = None
    report: str | None = None
    metrics: str | None = None
    resume_command: str | None = None
    warnings: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """After minus before with its 95% interval; fractions."""

    value: float
    low: float
    high: float


def difference(summary: RunSummary) -> Difference | None:
    """The change of the pass rate with its normal 95% interval; None where a rate or a standard error is missing."""
    before, after = summary.pass_rate_before, summary.pass_rate_after
    if before is None or after is None:
        return None
    error = summary.difference_se
    if error is None:
        if summary.pass_rate_before_se is None or summary.pass_rate_after_se is None:
            return None
        error = math.hypot(summary.pass_rate_before_se, summary.pass_rate_after_se)
    return Difference(after - before, after - before - Z95 * error, after - before + Z95 * error)


def paired_difference_se(before: Sequence[float], after: Sequence[float]) -> float:
    """Standard error of the mean change, from the same prompts' pass rates before and after (at least two)."""
    if len(before) != len(after) or len(before) < 2:
        raise ValueError(f"needs the same two or more prompts, got {len(before)} and {len(after)}")
    changes = [b - a for a, b in zip(before, after, strict=True)]
    mean = sum(changes) / len(changes)
    return math.sqrt(sum((change - mean) ** 2 for change in changes) / (len(changes) - 1) / len(changes))


def evaluations(run_dir: str | Path) -> dict[str, float | None]:
    """The summary's rates before and after, from the evaluations in metrics.jsonl (also those before a resume).

    Before is the first row with an evaluation, after the last one, None where there is only one.
    """
    rows, _ = read_lines(Path(run_dir) / METRICS_FILE)
    rows = [row for row in rows if step_of(row) is not None and row.get("eval/pass_at_1") is not None]
    names = {"pass_rate_{}": "eval/pass_at_1", "pass_rate_{}_se": "eval/pass_at_1_se", "greedy_{}": "eval/greedy",
             "pass_at_k_{}": "eval/pass_at_k"}
    before = rows[0] if rows else {}
    after = rows[-1] if len(rows) > 1 else {}
    return {key.format(when): row.get(name) for when, row in (("before", before), ("after", after))
            for key, name in names.items()}


def write_summary(run_dir: str | Path, summary: RunSummary) -> Path:
    """Write <run_dir>/summary.json atomically; returns its path."""
    change = difference(summary)
    record = {**asdict(summary), "difference": asdict(change) if change else None}
    return write_json(Path(run_dir) / SUMMARY_FILE, record)


def read_summary(run_dir: str | Path) -> dict[str, Any]:
    """summary.json as a dict, {} before the end of a run."""
    return read_json(Path(run_dir) / SUMMARY_FILE)


def rate(value: float | None, error: float | None = None) -> str:
    """A fraction as a percentage, with its standard error where there is one."""
    if value is None:
        return "not measured"
    return f"{value:.1%}" + (f" (standard error {error:.1%})" if error is not None else "")


def change_text(change: Difference) -> str:
    """+16.2 points (95% interval +14.3 to +18.1)"""
    return f"{100 * change.value:+.1f} points (95% interval {100 * change.low:+.1f} to {100 * change.high:+.1f})"


def summary_lines(summary: RunSummary) -> list[str]:
    """The final summary as plain lines, names in one column; what was not measured or written is left out."""
    k = summary.k or "k"
    rows: list[tuple[str, str]] = []
    if summary.pass_rate_before is not None or summary.pass_rate_after is not None:
        rows.append(("pass rate before", rate(summary.pass_rate_before, summary.pass_rate_before_se)))
        rows.append(("pass rate after", rate(summary.pass_rate_after, summary.pass_rate_after_se)))
        change = difference(summary)
        if change:
            rows.append(("change", change_text(change)))
    for name, before, after in ((f"pass@{k}", summary.pass_at_k_before, summary.pass_at_k_after),
                                ("greedy", summary.greedy_before, summary.greedy_after)):
        if before is not None or after is not None:
            rows.append((name, f"{rate(before)} -> {rate(after)}"))
    if summary.steps is not None:
        rows.append(("steps", f"{summary.steps}" + (f" in {duration(summary.seconds)}" if summary.seconds else "")))
    for name in ("layout", "seed", "prompts", "checkpoint", "export", "report", "metrics"):
        value = getattr(summary, name)
        if value not in (None, ""):
            rows.append((name, str(value)))
    if summary.resume_command:
        rows.append(("go on with", summary.resume_command))
    width = max((len(name) for name, _ in rows), default=0)
    title = "Run finished" if summary.finished else "Run stopped before its end; it can be continued"
    return [title, *(f"  {name:<{width}}  {value}" for name, value in rows)]


def print_summary(progress: Progress, summary: RunSummary) -> None:
    """Take the bars away and print the final summary, with the warnings of the run."""
    progress.close()
    warnings = {**summary.warnings, **progress.warnings}
    progress.message("")
    for line in summary_lines(summary):
        progress.message(line)
    if warnings:
        progress.message(f"  warnings ({sum(warnings.values())}):")
        for text, count in warnings.items():
            progress.message(f"    {text}" + (f" ({count} times)" if count > 1 else ""))
