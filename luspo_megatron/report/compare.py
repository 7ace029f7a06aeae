"""Several runs side by side in one HTML file: outcome, settings that differ, and every metric in one chart each.

A run is a folder of `luspo train`, finished or not. Runs with the same label are drawn as one line, their mean, with a
band from the lowest to the highest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import yaml

from luspo_megatron.errors import UserError
from luspo_megatron.report.binning import number
from luspo_megatron.report.charts import CHARTS
from luspo_megatron.report.html import CONFIG_FILE
from luspo_megatron.report.length_change import WINDOW, change_over, story
from luspo_megatron.report.metrics import METRICS, METRICS_FILE
from luspo_megatron.report.overlay import Line, overlay_figure
from luspo_megatron.report.progress import WARNINGS_FILE
from luspo_megatron.report.records import read_lines, step_of, write_atomic
from luspo_megatron.report.shell import page, table
from luspo_megatron.report.summary import evaluations, rate, read_summary
from luspo_megatron.report.text import duration, visible

MAX_RUNS = 24
OVERVIEW = ("reward_mean", "pass_rate", "eval/pass_at_1", "response_length_mean", "response_length_correct",
            "response_length_wrong")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RunData:
    """What the comparison reads of a run folder."""

    folder: Path
    label: str
    rows: Sequence[Row]
    summary: Mapping[str, Any]
    settings: Mapping[str, Any]
    warnings: int

    @property
    def training(self) -> list[Row]:
        return [row for row in self.rows if number(row.get("response_length_mean")) is not None]


def read_run(folder: Path, label: str) -> RunData:
    """Raises UserError where the folder holds no run."""
    if not folder.is_dir():
        raise UserError(f"run folder {folder} does not exist; give folders that `luspo train` wrote (run.dir)")
    if not any((folder / name).exists() for name in (METRICS_FILE, CONFIG_FILE)):
        raise UserError(f"{folder} holds neither {METRICS_FILE} nor {CONFIG_FILE}: no run of `luspo train`")
    rows, _ = read_lines(folder / METRICS_FILE)
    rows = sorted((row for row in rows if step_of(row) is not None), key=lambda row: row["step"])
    warnings, _ = read_lines(folder / WARNINGS_FILE)
    return RunData(folder, label, rows, read_summary(folder), _settings(folder), len(warnings))


def read_runs(folders: Sequence[str | Path]) -> list[RunData]:
    """Labelled by folder name, or by as much of the path as tells them apart."""
    paths = [Path(folder) for folder in folders]
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("luspo report: a run folder is given twice; name each once")
    if len(paths) > MAX_RUNS:
        raise UserError(f"luspo report: {len(paths)} runs in one chart cannot be told apart; give at most {MAX_RUNS}")
    return [read_run(path, label) for path, label in zip(paths, _labels(paths), strict=True)]


def write_comparison(runs: Sequence[RunData], out: Path, **words: Any) -> Path:
    """Write the page to ``out``; ``words`` as in `render_comparison`."""
    return write_atomic(out, render_comparison(runs, **words).encode("utf-8", errors="replace"))


def render_comparison(runs: Sequence[RunData], *, title: str = "", intro: str = "", script: str = "") -> str:
    """The page as text. ``intro`` is HTML below the title."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    lines = [Line(visible(label, lines=False), [run.training for run in group]) for label, group in groups.items()]
    held_out = [Line(visible(label, lines=False), [run.rows for run in group]) for label, group in groups.items()]
    title = title or f"Comparison of {len(runs)} runs"
    several = any(len(group) > 1 for group in groups.values())
    note = ("Lines are means over the runs of a name, bands span the lowest to the highest run. " if several else "")
    charts, missing = _charts(lines, held_out)
    gone = f'<p class="note">Not recorded: {escape(", ".join(missing))}.</p>' if missing else ""
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="sub">{escape(_subtitle(runs))}</p>', intro, _overview(runs),
             _lengths(runs), f'<h2>Metrics</h2><p class="note">{note}Point at a chart to read its values.</p>'
             f'<div class="charts">{charts}</div>{gone}', _differences(runs)]
    return page(title, parts, script)


def _labels(paths: Sequence[Path]) -> list[str]:
    resolved = [path.resolve() for path in paths]
    for depth in range(1, 1 + max((len(path.parts) for path in resolved), default=1)):
        labels = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(labels)) == len(labels):
            return labels
    return [str(path) for path in resolved]


