"""report.html: one file that shows a whole run, without scripts and without anything loaded from elsewhere.

Reads what the run folder holds (metrics.jsonl, samples.jsonl, warnings.jsonl, summary.json, config.yaml,
environment.json); every part may be missing, so that a run can be looked at while it goes on.

    python -m luspo_megatron.report.html RUN_DIR
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from luspo_megatron.errors import UserError
from luspo_megatron.report.binning import number
from luspo_megatron.report.charts import CHARTS, OTHER, figure, phase_title, timing_figure, with_other
from luspo_megatron.report.environment import read_environment
from luspo_megatron.report.length_change import WINDOW, story
from luspo_megatron.report.metrics import METRICS, METRICS_FILE, PHASES, SAMPLES_FILE, format_metric
from luspo_megatron.report.progress import WARNINGS_FILE
from luspo_megatron.report.records import read_lines, step_of, write_atomic
from luspo_megatron.report.shell import page, tile
from luspo_megatron.report.summary import RunSummary, difference, evaluations, read_summary
from luspo_megatron.report.text import duration, shorten, visible

REPORT_FILE = "report.html"
CONFIG_FILE = "config.yaml"
SAMPLES_FIRST = 4
SAMPLES_LAST = 12
SAMPLE_CHARACTERS = 4000
WARNINGS_SHOWN = 30

Row = Mapping[str, Any]


def write_report(run_dir: str | Path, out: str | Path = "") -> Path:
    """Write ``out`` (empty: <run_dir>/report.html) and return its path. Raises UserError when the folder does not
    exist."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UserError(f"run folder {folder} does not exist; give the folder that the run wrote (run.dir)")
    return write_atomic(Path(out or folder / REPORT_FILE), render(folder).encode("utf-8", errors="replace"))


def render(folder: Path, script: str = "") -> str:
    """The page as text. ``script`` is the live view's."""
    rows, bad_lines = read_lines(folder / METRICS_FILE)
    rows = sorted((row for row in rows if step_of(row) is not None), key=lambda row: row["step"])
    summary = read_summary(folder)
    name = visible(folder.resolve().name, lines=False)
    parts = [
        f"<h1>{escape(name)}</h1>", _subtitle(rows, summary), _tiles(folder, rows, summary),
        _warnings(folder, bad_lines), _length(rows), _charts(rows), _times(rows), _samples(folder), _files(summary),
        _config(folder),
        _environment(folder), _glossary(rows),
    ]
    return page(f"{name}: run report", parts, script)


def _subtitle(rows: Sequence[Row], summary: Row) -> str:
    state = "no steps yet" if not rows else f"up to step {rows[-1]['step']}"
    if summary:
        state += ", finished" if summary.get("finished", True) else ", stopped before its end"
    else:
        state += ", no summary yet (running, or ended by an error)"
    return f'<p class="sub">LUSPO run report, {escape(state)}</p>'


def _tiles(folder: Path, rows: Sequence[Row], summary: Row) -> str:
    # Before the end of a run the rates come from its evaluations so far.
    rates: dict[str, Any] = evaluations(folder)
    rates.update((key, value) for key, value in summary.items() if value is not None)
    known = RunSummary(
        pass_rate_before=number(rates.get("pass_rate_before")), pass_rate_after=number(rates.get("pass_rate_after")),
        pass_rate_before_se=number(rates.get("pass_rate_before_se")),
        pass_rate_after_se=number(rates.get("pass_rate_after_se")), difference_se=number(rates.get("difference_se")),
        greedy_before=number(rates.get("greedy_before")), greedy_after=number(rates.get("greedy_after")),
        pass_at_k_before=number(rates.get("pass_at_k_before")), pass_at_k_after=number(rates.get("pass_at_k_after")))
    tiles: list[str] = []
    if known.pass_rate_before is not None:
        tiles.append(_tile("Held-out pass rate before", _percent(known.pass_rate_before),
                           _error(known.pass_rate_before_se)))
    if known.pass_rate_after is not None:
        tiles.append(_tile("Held-out pass rate after", _percent(known.pass_rate_after),
                           _error(known.pass_rate_after_se)))
    change = difference(known)
    if change:
        kind = "good" if change.low > 0 else "bad" if change.high < 0 else ""
        tiles.append(_tile("Change, points", f"{100 * change.value:+.1f}",
                           f"95% interval {100 * change.low:+.1f} to {100 * change.high:+.1f}", kind))
    for title, before, after in ((f"pass@{rates.get('k') or 'k'}", known.pass_at_k_before, known.pass_at_k_after),
                                 ("Greedy", known.greedy_before, known.greedy_after)):
        if after is not None:
            tiles.append(_tile(title, _percent(after), f"before: {_percent(before)}"))
        elif before is not None:
            tiles.append(_tile(f"{title} before", _percent(before)))
    seconds = number(summary.get("seconds"))
    if seconds is not None:
        steps = summary.get("steps")
        small = "" if steps is None else visible(f"{steps} step" if steps == 1 else f"{steps} steps")
        tiles.append(_tile("Time", duration(seconds), small))
    if summary.get("layout"):
        seed = summary.get("seed")
        layout = str(summary["layout"]).replace("x", " x ")
        tiles.append(_tile("Layout", layout, "" if seed is None else visible(f"seed {seed}")))
    return f'<dl class="tiles">{"".join(tiles)}</dl>' if tiles else ""


