"""report.html: self-contained, escaped, whole with little data and small with much."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from luspo_megatron.errors import UserError
from luspo_megatron.report.axis import linear_axis, log_axis, nice_step, step_axis, tick_labels
from luspo_megatron.report.binning import bins, points
from luspo_megatron.report.html import main, write_report
from luspo_megatron.report.metrics import METRICS
from luspo_megatron.report.text import duration, shorten

VOID = {"meta", "img", "link"}
GEOMETRY = {"x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "points", "d"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-1:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(path: Path) -> tuple[Page, str]:
    """The parsed page, after checks that hold for every report."""
    html = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(html)
    page.close()
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(page.tags)
    names = {name for name, _ in page.attributes}
    assert not {"src", "href", "srcset", "data", "xlink:href"} & names
    assert not any(name.startswith("on") for name in names)
    style = re.search(r"<style>(.*?)</style>", html, re.S)
    assert style and "url(" not in style[1] and "@import" not in style[1]
    for name, value in page.attributes:
        assert name not in GEOMETRY or not re.search("nan|inf", value or "")
    return page, html


def write_run(folder: Path, steps: int, every_eval: int = 10) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"step": 0, "eval/pass_at_1": 0.3, "eval/pass_at_1_se": 0.01}) + "\n")
        for step in range(1, steps + 1):
            row: dict[str, float | None] = {name: 0.5 + 0.4 * math.sin(step / 7 + index)
                                            for index, name in enumerate(METRICS) if not name.startswith("eval/")}
            if step % every_eval == 0:
                row |= {"eval/pass_at_1": 0.4, "eval/pass_at_1_se": 0.02, "eval/greedy": 0.6}
            file.write(json.dumps({"step": step, **row}) + "\n")


def test_a_usual_run_has_charts_tiles_and_tables(tmp_path: Path) -> None:
    write_run(tmp_path, 30)
    (tmp_path / "config.yaml").write_text("run:\n  dir: <here> & there\n")
    (tmp_path / "summary.json").write_text(json.dumps({
        "pass_rate_before": 0.376, "pass_rate_before_se": 0.009, "pass_rate_after": 0.568, "pass_rate_after_se": 0.009,
        "seconds": 61.0, "layout": "tp2xep2", "seed": 0, "checkpoint": "c/step_30", "export": None}))
    (tmp_path / "warnings.jsonl").write_text('{"step": 3, "text": "w"}\n{"step": 5, "text": "w"}\n')
    page, html = parse(write_report(tmp_path))
    text = " ".join(page.text)
    for part in ("37.6%", "56.8%", "+19.2", "95% interval +16.7 to +21.7", "tp2 x ep2", "1 min 01 s", "c/step_30",
                 "Held-out evaluation", "Seconds per step", "Total times", "<here> & there", "advantage > 0",
                 "w (2 times, steps 3 to 5)", "tokens/s", "step 30"):
        assert part in text, part
    assert html.count('class="chart"') == 22
    assert "prefers-color-scheme: dark" in html and 'name="viewport"' in html


@pytest.mark.parametrize("rows", [
    "", '{"step": 1, "reward_mean": 0.5}\n', '{"step": 1, "reward_mean": null, "loss": null}\n',
    '{"step": 0, "eval/pass_at_1": 0.5}\n', '{"step": 1, "gradient_norm": 0.0, "reward_mean": 0}\n{"step": 2, "gr',
    '{"step": 1, "reward_mean": "text", "loss": [1], "entropy": 1e308}\n{"step": 5, "entropy": -1e308}\n',
    '{"step": 1, "seconds/step": 0.0, "seconds/train": 0.0}\n', '{"step": 7, "kl_rollout": 1e-320, "reward_mean": 1}\n',
    '{"step": 1, "kl_rollout": 1e-12, "reward_mean": 1}\n{"step": 2, "kl_rollout": 10.0, "reward_mean": 1}\n'])
def test_little_or_odd_data_still_makes_a_page(tmp_path: Path, rows: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(rows)
    page, _ = parse(write_report(tmp_path))
    assert "h1" in page.tags


def test_an_empty_folder_makes_a_page_and_a_missing_one_an_error(tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    parse(write_report(tmp_path))
    with pytest.raises(UserError, match="does not exist"):
        write_report(tmp_path / "nothing")
    assert main([str(tmp_path / "nothing")]) == 2
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip().endswith("report.html")


def test_samples_warnings_and_names_cannot_inject_anything(tmp_path: Path) -> None:
    folder = tmp_path / "<b onload=x>"
    folder.mkdir()
    evil = ('</pre></table><script src="https://evil.example/x.js">alert(1)</script><img src=x onerror=alert(2)>'
            "\x1b[31m\ud800")
    (folder / "samples.jsonl").write_text("".join(json.dumps(
        {"step": evil, "prompt": evil, "response": evil, "reward": evil, "length": evil, "correct": evil}) + "\n"
        for _ in range(3)))
    (folder / "warnings.jsonl").write_text(json.dumps({"step": evil, "text": evil}) + "\n")
    (folder / "config.yaml").write_text('evil: "</pre><script>"\n')
    (folder / "summary.json").write_text(json.dumps({"layout": evil, "seed": evil, "checkpoint": evil, "seconds": evil,
                                                     "pass_rate_before": evil, "steps": evil, "k": evil}))
    (folder / "environment.json").write_text(json.dumps({"python": evil, "packages": {evil: evil}}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward_mean": 0.5, evil: 1.0}) + "\n")
    page, html = parse(write_report(folder))
    assert "<script" not in html and "<img" not in html and "<b onload" not in html and "\x1b" not in html
    assert any("<script src=" in text for text in page.text)  # shown as text
    assert any("\\x1b[31m\\ud800" in text for text in page.text)


def test_long_responses_keep_their_end_and_few_samples_are_shown(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(
        {"step": step, "prompt": f"prompt{step}.", "response": "start " + "x" * 9000 + " answer"}) + "\n"
        for step in range(100)))
    page, html = parse(write_report(tmp_path))
    assert len(html) < 120_000 and "answer</pre>" in html and "characters ..." in html
    shown = [step for step in range(100) if f"prompt{step}." in page.text]
    assert shown == [0, 1, 2, 3, *range(88, 100)]


def test_ten_thousand_steps_stay_small_and_keep_their_spike(tmp_path: Path) -> None:
    write_run(tmp_path, 10_000, every_eval=50)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    spike = json.loads(lines[5005])
    spike["entropy"] = 77.0
    lines[5005] = json.dumps(spike)
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page, html = parse(write_report(tmp_path))
    assert len(html) < 1_500_000
    assert any("to 77.000)" in text for text in page.text)  # the hover text of its bin
    assert "means of up to 50 steps" in html


def test_bins_hold_every_row_once_with_mean_low_and_high() -> None:
    rows = [{"step": step, "a": float(step) if step % 3 else None, "se": 0.5} for step in range(1, 1001)]
    groups = bins(rows, 200)
    assert len(groups) == 200 and [row for group in groups for row in group.rows] == rows
    first = points(groups, "a", "se")[0]
    assert first is not None and (first.low, first.high, first.mean) == (1.0, 5.0, 3.0)  # 1, 2, 4, 5
    assert first.error is None  # five rows have no common error bar
    single = points(bins(rows[:1], 200), "a", "se", 2.0)[0]
    assert single is not None and single.error == 1.0
    assert points(bins([{"step": 1, "a": True}, {"step": 2, "a": "x"}], 5), "a") == [None, None]


@pytest.mark.parametrize("values", [(0.0,), (5.0,), (-3.0, -3.0), (1e-9, 2e-9), (0.2, 0.9), (-1e308, 1e308), (1e6, 3e6),
                                    (5e-324,), (0.1, 0.1 + 1e-15), (1.0, 1000.0)])
@pytest.mark.parametrize("from_zero", [True, False])
def test_linear_axes_cover_the_data_with_few_distinct_labels(values: tuple[float, ...], from_zero: bool) -> None:
    axis = linear_axis(values, 0.0, 100.0, from_zero=from_zero)
    labels = tick_labels(axis, percent=False)
    if max(map(abs, values)) < 1e100:  # larger ones are drawn at the border
        slack = 1e-9 * max(map(abs, values))  # far below a pixel
        assert axis.low - slack <= min(values) and max(values) <= axis.high + slack
    assert 2 <= len(axis.ticks) <= 9 and len(set(labels)) == len(labels)
    assert all(0.0 <= axis(value) <= 100.0 for value in values)
    assert not from_zero or axis.low <= 0.0 <= axis.high


def test_ticks_are_round_and_labels_short() -> None:
    assert [nice_step(raw) for raw in (0.9, 1.0, 1.1, 3.0, 7.0, 0.03)] == pytest.approx([1, 1, 2, 5, 10, 0.05])
    assert tick_labels(linear_axis([0.0, 0.47], 0, 1, from_zero=True), percent=True) == [
        "0%", "10%", "20%", "30%", "40%", "50%"]
    assert tick_labels(linear_axis([0.0, 4e-4], 0, 1, from_zero=True), percent=False)[1] == "1e-4"
    assert tick_labels(linear_axis([0.0, 38000.0], 0, 1, from_zero=True), percent=False)[-1] == "40k"
    assert tick_labels(log_axis([2e-7, 3e-3], 0, 1), percent=False) == ["1e-7", "1e-6", "1e-5", "1e-4", "1e-3", "1e-2"]
    assert step_axis(1, 3, 0, 1).ticks == [1, 2, 3]
    assert step_axis(7, 7, 0, 1).ticks == [7]


def test_texts() -> None:
    assert [duration(value) for value in (None, 0.04, 59.96, 245.0, 3599.7, 11220.0)] == [
        "-", "0.0 s", "1 min 00 s", "4 min 05 s", "1 h 00 min", "3 h 07 min"]
    assert shorten("abc", 3) == "abc"
    assert shorten("a" * 20 + "bcd", 9) == "aaaaaa [... 14 characters ...] bcd"