def _settings(folder: Path) -> dict[str, Any]:
    """config.yaml as {"section.name": value}; {} where it is missing or no mapping."""
    try:
        tree = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    flat: dict[str, Any] = {}
    for section, values in tree.items() if isinstance(tree, dict) else ():
        flat.update({f"{section}.{name}": value for name, value in values.items()} if isinstance(values, dict)
                    else {str(section): values})
    return flat


def _subtitle(runs: Sequence[RunData]) -> str:
    going = [run for run in runs if not run.summary]
    steps = [run.rows[-1]["step"] for run in runs if run.rows]
    text = f"{len(runs)} run{'s' * (len(runs) > 1)}, " + (f"up to step {max(steps)}" if steps else "no steps yet")
    return text + (f", {len(going)} without a summary (running, or ended by an error)" if going else ", all finished")


def _overview(runs: Sequence[RunData]) -> str:
    heads = ("run", "objective", "seed", "steps", "held-out pass rate before", "after", "length at start, tokens",
             "length at end", "change", "warnings", "time")
    rows = []
    for run in runs:
        rates = evaluations(run.folder)
        change = change_over(run.training)
        length = ("-", "-", "-") if change is None else (f"{change.start:.1f}", f"{change.now:.1f}", change.share)
        seed = run.settings.get("run.seed")
        rows.append((visible(_own_name(run, runs), lines=False),
                     visible(run.settings.get("algorithm.objective", "-"), lines=False),
                     "-" if seed is None else visible(seed), str(run.rows[-1]["step"]) if run.rows else "0",
                     _rate(rates, "before"), _rate(rates, "after"), *length, str(run.warnings),
                     duration(number(run.summary.get("seconds")))))
    return ("<h2>Outcome</h2>" + table(heads, rows, numbers_from=2) + f'<p class="note">Length: means of the first and '
            f"the last {WINDOW} steps. Pass rates: mean and standard error over the held-out prompts.</p>")


def _own_name(run: RunData, runs: Sequence[RunData]) -> str:
    return run.label if sum(other.label == run.label for other in runs) == 1 else run.folder.name


def _rate(rates: Mapping[str, float | None], when: str) -> str:
    value, error = number(rates.get(f"pass_rate_{when}")), number(rates.get(f"pass_rate_{when}_se"))
    if value is None:
        return "-"
    return rate(value) + (f" \u00b1 {error:.1%}" if error is not None else "")


def _lengths(runs: Sequence[RunData]) -> str:
    """What the length of each run did, in words; only of runs long enough to tell."""
    items = []
    for run in runs:
        if text := story(run.training):
            items.append(f"<li><b>{escape(visible(_own_name(run, runs), lines=False))}</b>: {escape(text)}.</li>")
    return f'<h2>Response length</h2><ul class="plain">{"".join(items)}</ul>' if items else ""


def _charts(lines: Sequence[Line], held_out: Sequence[Line]) -> tuple[str, list[str]]:
    """One chart per metric: the most telling first, then those of the run report."""
    looks = {metric: chart for chart in CHARTS for metric, _ in chart.lines}
    metrics = dict.fromkeys((*OVERVIEW, *looks, "seconds/step"))
    drawn, missing = [], []
    for metric in metrics:
        chart = looks.get(metric)
        html = overlay_figure(metric, held_out if metric.startswith("eval/") else lines,
                              from_zero=chart.from_zero if chart else True, may_log=bool(chart and chart.may_log))
        drawn.append(html)
        if not html:
            missing.append(METRICS[metric].description.lower())
    return "".join(drawn), missing


def _differences(runs: Sequence[RunData]) -> str:
    """Settings that are not the same in all runs, without the folders."""
    names = sorted({name for run in runs for name in run.settings} - {"run.dir"})
    rows = []
    for name in names:
        values = [visible(run.settings.get(name, "-"), lines=False) for run in runs]
        if len(set(values)) > 1:
            rows.append((name, *values))
    if not rows:
        return ""
    heads = ("setting", *(visible(_own_name(run, runs), lines=False) for run in runs))
    return "<h2>Settings that differ</h2>" + table(heads, rows, numbers_from=len(heads))
