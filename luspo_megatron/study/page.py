"""report.html of the length-bias study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from luspo_megatron.algorithm.statistics import analytic_length_drift
from luspo_megatron.config_tools import LengthBiasConfig
from luspo_megatron.report.overlay import Line, overlay_figure
from luspo_megatron.report.records import write_atomic
from luspo_megatron.report.shell import page, table, tile
from luspo_megatron.study.drift import objective_drift
from luspo_megatron.study.outcome import Outcome, drifts, find, findings, limits, outcomes, seeds_ahead

Row = Mapping[str, Any]
EXACT_CASE = {"p": 1 / 16, "accuracy": 0.5, "clip_positive": 0.15, "clip_negative": 0.19}
POINTS = 40
HALVES = "Sequences for LUSPO and GSPO, tokens for the others."


def write_page(out: Path, config: LengthBiasConfig, rows: Sequence[Row]) -> Path:
    """Write <out>/report.html and return its path."""
    found = outcomes(rows)
    settings = "".join(f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>"
                       for name, value in asdict(config).items())
    parts = [
        "<h1>Length-bias study</h1>",
        f'<p class="sub">{escape(_subtitle(config, found))}</p>',
        _tiles(found), _table(found), _paragraphs("What these runs did", findings(config, found)),
        _paragraphs("What this does and does not show", limits(config)),
        f'<h2>Curves</h2><p class="note">{_band(found)}</p><div class="charts">{_charts(found)}</div>'
        '<p class="note">Point at a chart to read its values.</p>',
        _exact(), _drifts(found),
        f'<details><summary>Settings</summary><div class="wide"><table class="pairs"><tbody>{settings}</tbody></table>'
        "</div></details>",
    ]
    return write_atomic(out / "report.html", page("Length-bias study", parts))


def curve_rows(run: Row) -> list[dict[str, Any]]:
    """The curve of a row of runs.jsonl as metrics per step."""
    curve = run["curve"]
    return [dict(zip(curve, values, strict=True)) for values in zip(*curve.values(), strict=True)]


def _subtitle(config: LengthBiasConfig, found: Sequence[Outcome]) -> str:
    seeds = max(len(item.runs) for item in found)
    return (f"Task {config.task}, {seeds} seed{'s' * (seeds > 1)}, {config.steps} rollouts of {config.prompts} prompts "
            f"x {config.group_size} responses, {config.prompts // config.prompts_per_mini_batch} updates each. Clip: "
            f"{config.clip_low:g}/{config.clip_high:g} of sequence ratios, {config.token_clip_low:g}/"
            f"{config.token_clip_high:g} of token ratios.")


def _tiles(found: Sequence[Outcome]) -> str:
    tiles = []
    for algorithm in ("luspo", "gspo"):
        item = find(found, algorithm)
        if item:
            ratio = f"{item.length_end / item.length_start:.2f}"
            tiles.append(tile(f"{item.label}: length at the end over start", ratio,
                              f"{item.length_start:.1f} to {item.length_end:.1f} tokens"))
    ahead = seeds_ahead(found)
    if ahead:
        tiles.append(tile("LUSPO ended longer than GSPO", f"{ahead[0]} of {ahead[1]}", "seeds"))
    return f'<dl class="tiles">{"".join(tiles)}</dl>' if tiles else ""


def _table(found: Sequence[Outcome]) -> str:
    heads = ("objective", "length at start, tokens", "at end", "change", "end by seed", "accuracy at start", "at end",
             "clipped, A > 0", "clipped, A < 0")
    rows = [(item.label, f"{item.length_start:.1f}", f"{item.length_end:.1f}", item.change_text,
             f"{min(item.ends):.1f} to {max(item.ends):.1f}", f"{item.accuracy_start:.1%}", f"{item.accuracy_end:.1%}",
             f"{item.clip_positive:.1%}", f"{item.clip_negative:.1%}") for item in found]
    return "<h2>Outcome</h2>" + table(heads, rows) + '<p class="note">Means over seeds; clipped: over all steps.</p>'


def _paragraphs(title: str, sentences: Sequence[str]) -> str:
    return f"<h2>{title}</h2>" + "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


def _band(found: Sequence[Outcome]) -> str:
    return "Lines are means over the seeds, bands span the lowest to the highest seed." if any(
        len(item.runs) > 1 for item in found) else "One seed: no bands."


def _charts(found: Sequence[Outcome]) -> str:
    lines = [Line(item.label, [curve_rows(run) for run in item.runs]) for item in found]
    usual = [line for line, item in zip(lines, found, strict=True) if item.clip == "usual"]
    sequence = [line for line, item in zip(lines, found, strict=True) if item.algorithm in ("luspo", "gspo")]
    charts = [overlay_figure("response_length_mean", usual, title="Mean response length", limit=POINTS)]
    if any(item.clip == "wide" for item in found):
        charts.append(overlay_figure("response_length_mean", sequence, limit=POINTS,
                                     title="Mean response length, usual and wide clip"))
    charts.append(overlay_figure("pass_rate", usual, title="Accuracy", limit=POINTS))
    for metric, title, note in (
        ("clip_fraction_positive", "Clipped, advantage > 0", HALVES),
        ("clip_fraction_negative", "Clipped, advantage < 0", HALVES),
        ("clip_fraction_positive_short", "Clipped, advantage > 0, shorter half", HALVES),
        ("clip_fraction_positive_long", "Clipped, advantage > 0, longer half", HALVES),
        ("clip_fraction_negative_short", "Clipped, advantage < 0, shorter half", HALVES),
        ("clip_fraction_negative_long", "Clipped, advantage < 0, longer half", HALVES),
        ("gradient_norm", "Gradient norm", "Before clipping at 1."),
        ("token_weight_q1", "Effective weight of a token, shortest quarter", "1: as much as the mean token."),
        ("token_weight_q4", "Effective weight of a token, longest quarter", "1: as much as the mean token."),
        ("drift_kappa", "Advantage left over by the clip (kappa)", ""),
    ):
        charts.append(overlay_figure(metric, usual, title=title, note=note, may_log=metric == "gradient_norm",
                                     limit=POINTS))
    return "".join(charts)


def _exact() -> str:
    exact = analytic_length_drift(**EXACT_CASE)
    closed = {"luspo": exact.luspo, "gspo": exact.gspo}
    rows = [(name.upper(), _signless(closed[name], 14) if name in closed else "-",
             _signless(objective_drift(name, **EXACT_CASE), 14)) for name in ("luspo", "gspo", "grpo")]
    return ("<h2>The push on the length, exactly</h2>"
            "<p>dJ/d(stop logit) of a policy that stops at every token with probability 1/16, accuracy 50%, 15% of the "
            "positive and 19% of the negative responses clipped, whatever their length. Above 0: responses shrink.</p>"
            + table(("objective", "closed form", "through the project's objective"), rows)
            + '<p class="note">Second column: every possible response with its probability, differentiated; GRPO as if '
            "its clip took those shares.</p>")


def _signless(value: float, digits: int, sign: str = "") -> str:
    """The number; what rounds to 0 has no sign."""
    return f"{0:.{digits}f}" if abs(value) < 0.5 * 10.0**-digits else f"{value:{sign}.{digits}f}"


def _drifts(found: Sequence[Outcome]) -> str:
    rows = [(drift.outcome.label, f"{drift.kappa_exact:+.4f}", f"{drift.kappa_measured:+.4f}",
             _signless(drift.exact, 5, "+"),
             f"{drift.measured:+.5f}", "-" if math.isnan(drift.standard_error) else f"{drift.standard_error:.5f}")
            for drift in drifts(found)]
    if not rows:
        return ""
    return ("<h2>Exact and measured push in these runs</h2>"
            + table(("objective", "kappa, closed form", "kappa, measured", "push, closed form", "push, measured",
                     "standard error over seeds"), rows)
            + '<p class="note">Closed form: with the run\'s own mean accuracy, length and clip fractions. Measured: '
            "the gradient in the stop logit, mean over all updates. The closed form knows no clip that depends on the "
            "length and no reward that does, so the difference of the two is their doing.</p>")
