"""Trainer and engine take turns with the memory: the run computes the same, in the order that keeps them apart."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

from tests.e2e.conftest import Run
from tests.e2e.project import LAYOUTS, Project, command, luspo, rows, untimed

ON = ["--rollout.hand_over", "on"]


def events(run_dir: Path) -> list[str]:
    """What the fleet was told about memory and weights, in order."""
    words = re.findall(r"INFO luspo_megatron.rollout.fleet: (asleep|weights awake|kv_cache awake|weight version \d+)",
                       (run_dir / "logs" / "controller.log").read_text())
    return [word.replace("weight version ", "version ") for word in words]


def phase(version: int) -> list[str]:
    return ["weights awake", f"version {version}", "kv_cache awake", "asleep"]


def test_the_run_is_the_same(project: Project, straight: Run, tmp_path: Path) -> None:
    """Equal metrics over six steps of TP2 x EP2 with saves; every rollout has its push, between the two awakenings."""
    run_dir = tmp_path / "run"
    luspo(project.train(run_dir, *LAYOUTS["tp2ep2"], "--checkpoint.every", "3", *ON), tmp_path / "output")
    assert untimed(rows(run_dir)) == untimed(rows(straight.dir))
    assert events(run_dir) == ["asleep", *(event for version in range(1, 7) for event in phase(version))]


def test_evaluations_and_a_reference_policy(project: Project, tmp_path: Path) -> None:
    """An evaluation is a phase of its own; the frozen reference of the KL term leaves and comes back too."""
    flags = ["--algorithm.kl_coef", "0.01", "--data.eval_prompts", str(project.heldout), "--eval.every", "1",
             "--eval.samples", "2", "--run.steps", "2", "--checkpoint.every", "0"]
    for name, more in (("off", ["--rollout.hand_over", "off"]), ("on", ON)):
        luspo(project.train(tmp_path / name, *flags, *more), tmp_path / f"{name}-output")
    on = rows(tmp_path / "on")
    assert untimed(on) == untimed(rows(tmp_path / "off"))
    assert [row["step"] for row in on if "eval/pass_at_1" in row] == [0, 1, 2]
    assert any(row.get("kl_ref", 0) > 0 for row in on)
    assert events(tmp_path / "off") == ["version 1", "version 2", "version 3"]
    versions = [1, 1, 2, 2, 3]  # evaluation, rollout, evaluation, rollout, evaluation
    assert events(tmp_path / "on") == ["asleep", *(event for version in versions for event in phase(version))]


def test_the_only_engine_dies_in_a_rollout(project: Project, tmp_path: Path) -> None:
    """It is started again and gets the weights of a trainer whose memory comes back for that; no sample is lost."""
    run_dir = tmp_path / "run"
    flags = project.train(run_dir, "--rollout.batch_size", "4", "--checkpoint.every", "0", *ON)
    with command(flags, tmp_path / "output", E2E_REWARD_SECONDS="0.05") as run:
        run.until(lambda: rows(run_dir))
        [victim] = run.of("hf_server")
        run.until(lambda: events(run_dir)[-1] == "kv_cache awake")
        victim.send_signal(signal.SIGSTOP)  # so that it certainly has a request when it is killed
        time.sleep(0.5)
        victim.send_signal(signal.SIGKILL)
        assert run.wait() == 0, run.said
        run.assert_nothing_left()
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(row["logprob_max_diff"] <= 1e-5 for row in metrics), "whoever samples has the actor's weights"
    assert "was ended by SIGKILL" in (run_dir / "logs" / "controller.log").read_text()