def _tile(title: str, value: str, small: str = "", kind: str = "") -> str:
    return tile(title, visible(value), small, kind)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _error(value: float | None) -> str:
    return "" if value is None else f"standard error {value:.1%}"


def _warnings(folder: Path, bad_lines: int) -> str:
    records, _ = read_lines(folder / WARNINGS_FILE)
    counts: dict[str, list[Any]] = {}
    for record in records:
        counts.setdefault(str(record.get("text", "")), []).append(record.get("step"))
    items = []
    for text, steps in list(counts.items())[:WARNINGS_SHOWN]:
        known = [step for step in steps if isinstance(step, int)]
        when = "" if not known else f"step {known[0]}" if known[0] == known[-1] else f"steps {known[0]} to {known[-1]}"
        times = f"{len(steps)} times" if len(steps) > 1 else ""
        detail = ", ".join(part for part in (times, when) if part)
        items.append(f"{visible(text)}" + (f" ({detail})" if detail else ""))
    if len(counts) > WARNINGS_SHOWN:
        items.append(f"and {len(counts) - WARNINGS_SHOWN} more kinds in {WARNINGS_FILE}")
    if bad_lines:
        items.append(f"{METRICS_FILE} has {bad_lines} unreadable line{'s' * (bad_lines > 1)}, left out here")
    if not items:
        return ""
    listed = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f'<section class="warnings"><h2>Warnings</h2><ul>{listed}</ul></section>'


def _length(rows: Sequence[Row]) -> str:
    """What the response length did, as sentences; "" for runs too short to tell."""
    training = [row for row in rows if number(row.get("response_length_mean")) is not None]
    text = story(training)
    if not text:
        return ""
    return (f"<h2>Response length</h2><p>{escape(text[0].upper() + text[1:])}.</p>"
            f'<p class="note">Means of the first and of the last {WINDOW} steps.</p>')


def _charts(rows: Sequence[Row]) -> str:
    if not rows:
        return '<p class="note">No metrics were recorded yet.</p>'
    steps = (rows[0]["step"], rows[-1]["step"])
    # Rows that only evaluate (before the first step) would break the lines of the training metrics.
    training = [row for row in rows if number(row.get("reward_mean")) is not None] or rows
    drawn, missing = [], []
    for chart in CHARTS:
        only_eval = all(name.startswith("eval/") for name, _ in chart.lines)
        html = figure(chart, rows if only_eval else training, steps)
        drawn.append(html)
        if not html:
            missing.append(chart.title.lower())
    drawn.append(timing_figure(training, (training[0]["step"], training[-1]["step"])))
    note = f'<p class="note">Not recorded: {escape(", ".join(missing))}.</p>' if missing else ""
    return (f'<h2>Metrics</h2><div class="charts">{"".join(drawn)}</div>{note}'
            '<p class="note">Point at a chart to read its values.</p>')


def _times(rows: Sequence[Row]) -> str:
    """Total seconds of each phase over the run."""
    filled = [with_other(row) for row in rows]
    totals: dict[str, list[float]] = {}
    for name in (*PHASES, OTHER):
        values = [value for row in filled if (value := number(row.get(f"seconds/{name}"))) is not None]
        if math.fsum(values) > 0:
            totals[name] = values
    if not totals:
        return ""
    whole = math.fsum(math.fsum(values) for values in totals.values())
    lines = []
    for name, values in sorted(totals.items(), key=lambda item: -math.fsum(item[1])):
        total = math.fsum(values)
        lines.append(f'<tr><td>{escape(phase_title(name))}</td><td class="number">{escape(duration(total))}</td>'
                     f'<td class="number">{total / whole:.1%}</td>'
                     f'<td class="share"><div style="width:{100 * total / whole:.2f}%"></div></td></tr>')
    return ('<h2>Total times</h2><div class="card"><table><thead><tr><th>phase</th><th class="number">time</th>'
            '<th class="number">share</th><th class="share"></th></tr></thead><tbody>' + "".join(lines)
            + "</tbody></table></div>")


