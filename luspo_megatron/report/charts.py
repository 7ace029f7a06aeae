"""The charts of report.html as one table, and each of them as an HTML figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from luspo_megatron.report.binning import bins, number, points
from luspo_megatron.report.metrics import METRICS, PHASES, format_metric
from luspo_megatron.report.summary import Z95
from luspo_megatron.report.svg import Series, dash, line_chart, stacked_bars, swatch

MAX_BINS = 200
MAX_BARS = 80
STACKED_PHASES = ("rollout", "reward", "old_logprobs", "train", "sync")
OTHER = "other"
_PHASE_TITLES = {"old_logprobs": "old log-probs", "sync": "weight sync", "save": "checkpoint", "eval": "evaluation"}

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Chart:
    """``lines``: (metric, label) pairs. ``errors``: metric -> metric of its standard error."""

    title: str
    lines: tuple[tuple[str, str], ...]
    note: str = ""
    from_zero: bool = True
    may_log: bool = False
    errors: Mapping[str, str] | None = None


CHARTS = (
    Chart("Reward", (("reward_mean", "mean reward"),), "Mean over the step's samples, as sampled for training.",
          from_zero=False),
    Chart("Pass rate in training", (("pass_rate", "correct samples"),), "The prompts differ from step to step."),
    Chart("Held-out evaluation",
          (("eval/pass_at_1", "pass@1"), ("eval/pass_at_k", "pass@k"), ("eval/greedy", "greedy")),
          "Bars at pass@1: 95% interval. Evaluations between the first and the last may use fewer prompts.",
          errors={"eval/pass_at_1": "eval/pass_at_1_se"}),
    Chart("Response length", (("response_length_mean", "mean"), ("response_length_p05", "5th percentile"),
                              ("response_length_p50", "median"), ("response_length_p95", "95th percentile"),
                              ("eval/response_length_mean", "held-out mean"))),
    Chart("Response length by outcome", (("response_length_correct", "correct"), ("response_length_wrong", "wrong"))),
    Chart("Clip fraction by sign of the advantage",
          (("clip_fraction_positive", "advantage > 0"), ("clip_fraction_negative", "advantage < 0"))),
    Chart("Clip fraction by length",
          (("clip_fraction_short", "shorter half"), ("clip_fraction_long", "longer half"))),
    Chart("Clip fraction by sign and length",
          (("clip_fraction_positive_short", "A > 0, shorter half"),
           ("clip_fraction_positive_long", "A > 0, longer half"),
           ("clip_fraction_negative_short", "A < 0, shorter half"),
           ("clip_fraction_negative_long", "A < 0, longer half")),
          "Short responses are clipped more: their sequence ratio moves more."),
    Chart("Effective weight per token by length",
          (("token_weight_q1", "shortest quarter"), ("token_weight_q2", "second"), ("token_weight_q3", "third"),
           ("token_weight_q4", "longest quarter")),
          "Of responses with a gradient; clipped ones weigh 0. All lines near 1: no length bias."),
    Chart("Advantage left over by the clip", (("drift_kappa", "kappa"),),
          "Above 0, an objective that gives short responses more weight per token shortens all responses.",
          from_zero=True),
    Chart("Push on the length", (("length_drift", "slope in the stop logit"),),
          "Above 0: responses shrink. Noisy in single steps; its mean over many tells.", from_zero=True),
    Chart("Samples without use",
          (("truncated_fraction", "truncated samples"), ("zero_variance_fraction", "groups with equal rewards"))),
    Chart("Entropy", (("entropy", "policy"),), from_zero=False),
    Chart("KL", (("kl_rollout", "engine to actor"), ("kl_ref", "actor to reference")), may_log=True),
    Chart("Largest log-prob difference", (("logprob_max_diff", "engine against actor"),), may_log=True),
    Chart("Gradient norm", (("gradient_norm", "before clipping"),), may_log=True),
    Chart("Busiest expert", (("expert_load_max", "of all layers"),),
          "1: every expert gets as many tokens as the others; the number of experts over top-k: all tokens go to few."),
    Chart("Idle experts", (("expert_idle_fraction", "without any token"),)),
    Chart("Loss", (("loss", "objective"),), "Its value says little in policy gradients; a jump says something.",
          from_zero=False),
    Chart("Learning rate", (("lr", "last update of the step"),)),
    Chart("Throughput", (("tokens_per_second", "prompt and response tokens"),)),
)


def figure(chart: Chart, rows: Sequence[Row], steps: tuple[int, int]) -> str:
    """The chart of a run's rows as a figure; "" when no row has any of its metrics.

    Charts of evaluations take only the rows that have one, so that their points are joined.
    """
    names = [name for name, _ in chart.lines]
    if all(name.startswith("eval/") for name in names):
        rows = [row for row in rows if any(number(row.get(name)) is not None for name in names)]
    groups = bins(rows, MAX_BINS)
    series = []
    for name, label in chart.lines:
        error = (chart.errors or {}).get(name)
        line = points(groups, name, error, Z95)
        if any(line):
            series.append(Series(label, line, lambda value, name=name: format_metric(name, value)))  # type: ignore[misc]
    if not series:
        return ""
    unit = METRICS[names[0]].unit
    drawing = line_chart(groups, series, title=chart.title, percent=unit == "fraction", from_zero=chart.from_zero,
                         may_log=chart.may_log, range_of_steps=steps)
    note = chart.note
    if any(len(group.rows) > 1 for group in groups):
        note += f" Points are means of up to {len(groups[0].rows)} steps; the band spans lowest to highest."
    legend = [(item.label, dash(index, len(groups))) for index, item in enumerate(series)]
    return framed(chart.title, "%" if unit == "fraction" else unit, legend, drawing, note)


def timing_figure(rows: Sequence[Row], steps: tuple[int, int]) -> str:
    """Seconds per step as stacked bars, without evaluation and checkpoint (which happen seldom); "" without timings."""
    rows = [with_other(row) for row in rows if any(number(row.get(f"seconds/{name}")) for name in STACKED_PHASES)]
    if not rows:
        return ""
    groups = bins(rows, MAX_BARS)
    series = []
    for name in (*STACKED_PHASES, OTHER):
        line = points(groups, f"seconds/{name}")
        if any(line):
            series.append(Series(phase_title(name), line, lambda value: f"{value:.2f} s"))
    drawing = stacked_bars(groups, series, title="Seconds per step", range_of_steps=steps)
    note = "Evaluation and checkpoints are in the table of total times."
    if any(len(group.rows) > 1 for group in groups):
        note += f" Bars are means of up to {len(groups[0].rows)} steps."
    return framed("Seconds per step", "s", [(item.label, None) for item in series], drawing, note)


def with_other(row: Row) -> dict[str, Any]:
    """The row with seconds/other: the step's seconds that no phase accounts for."""
    whole = number(row.get("seconds/step"))
    if whole is None:
        return dict(row)
    known = math.fsum(number(row.get(f"seconds/{name}")) or 0.0 for name in PHASES)
    return {**row, f"seconds/{OTHER}": max(0.0, whole - known)}


def phase_title(name: str) -> str:
    """rollout -> rollout, old_logprobs -> old log-probs"""
    return _PHASE_TITLES.get(name, name)


def framed(title: str, unit: str, legend: Sequence[tuple[str, str | None]], drawing: str, note: str) -> str:
    """A drawing with its caption. ``legend``: (label, dash pattern of its line or None for a box) of each series."""
    items = "".join(f"<li>{swatch(index, line)}{escape(label)}</li>" for index, (label, line) in enumerate(legend))
    unit_text = f' <span class="unit">{escape(unit)}</span>' if unit else ""
    note_text = f'<p class="note">{escape(note.strip())}</p>' if note.strip() else ""
    return (f'<figure><figcaption><h3>{escape(title)}{unit_text}</h3><ul class="legend">{items}</ul></figcaption>'
            f"{drawing}{note_text}</figure>")
