"""Processes that die in a run: an engine is replaced, a controller ends it with a message, none is orphaned."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from tests.e2e.project import LAYOUTS, Project, command, rows


def test_the_run_goes_on_when_an_engine_is_killed_during_a_rollout(project: Project, tmp_path: Path) -> None:
    """The engine is halted first, so that it certainly has a request when it is killed."""
    run_dir = tmp_path / "run"
    flags = project.train(run_dir, "--rollout.num_engines", "2", "--rollout.batch_size", "4", "--checkpoint.every", "0")
    with command(flags, tmp_path / "output", E2E_REWARD_SECONDS="0.05") as run:
        run.until(lambda: rows(run_dir))
        victim = run.of("hf_server")[0]
        victim.send_signal(signal.SIGSTOP)
        time.sleep(1)
        victim.send_signal(signal.SIGKILL)
        assert run.wait() == 0, run.said
        run.assert_nothing_left()
    metrics = rows(run_dir)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(row["logprob_max_diff"] <= 1e-5 for row in metrics), "whoever samples has the actor's weights"
    log = (run_dir / "logs" / "controller.log").read_text()
    assert "was ended by SIGKILL" in log and "request failed on engine-" in log
    assert len(list((run_dir / "logs").glob("engine-*.log"))) == 3, "the killed one was started again, with its own log"


def test_a_killed_controller_ends_the_run_with_a_message(project: Project, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = project.train(run_dir, *LAYOUTS["tp2ep2"], "--checkpoint.every", "1")
    with command(flags, tmp_path / "output", E2E_REWARD_SECONDS="0.05") as run:
        run.until(lambda: len(rows(run_dir)) >= 2)  # so the first step is saved
        [controller] = run.of("controller_server")
        controller.kill()
        assert run.wait(120) == 1, run.said
        run.assert_nothing_left()
    assert "luspo: the controller is gone: controller (pid" in run.stderr and "was ended by SIGKILL" in run.stderr
    assert "Traceback" not in run.said
    assert (run_dir / "checkpoints" / "step-000001" / "state.json").is_file()
