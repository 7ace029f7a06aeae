"""The figures of the length-bias study as PNG files, for documents; report.html draws its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from luspo_megatron.config_tools import LengthBiasConfig
from luspo_megatron.study.outcome import Outcome, outcomes

Row = Mapping[str, Any]
COLOURS = ("#0b62b8", "#c2570c", "#0b7a5b", "#8a3fa8", "#a8871c", "#7a828c", "#b3304a", "#3b8f1f")
BLOCK = 5  # neighbouring rollouts are averaged
DPI = 130


def write_figures(out: Path, config: LengthBiasConfig, rows: Sequence[Row]) -> list[Path]:
    """length.png, wide_clip.png (if run), accuracy.png, clip.png, gradient_norm.png; returns their paths."""
    found = outcomes(rows)
    usual = [item for item in found if item.clip == "usual"]
    sequence = [item for item in found if item.algorithm in ("luspo", "gspo")]
    length = ("response_length_mean", "mean response length, tokens")
    paths = [_lines(out / "length.png", usual, [("", *length)])]
    if len(found) > len(usual):
        paths.append(_lines(out / "wide_clip.png", sequence, [("", *length)]))
    paths.append(_lines(out / "accuracy.png", usual, [("", "pass_rate", "accuracy")]))
    paths.append(_lines(out / "clip.png", usual, [
        (f"advantage {symbol} 0, {half}er half", f"clip_fraction_{sign}_{half}", "clipped fraction")
        for sign, symbol in (("positive", ">"), ("negative", "<")) for half in ("short", "long")]))
    paths.append(_lines(out / "gradient_norm.png", usual, [("", "gradient_norm", "gradient norm before clipping")]))
    return paths


def _lines(path: Path, found: Sequence[Outcome], panels: Sequence[tuple[str, str, str]]) -> Path:
    """One panel per (title, metric, axis label): mean over seeds, band from the lowest to the highest seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 2 if len(panels) > 1 else 1
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 if columns == 1 else 10.0, 3.8 * lines if lines == 1 else 3.1 * lines), dpi=DPI,
                    layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False, sharey=len(panels) > 1, sharex=True).flatten()
    for axis, (title, metric, label) in zip(axes, panels, strict=True):
        for item, colour in zip(found, COLOURS, strict=False):
            steps, values = blocks(item.runs, metric)
            axis.plot(steps, values.mean(0), color=colour, label=item.label, linewidth=1.6)
            axis.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    for axis in axes[-columns:]:
        axis.set_xlabel("rollout")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 5), frameon=False, fontsize=9)
    figure.savefig(path)
    return path


def blocks(runs: Sequence[Row], metric: str) -> tuple[np.ndarray, np.ndarray]:
    """(middle steps [k], means [runs, k]) of blocks of BLOCK rollouts that have the metric; an incomplete one is left
    out unless it is the only one."""
    curves = [[value for value in run["curve"][metric] if value is not None] for run in runs]
    length = min(map(len, curves))
    size = min(BLOCK, length)
    count = length // size
    values = np.array([curve[:count * size] for curve in curves]).reshape(len(runs), count, size).mean(2)
    return np.arange(count) * size + (size - 1) / 2, values
