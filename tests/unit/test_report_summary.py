"""The final summary: intervals against hand numbers, summary.json, the screen."""

from __future__ import annotations

import io
import json
import math
import statistics
from pathlib import Path

import pytest
from rich.console import Console

from luspo_megatron.report.environment import collect_environment, project_commit, read_environment, write_environment
from luspo_megatron.report.progress import Progress
from luspo_megatron.report.summary import (
    RunSummary,
    difference,
    evaluations,
    paired_difference_se,
    print_summary,
    read_summary,
    summary_lines,
    write_summary,
)

DEMO_KEYS = {"pass_rate_before", "pass_rate_before_se", "pass_rate_after", "pass_rate_after_se", "greedy_before",
             "greedy_after", "seconds", "layout", "seed", "cold_start", "checkpoint", "export", "prompts",
             "pass_at_k_before", "pass_at_k_after"}


def test_interval_of_the_difference_by_hand() -> None:
    change = difference(RunSummary(pass_rate_before=0.40, pass_rate_before_se=0.03, pass_rate_after=0.55,
                                   pass_rate_after_se=0.04))
    assert change is not None  # sqrt(.03^2 + .04^2) = .05
    assert change.value == pytest.approx(0.15)
    assert change.low == pytest.approx(0.15 - 1.96 * 0.05, abs=1e-5)
    assert change.high == pytest.approx(0.15 + 1.96 * 0.05, abs=1e-5)
    paired = difference(RunSummary(pass_rate_before=0.4, pass_rate_after=0.55, difference_se=0.01))
    assert paired is not None and paired.low == pytest.approx(0.1304, abs=1e-4)
    assert difference(RunSummary(pass_rate_before=0.4, pass_rate_before_se=0.1)) is None
    assert difference(RunSummary(pass_rate_before=0.4, pass_rate_after=0.5)) is None


def test_paired_standard_error_is_that_of_the_mean_change() -> None:
    before, after = [0.0, 0.25, 0.5, 1.0], [0.25, 0.75, 0.5, 1.0]
    expected = statistics.stdev([0.25, 0.5, 0.0, 0.0]) / math.sqrt(4)
    assert paired_difference_se(before, after) == pytest.approx(expected)
    with pytest.raises(ValueError, match="got 2 and 1"):
        paired_difference_se([0.0, 1.0], [1.0])


def test_summary_json_has_the_keys_and_null_for_what_is_not_known(tmp_path: Path) -> None:
    write_summary(tmp_path, RunSummary(pass_rate_before=float("nan"), layout="tp2xep2", seed=3))
    record = json.loads((tmp_path / "summary.json").read_text())
    assert record.keys() >= DEMO_KEYS
    assert record["pass_rate_before"] is None and record["seed"] == 3 and record["difference"] is None
    assert read_summary(tmp_path) == record
    assert read_summary(tmp_path / "missing") == {}


def test_rates_come_from_the_first_and_last_evaluation(tmp_path: Path) -> None:
    rows = [{"step": 0, "eval/pass_at_1": 0.3, "eval/pass_at_1_se": 0.01, "eval/greedy": 0.8, "eval/pass_at_k": 0.6},
            {"step": 1, "loss": 1.0}, {"step": 2, "eval/pass_at_1": 0.5}, {"step": 3, "eval/pass_at_1": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = evaluations(tmp_path)
    assert found == {"pass_rate_before": 0.3, "pass_rate_before_se": 0.01, "greedy_before": 0.8,
                     "pass_at_k_before": 0.6,
                     "pass_rate_after": 0.5, "pass_rate_after_se": None, "greedy_after": None, "pass_at_k_after": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert evaluations(tmp_path)["pass_rate_after"] is None


def test_the_screen_shows_rates_paths_command_and_warnings() -> None:
    file = io.StringIO()
    progress = Progress(console=Console(file=file, force_terminal=False, width=80))
    progress.warning("worker 3 died")
    summary = RunSummary(pass_rate_before=0.376, pass_rate_before_se=0.009, pass_rate_after=0.568,
                         pass_rate_after_se=0.009, greedy_before=0.81, greedy_after=0.76, pass_at_k_before=0.6,
                         pass_at_k_after=0.7, k=4, seconds=612.0, steps=150, layout="tp2xep2", seed=0,
                         checkpoint="/long/" + "x" * 100, resume_command="luspo train --run.steps 300", finished=False,
                         warnings={"earlier one": 2})
    print_summary(progress, summary)
    text = file.getvalue()
    for part in ("stopped before its end", "37.6% (standard error 0.9%)", "56.8% (standard error 0.9%)",
                 "+19.2 points (95% interval +16.7 to +21.7)", "pass@4", "60.0% -> 70.0%", "81.0% -> 76.0%",
                 "150 in 10 min 12 s", "/long/" + "x" * 100, "luspo train --run.steps 300", "worker 3 died",
                 "earlier one (2 times)"):
        assert part in text


def test_a_summary_without_evaluation_leaves_the_rates_out() -> None:
    assert summary_lines(RunSummary(steps=3)) == ["Run finished", "  steps  3"]


def test_environment_is_recorded_and_read_back(tmp_path: Path) -> None:
    written = write_environment(tmp_path)
    assert read_environment(tmp_path) == written
    assert written["python"].startswith("3.") and written["cpus"] >= 1
    assert written["packages"]["numpy"] and written["packages"].keys() >= {"torch", "megatron-core", "transformers"}
    assert collect_environment().keys() == written.keys()
    assert project_commit(tmp_path) is None  # not a checkout of this project
