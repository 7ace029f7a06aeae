"""Terminal and plain output: widths, control characters, phases, warnings."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from luspo_megatron.report.metrics import METRICS
from luspo_megatron.report.progress import Progress
from luspo_megatron.report.table import COLUMNS, fitting_columns, header_lines, row_line

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
ROW = {"step": 12, "reward_mean": 0.375, "pass_rate": 0.5, "response_length_mean": 9.25, "response_length_p95": 16.0,
       "clip_fraction_positive": 0.15, "clip_fraction_negative": 0.19, "kl_rollout": 2e-7, "entropy": 0.6,
       "gradient_norm": 0.25, "seconds/rollout": 1.5, "seconds/train": 2.25, "seconds/step": 4.0,
       "tokens_per_second": 3800.0}


def plain_progress(**options: object) -> tuple[Progress, io.StringIO]:
    file = io.StringIO()
    return Progress(3, console=Console(file=file, force_terminal=False, width=80), **options), file  # type: ignore[arg-type]


def terminal_progress(width: int, **options: object) -> tuple[Progress, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, force_interactive=True, width=width, height=30)
    return Progress(3, console=console, **options), file  # type: ignore[arg-type]


def screen(text: str) -> list[str]:
    """Lines of terminal output without the escape sequences of styles and cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").split("\n")


@pytest.mark.parametrize("width", range(20, 201))
def test_rows_and_headers_never_exceed_the_width(width: int) -> None:
    columns = fitting_columns(width)
    extreme = {name: -1.23456789e-300 for name in METRICS} | {"step": 99999}
    for line in [*header_lines(columns), row_line(columns, ROW), row_line(columns, extreme)]:
        assert len(line) <= width
    assert set(fitting_columns(width - 1)) <= set(columns)  # a wider terminal loses nothing


def test_80_columns_hold_what_matters_and_200_hold_everything() -> None:
    narrow = {column.metric for column in fitting_columns(80)}
    assert narrow >= {"step", "reward_mean", "response_length_mean", "response_length_p95", "clip_fraction_positive",
                      "clip_fraction_negative", "kl_rollout", "entropy", "gradient_norm", "seconds/step"}
    assert fitting_columns(200) == list(COLUMNS)
    assert row_line(fitting_columns(200), ROW).split() == [
        "12", "0.375", "50.0%", "9.2", "16.0", "15.0%", "19.0%", "2.0e-07", "0.600", "0.250", "1.50", "-", "-", "2.25",
        "-", "-", "-", "4.00", "3800"]


def test_values_stand_under_their_titles() -> None:
    columns = fitting_columns(200)
    titles, _ = header_lines(columns)
    row = row_line(columns, {**ROW, "gradient_norm": 123456.0, "kl_rollout": -1e-10})
    ends = [match.end() for match in re.finditer(r"old lp|\S+", titles)]
    assert [match.end() for match in re.finditer(r"\S+", row)] == ends


@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_shows_bars_with_time_left_and_unbroken_rows(width: int) -> None:
    progress, file = terminal_progress(width)
    with progress:
        progress.step_row({**ROW, "step": 1})
        with progress.phase("rollout", total=4) as phase:
            phase.advance(3)
            time.sleep(0.02)
            progress._bars.refresh()  # type: ignore[union-attr]
        progress.step_row({**ROW, "step": 2})
    lines = screen(file.getvalue())
    assert any("rollout" in line and "3/4" in line and "left" in line for line in lines)
    assert any("steps" in line and "1/3" in line and "left" in line for line in lines)
    assert all(len(line) <= width for line in lines)
    rows = [line for line in lines if re.match(r"\s+[12] +0\.375", line)]
    assert rows == [row_line(fitting_columns(width), {**ROW, "step": step}) for step in (1, 2)]
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") > 0  # the cursor is back


def test_elsewhere_lines_are_plain_whatever_the_data_says(tmp_path: Path) -> None:
    progress, file = plain_progress(run_dir=tmp_path)
    with progress, progress.phase("rollout \x1b[2J", total=2) as phase:
        phase.advance()
        progress.step_row(ROW)
        progress.message("done \x1b]0;title\x07 [bold]not markup[/bold]")
        progress.warning("bad\x1b[31m answer")
        progress.sample_table([{"prompt": "1+1=\x00\u202e", "response": "[red]2\x1b[2J\nsecond line", "reward": 1.0,
                                "length": 3, "correct": True}])
    text = file.getvalue()
    assert not CONTROL.search(text)
    for part in ("[bold]not markup[/bold]", "\\x1b[31m", "[red]2\\x1b[2J", "1+1=\\x00\\u202e", "second line",
                 "reward 1.000", "3 tokens", "correct"):
        assert part in text
    assert max(map(len, text.splitlines())) > 80  # a log file's rows are not cut to a terminal's width


def test_a_pipe_gets_no_escapes_even_with_force_color(monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    with Progress(2) as progress:
        progress.step_row(ROW)
        progress.warning("careful")
    assert not CONTROL.search(capsys.readouterr().out)


def test_an_ascii_log_does_not_end_the_run() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), force_terminal=False)
    with Progress(console=console) as progress:
        progress.message("Zürich \ud83d")
    assert raw.getvalue() == b"Z\\xfcrich \\ud83d\n"


def test_long_phases_say_so_now_and_then_in_a_log() -> None:
    progress, file = plain_progress(plain_interval=0.0)
    with progress.phase("rollout", total=4) as phase:
        for _ in range(4):
            phase.advance()
    lines = file.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == ["rollout 1/4", "rollout 2/4", "rollout 3/4"]
    assert all(line.endswith("left") for line in lines)
    progress, file = plain_progress()  # usual interval: short phases are silent
    with progress.phase("rollout", total=4) as phase:
        phase.advance(2)
    assert file.getvalue() == ""


def test_phases_are_measured_also_when_they_fail_or_nest() -> None:
    progress, _ = plain_progress()
    with progress.phase("eval"), progress.phase("rollout"):
        time.sleep(0.02)
    with pytest.raises(RuntimeError), progress.phase("rollout") as phase:
        time.sleep(0.02)
        raise RuntimeError
    assert phase.seconds == phase.seconds >= 0.02
    seconds = progress.take_seconds()
    assert seconds["seconds/rollout"] >= 0.04 and 0.02 <= seconds["seconds/eval"] < seconds["seconds/rollout"]
    assert progress.take_seconds() == {}


def test_the_header_comes_back_now_and_then() -> None:
    progress, file = plain_progress(header_every=5)
    for step in range(11):
        progress.step_row({**ROW, "step": step})
    assert file.getvalue().count("reward   pass") == 3


def test_an_evaluation_is_a_line_and_no_empty_row() -> None:
    progress, file = plain_progress()
    progress.step_row({"step": 0, "eval/pass_at_1": 0.376, "eval/pass_at_1_se": 0.009, "eval/pass_at_k": 0.66,
                       "eval/greedy": 0.81, "eval/response_length_mean": 9.1})
    assert file.getvalue() == "step 0, held out: pass@1 37.6% (se 0.9%), pass@k 66.0%, greedy 81.0%, 9.1 tokens\n"


def test_warnings_are_counted_recorded_and_not_repeated_at_every_step(tmp_path: Path) -> None:
    progress, file = plain_progress(run_dir=tmp_path)
    for step in range(12):
        progress.step = step
        progress.warning("reward timeout")
    assert file.getvalue().splitlines() == ["warning: reward timeout", "warning: reward timeout (10 times so far)"]
    assert progress.warnings == {"reward timeout": 12}
    records = [json.loads(line) for line in (tmp_path / "warnings.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(12))
