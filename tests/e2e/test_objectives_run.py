"""Every objective and extra term through the training loop: real actor, batches and report; rollouts from a script.

And one run with a real controller and engine that has everything on, in which the actor is spoilt on purpose: the
metric that compares engine and actor must show it.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.e2e import jobs
from tests.e2e.project import Project, rows
from tests.workers import pool

TERMS = ["--algorithm.kl_coef", "0.1", "--algorithm.entropy_coef", "0.01", "--algorithm.epochs", "2"]
WIDE = ["--algorithm.clip_low", "0.2", "--algorithm.clip_high", "0.2"]


@pytest.mark.parametrize("objective", ["luspo", "gspo", "grpo", "drgrpo", "dapo", "cispo"])
def test_objective(objective: str, project: Project, tmp_path: Path) -> None:
    clip = [] if objective in ("luspo", "gspo") else WIDE
    flags = project.train(tmp_path / "run", "--algorithm.objective", objective, "--run.steps", "2", *TERMS, *clip,
                          "--checkpoint.export_at_end", "false")[1:]
    pool(1).run(jobs.train_on_script, flags)
    metrics = rows(tmp_path / "run")
    assert [row["step"] for row in metrics] == [1, 2]
    for row in metrics:
        assert all(isinstance(v, int | float) and math.isfinite(v) for v in row.values()), row
        assert row["num_updates"] == 4 and row["gradient_norm"] > 1e-4 and 4 < row["entropy"] < 6
        assert row["kl_ref"] > 0
    assert metrics[1]["kl_ref"] > metrics[0]["kl_ref"], "the policy moves away from its start"
    assert abs(metrics[0]["loss"]) > 1e-4


def test_everything_on_and_a_spoilt_actor(project: Project, tmp_path: Path) -> None:
    flags = project.train(tmp_path / "run", "--run.steps", "3", *TERMS, "--rollout.dynamic_sampling", "true",
                          "--rollout.group_size", "2", "--data.eval_prompts", str(project.heldout), "--eval.every", "1",
                          "--eval.samples", "2", "--eval.interim_size", "3", "--checkpoint.every", "0")[1:]
    pool(1).run(jobs.train_and_spoil, flags, 3, "decoder.layers.1.self_attention.linear_proj.weight", 2.0)
    before, first, second, third = rows(tmp_path / "run")
    assert before["step"] == 0 and before["eval/pass_at_1"] is not None and "eval/greedy" in before
    assert "eval/greedy" not in first and "eval/greedy" in third
    assert first["zero_variance_fraction"] == 0, "groups of two with equal rewards are dropped and sampled anew"
    for row in (first, second):
        assert 0 < row["logprob_max_diff"] <= 1e-5 and row["kl_rollout"] <= 1e-9
    assert third["logprob_max_diff"] > 1e-2, "the actor differs from what was pushed, and nothing says so"
    assert third["kl_rollout"] > 1e-6
    assert (tmp_path / "run" / "export" / "config.json").is_file()