def _samples(folder: Path) -> str:
    records, _ = read_lines(folder / SAMPLES_FILE)
    if not records:
        return ""
    shown = records
    if len(records) > SAMPLES_FIRST + SAMPLES_LAST:
        shown = records[:SAMPLES_FIRST] + records[-SAMPLES_LAST:]
    note = "" if len(shown) == len(records) else (
        f'<p class="note">The first {SAMPLES_FIRST} and the last {SAMPLES_LAST} of {len(records)} recorded samples; '
        f"all are in {SAMPLES_FILE}.</p>")
    return ('<h2>Samples</h2><div class="card"><table class="samples"><thead><tr><th class="number">step</th>'
            '<th>prompt</th><th>response</th><th class="number">reward</th><th class="number">tokens</th></tr></thead>'
            f'<tbody>{"".join(map(_sample, shown))}</tbody></table></div>{note}')


def _sample(record: Row) -> str:
    correct, length = record.get("correct"), record.get("length")
    reward = escape(visible(format_metric("reward_mean", record.get("reward"))))
    if correct is not None:
        reward += ' <span class="good">correct</span>' if correct else ' <span class="bad">wrong</span>'
    return (f'<tr><td class="number" data-name="step">{escape(visible(record.get("step", "-")))}</td>'
            f'<td class="text" data-name="prompt">{_text(record.get("prompt"))}</td>'
            f'<td class="text" data-name="response">{_text(record.get("response"))}</td>'
            f'<td class="number" data-name="reward">{reward}</td>'
            f'<td class="number" data-name="tokens">{escape(visible("-" if length is None else length))}</td></tr>')


def _text(value: Any) -> str:
    text = "" if value is None else visible(value)
    return f"<pre>{escape(shorten(text, SAMPLE_CHARACTERS))}</pre>"


def _pairs(pairs: Iterable[tuple[str, Any]]) -> str:
    lines = "".join(f"<tr><td>{escape(visible(name))}</td><td>{escape(visible(value))}</td></tr>"
                    for name, value in pairs)
    return f'<div class="card"><table class="pairs"><tbody>{lines}</tbody></table></div>'


def _files(summary: Row) -> str:
    names = (("checkpoint", "checkpoint"), ("export", "Hugging Face export"), ("cold_start", "cold start"),
             ("prompts", "held-out prompts"), ("metrics", "metrics"), ("resume_command", "go on with"))
    pairs = [(title, summary[key]) for key, title in names if summary.get(key)]
    return f"<h2>Files</h2>{_pairs(pairs)}" if pairs else ""


def _config(folder: Path) -> str:
    try:
        text = (folder / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return f"<details><summary>Configuration</summary><pre>{escape(visible(text))}</pre></details>"


def _environment(folder: Path) -> str:
    environment = read_environment(folder)
    if not environment:
        return ""
    packages = environment.get("packages")
    versions = packages.items() if isinstance(packages, dict) else ()
    pairs = [(name, value) for name, value in environment.items() if name != "packages" and value is not None]
    pairs += [(name, value or "not installed") for name, value in versions]
    return f"<details><summary>Environment</summary>{_pairs(pairs)}</details>"


def _glossary(rows: Sequence[Row]) -> str:
    used = {name for row in rows for name in row}
    lines = "".join(f"<tr><td>{escape(name)}</td><td>{escape(spec.description)}</td><td>{escape(spec.unit or '-')}</td>"
                    f"<td>{escape(spec.normaliser)}</td></tr>" for name, spec in METRICS.items() if name in used)
    if not lines:
        return ""
    return ('<details><summary>What the metrics mean</summary><div class="wide"><table><thead><tr><th>name</th>'
            f"<th>meaning</th><th>unit</th><th>over</th></tr></thead><tbody>{lines}</tbody></table></div></details>")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: one run folder."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or arguments[0].startswith("-"):
        asked = list(arguments) in (["-h"], ["--help"])
        print("usage: python -m luspo_megatron.report.html RUN_DIR\n\n"
              "Writes RUN_DIR/report.html from the files of a run.", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else UserError.exit_code
    try:
        print(write_report(arguments[0]))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
