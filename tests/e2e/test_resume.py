"""A run that is broken off and resumed in new processes equals one that never stopped; Ctrl-C is such a break.

The stop comes at a step that is not known beforehand; the resumed run uses the command that the person was shown.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import Run
from tests.e2e.project import LAYOUTS, Project, command, luspo, rows, tensors, untimed

STEPS = 6


def test_the_straight_run_learns_something_and_counts_on(straight: Run) -> None:
    metrics = rows(straight.dir)
    assert all(2 < row["response_length_mean"] < 11 for row in metrics), "lengths must differ for the loss to weigh"
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert len({row["rollout_digest"] for row in metrics}) == STEPS  # every token of a step; resumed rows must match it
    assert [row["weight_version"] for row in metrics] == [2, 3, 4, 5, 6, 7]
    assert all(row["num_updates"] == 2 and row["gradient_norm"] > 1e-3 for row in metrics)
    assert any(row["clip_fraction_positive"] > 0 or row["clip_fraction_negative"] > 0 for row in metrics)
    samples = rows(straight.dir, "samples.jsonl")
    for row in samples:
        # groups are numbered over the whole run; a step's samples were drawn under the version of the step before
        assert (row["group_id"] // 4, row["weight_version"]) == (row["step"] - 1, row["step"])
    state = json.loads((straight.dir / "checkpoints" / "step-000006" / "state.json").read_text())
    assert (state["step"], state["updates"], state["weight_version"]) == (6, 12, 7)
    assert state["controller"]["next_group_id"] == 24 and state["controller"]["data"]["position"] == 24
    assert "finished" in (straight.dir / "summary.json").read_text() and (straight.dir / "report.html").is_file()


def test_the_engine_serves_the_actors_weights_at_every_step(straight: Run) -> None:
    """The engine's log-probs of its own samples against those of TP2 x EP2 shards, before and after pushes."""
    for row in rows(straight.dir):
        assert 0 < row["logprob_max_diff"] <= 1e-5, row
        assert 0 <= row["kl_rollout"] <= 1e-9, row


def test_the_first_ctrl_c_saves_and_the_shown_command_goes_on(project: Project, straight: Run, tmp_path: Path) -> None:
    run_dir = tmp_path / "a folder"  # a space: the shown command must be quoted
    flags = project.train(run_dir, *LAYOUTS["tp2ep2"], "--checkpoint.every", "3", "--checkpoint.keep", "9")
    with command(flags, tmp_path / "first", E2E_REWARD_SECONDS="0.03") as run:
        run.until(lambda: len(rows(run_dir)) >= 2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 0, run.said
        run.assert_nothing_left()
    assert "Traceback" not in run.said
    stopped = len(rows(run_dir))
    assert 2 <= stopped < STEPS, "the stop came too late to show anything"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["finished"] is False and summary["steps"] == stopped
    assert (run_dir / "checkpoints" / f"step-{stopped:06d}" / "state.json").is_file()
    shown = re.sub(r"\s+", " ", run.stdout)
    assert summary["resume_command"] in shown

    luspo(shlex.split(summary["resume_command"])[1:], tmp_path / "second")
    assert untimed(rows(run_dir)) == untimed(rows(straight.dir))
    assert rows(run_dir, "samples.jsonl") == rows(straight.dir, "samples.jsonl")
    ours, theirs = tensors(run_dir / "export"), tensors(straight.dir / "export")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


def test_resume_under_another_layout(project: Project, straight: Run, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(straight.dir, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-000006")
    shutil.rmtree(run_dir / "export")
    luspo(project.train(run_dir, *LAYOUTS["pp2"]), tmp_path / "output")
    want, got = rows(straight.dir), rows(run_dir)
    assert untimed(got[:3]) == untimed(want[:3])
    assert [row["weight_version"] for row in got] == [row["weight_version"] for row in want]
    assert abs(want[3]["loss"]) > 1e-2
    assert got[3]["loss"] == pytest.approx(want[3]["loss"], rel=1e-5)
    assert all(row["logprob_max_diff"] <= 1e-5 for row in got)
    ours, theirs = rows(run_dir, "samples.jsonl"), rows(straight.dir, "samples.jsonl")
    assert [(r["prompt"], r["group_id"], r["weight_version"]) for r in ours] == \
        [(r["prompt"], r["group_id"], r["weight_version"]) for r in theirs]
    assert ours[:12] == theirs[:12], "steps 1 to 4 are drawn from the same weights"
    assert (run_dir / "config.yaml.1").is_file(), "the settings of the earlier start are kept"


def test_the_second_ctrl_c_stops_at_once(project: Project, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = project.train(run_dir, *LAYOUTS["tp2ep2"], "--checkpoint.every", "1", "--rollout.max_response_tokens", "40",
                          "--batch.max_tokens_per_micro_batch", "512")
    with command(flags, tmp_path / "output", E2E_REWARD_SECONDS="0.2") as run:
        run.until(lambda: rows(run_dir))
        assert len(run.of("hf_server")) == 1 and len(run.of("controller_server")) == 1
        run.process.send_signal(signal.SIGINT)
        run.until(lambda: "Ctrl-C again" in run.stderr)
        while "Stopping at once." not in run.stderr and run.process.poll() is None:
            run.process.send_signal(signal.SIGINT)  # pressed on and on; two within half a second count as one
            time.sleep(0.1)
        assert run.wait(60) == 130, run.said
        run.assert_nothing_left()
    for folder in (run_dir / "checkpoints").glob("step-??????"):
        assert (folder / "state.json").is_file(), "what has the name of a checkpoint is complete"
