"""Real runs of a tiny model over nodes: requeue, preemption, cancellation, ranks and engine nodes that die."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.project import Project, rows, untimed
from tests.slurm.conftest import ROOT, Cluster, Job

HERE = Path(__file__).parent
STEPS = 7
# as sbatch --signal=B:USR1 sends it, to the batch script; and as a preemption does, to every process of the ranks' step
SIGNALS = {"USR1": "scancel --signal=USR1 --batch $SLURM_JOB_ID", "TERM": "scancel --signal=TERM $SLURM_JOB_ID"}
PHASES = [(1, "rollout"), (2, "reward"), (3, "old_logprobs"), (4, "train"), (5, "sync"), (6, "save")]
EVALUATION = {"USR1": 2, "TERM": STEPS}  # one in mid-run, and the one at the end
SLOW = {"E2E_REWARD_SECONDS": "0.05"}  # so that what is to meet a run meets it on a fast machine too
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]


def arguments(project: Project, run_dir: Path, *flags: str) -> list[str]:
    return project.train(
        run_dir, "--run.steps", str(STEPS), "--parallel.world_size", "2", "--parallel.ep", "2",
        "--launch.gpus_per_node", "1", "--data.eval_prompts", str(project.heldout), "--eval.every", "2",
        "--eval.samples", "2", "--checkpoint.every", "6", "--checkpoint.export_at_end", "false", *flags)


def submit(cluster: Cluster, project: Project, folder: Path, *flags: str, options: tuple[str, ...] = (),
           **environment: str) -> Job:
    environment = {"PYTHONPATH": f"{ROOT}:{HERE / 'site'}"} | environment
    return cluster.submit(HERE / "job.sbatch", folder / "out", *arguments(project, folder / "run", *flags), cwd=folder,
                          options=options, **environment)


def steps_of(folder: Path) -> dict[int, dict[str, object]]:
    """All that metrics.jsonl says of a step, but for times."""
    steps: dict[int, dict[str, object]] = {}
    for row in untimed(rows(folder / "run")):
        steps.setdefault(row["step"], {}).update(row)
    return steps


@pytest.fixture(scope="module")
def straight(cluster: Cluster, project: Project, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("straight")
    job = submit(cluster, project, folder)
    assert job.wait() == "COMPLETED", job.said
    yield folder


def test_a_run_over_two_nodes(straight: Path) -> None:
    metrics = rows(straight / "run")
    assert [row["step"] for row in metrics if "reward_mean" in row] == list(range(1, STEPS + 1))
    assert all(row["gradient_norm"] > 0 for row in metrics if "reward_mean" in row)
    assert {path.name for path in (straight / "run/logs").glob("rank-*")} == {"rank-0.log", "rank-1.log"}


@pytest.mark.parametrize("kind", SIGNALS)
def test_a_request_to_stop_in_every_phase_and_the_requeued_run_equals_the_straight_one(
        cluster: Cluster, project: Project, straight: Path, tmp_path: Path, kind: str) -> None:
    signals = tmp_path / "signals.json"
    phases = sorted([*PHASES, (EVALUATION[kind], "eval")], key=lambda item: item[0])
    signals.write_text(json.dumps([[step, phase, SIGNALS[kind]] for step, phase in phases]))
    job = submit(cluster, project, tmp_path, PHASE_SIGNALS=str(signals))
    assert job.wait(500) == "COMPLETED", job.said
    starts = [int(Path(f"{signals}.{i}").read_text()) for i in range(len(phases))]
    assert starts == list(range(len(phases))), "each signal ends a start of its own"
    assert int(job.field("Restarts")) == len(phases)
    assert job.said.count("luspo: requeued") == len(phases) and "did not save" not in job.said
    assert steps_of(tmp_path) == steps_of(straight)
    logs = {path.name for path in (tmp_path / "run/logs").glob("rank-1*")}
    assert logs == {"rank-1.log", *(f"rank-1.{i}.log" for i in range(1, len(phases) + 1))}


def test_preemption_saves_and_goes_on(cluster: Cluster, project: Project, straight: Path, tmp_path: Path) -> None:
    job = submit(cluster, project, tmp_path, options=("--nodelist=n1,n2",), **SLOW)
    job.until(lambda: sum("reward_mean" in row for row in rows(tmp_path / "run")) >= 1)
    other = tmp_path / "other.sh"
    other.write_text("#!/bin/sh\nsleep 2\n")
    high = cluster.submit(other, tmp_path / "other.out",
                          options=("--partition=high", "--nodelist=n1,n2", "--exclusive"))
    assert high.wait() == "COMPLETED"
    assert job.wait() == "COMPLETED", job.said
    assert job.field("Restarts") == "1" and "luspo: requeued" in job.said and "resuming after step" in job.said
    assert steps_of(tmp_path) == steps_of(straight)


def test_scancel_saves_and_does_not_requeue(cluster: Cluster, project: Project, tmp_path: Path) -> None:
    job = submit(cluster, project, tmp_path, **SLOW)
    job.until(lambda: sum("reward_mean" in row for row in rows(tmp_path / "run")) >= 1)
    cluster.slurm("scancel", job.number)
    assert job.wait() == "CANCELLED", job.said
    job.until(lambda: "cancelled: saved" in job.said, 30)
    done = sum("reward_mean" in row for row in rows(tmp_path / "run"))
    assert (tmp_path / f"run/checkpoints/step-{done:06d}/state.json").is_file()


def test_a_rank_that_dies_ends_the_job_with_its_last_lines(cluster: Cluster, project: Project, tmp_path: Path) -> None:
    job = submit(cluster, project, tmp_path, DIE_AS_RANK="1")
    log = tmp_path / "run/logs/rank-1.log"
    job.until(lambda: log.exists() and "this rank dies now" in log.read_text())
    died = time.monotonic()
    assert job.wait(60) == "FAILED"
    assert time.monotonic() - died < 30, "the other rank was waited for"
    assert job.field("ExitCode") == "9:0"
    assert "rank 1 on n" in job.said and "  this rank dies now" in job.said


def test_the_shipped_script_with_a_tiny_model(cluster: Cluster, project: Project, tmp_path: Path) -> None:
    """The 30B-A3B script over two nodes, its sizes and engine overruled by flags at the end."""
    flags = arguments(project, tmp_path / "run", "--rollout.engine", "hf", "--rollout.num_engines", "1",
                      "--rollout.engine_args=", "--parallel.tp", "1", "--run.steps", "2", "--model.dtype", "float32",
                      "--optimizer.cpu_offload", "false", "--rollout.top_p", "1.0", "--data.chat_template", "false",
                      "--reward.overlong_buffer", "0", "--reward.workers", "1")[1:]
    job = cluster.submit(ROOT / "examples/qwen3_moe/luspo-qwen3_30b_a3b-1n8g.sbatch", tmp_path / "out", *flags,
                         cwd=tmp_path, options=("--nodes=2", "--ntasks-per-node=1"))
    assert job.wait() == "COMPLETED", job.said
    assert [row["step"] for row in rows(tmp_path / "run") if "reward_mean" in row] == [1, 2]


def tiny_flags(*more: str) -> tuple[str, ...]:
    return ("--run.steps", "2", "--data.eval_size", "4", "--eval.samples", "1", "--eval.greedy", "false",
            "--rollout.prompts_per_step", "4", "--algorithm.prompts_per_mini_batch", "2", "--run.tensorboard", "false",
            *more)


def test_the_tiny_example_over_two_nodes_with_engines_on_both(cluster: Cluster, tmp_path: Path) -> None:
    """The shipped script as it is, but for its cold start, which is put there: TP2 x EP2, an engine beside the ranks of
    each node."""
    run = tmp_path / "a run"
    make = [sys.executable, ROOT / "examples/qwen3_moe/tiny/make_tiny_model.py", "--seed", "0", "--out"]
    subprocess.run([*make, run / "model"], check=True, timeout=120, cwd=ROOT, env=cluster.environment)
    shutil.copytree(run / "model", run / "sft/export")
    job = cluster.submit(ROOT / "examples/qwen3_moe/tiny_cpu.sbatch", tmp_path / "out",
                         *tiny_flags("--rollout.num_engines", "2"), cwd=tmp_path, RUN_DIR=str(run))
    assert job.wait(240) == "COMPLETED", job.said
    assert [row["step"] for row in rows(run) if "reward_mean" in row] == [1, 2]
    assert {path.name for path in (run / "logs").glob("rank-*")} == {f"rank-{i}.log" for i in range(4)}
    assert re.search(r"engines on n\d+, n\d+; log", job.said)
    served = {path.name: path.read_text().count("generate") for path in (run / "logs").glob("engine-*.log")}
    assert set(served) == {"engine-0.log", "engine-1.log"}
    assert (run / "export/config.json").is_file() and "finished" in (run / "summary.json").read_text()


def supervisor_of(run_dir: Path, engine: int) -> tuple[str, int]:
    """(node, pid) of the supervisor that has this engine; empty until it serves."""
    for path in (run_dir / "engines").glob("node-*.json"):
        with contextlib.suppress(OSError, ValueError):
            data = json.loads(path.read_text())
            if any(one["index"] == engine and one["state"] == "serving" for one in data["engines"]):
                return psutil.Process(data["pid"]).environ()["SLURMD_NODENAME"], data["pid"]
    return "", 0


@contextlib.contextmanager
def dead(cluster: Cluster, node: str) -> Iterator[None]:
    """A node as after a power cut: its daemon and all that runs on it are gone, and Slurm notices."""
    daemon = int((cluster.folder / f"cluster/run/slurmd.{node}.pid").read_text())
    victims = [psutil.Process(daemon)]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            env = process.environ()
            if env.get("SLURMD_NODENAME") == node and env.get("SLURM_CONF") == cluster.environment["SLURM_CONF"]:
                victims.append(process)
    for process in victims:
        with contextlib.suppress(psutil.Error):
            process.kill()
    cluster.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=power")
    try:
        yield
    finally:
        cluster.slurm("slurmd", "-N", node)
        cluster.slurm("scontrol", "update", f"nodename={node}", "state=resume", check=False)


ENGINE_NODES = ("--launch.engine_nodes", "2", "--rollout.num_engines", "2", "--rollout.restart_timeout", "4")
FOUR_NODES = ("--nodes=4", "--no-kill")


def test_a_run_outlives_an_engine_node(cluster: Cluster, project: Project, straight: Path, tmp_path: Path) -> None:
    job = submit(cluster, project, tmp_path, *ENGINE_NODES, options=FOUR_NODES, **SLOW)
    run = tmp_path / "run"
    job.until(lambda: sum("reward_mean" in row for row in rows(run)) >= 1)
    node, _ = supervisor_of(run, 1)
    with dead(cluster, node):
        assert job.wait(240) == "COMPLETED", job.said
    done, whole = steps_of(tmp_path), steps_of(straight)
    assert {step: row["rollout_digest"] for step, row in done.items() if step} == \
        {step: row["rollout_digest"] for step, row in whole.items() if step}
    assert job.field("Restarts") == "0"


def test_too_few_engines_end_the_job_with_the_reason(cluster: Cluster, project: Project, tmp_path: Path) -> None:
    job = submit(cluster, project, tmp_path, *ENGINE_NODES, "--rollout.min_engines", "2", "--run.steps", "2000",
                 options=FOUR_NODES)
    run = tmp_path / "run"
    job.until(lambda: sum("reward_mean" in row for row in rows(run)) >= 1)
    _, pid = supervisor_of(run, 1)
    os.kill(pid, signal.SIGKILL)  # the supervisor alone; its engine ends with it
    assert job.wait(200) == "FAILED", job.said
    assert job.field("ExitCode") == "1:0" and "fewer than rollout.min_engines=2 engines have been healthy" in job.said


def test_an_engine_that_dies_is_started_again(cluster: Cluster, project: Project, straight: Path,
                                              tmp_path: Path) -> None:
    job = submit(cluster, project, tmp_path, "--launch.engine_nodes", "1", options=("--nodes=3", "--no-kill"), **SLOW)
    run = tmp_path / "run"
    job.until(lambda: sum("reward_mean" in row for row in rows(run)) >= 1)
    _, pid = supervisor_of(run, 0)
    [engine] = [one["pid"] for one in json.loads((run / "engines/node-0.json").read_text())["engines"]]
    os.kill(engine, signal.SIGKILL)
    assert job.wait(240) == "COMPLETED", job.said
    assert steps_of(tmp_path) == steps_of(straight)
    assert (run / "logs/engine-0.1.log").is_file() and not psutil.pid_exists(pid)
