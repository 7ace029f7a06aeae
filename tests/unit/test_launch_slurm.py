"""Ranks' places from launchers' variables, node lists and splits, and what the driver concludes. No Slurm here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from luspo_megatron.config import Config, LaunchConfig, RolloutConfig
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.launch import allocation, environment, slurm
from luspo_megatron.launch.allocation import Split, expand_nodes, split_nodes
from luspo_megatron.launch.stop import TERM_STOPS

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "n[3-4]",
        "SLURM_NTASKS": "16"}


def test_expand_nodes() -> None:
    assert expand_nodes("n1") == ["n1"]
    assert expand_nodes("n[1-3]") == ["n1", "n2", "n3"]
    assert expand_nodes("a[08-10,2]-ib,login") == ["a08-ib", "a09-ib", "a10-ib", "a2-ib", "login"]
    assert expand_nodes("r[1-2]c[3,5]") == ["r1c3", "r1c5", "r2c3", "r2c5"]
    assert len(expand_nodes("n[1-16]")) == 16


def test_three_nodes_are_three() -> None:
    """A list of nodes that became one name would make every node a master."""
    split = split_nodes(expand_nodes("n[1-3]"), 24, 8, 0)
    assert split == Split(("n1", "n2", "n3"), (), 8)


def test_engines_take_the_last_nodes() -> None:
    assert split_nodes([f"n{i}" for i in range(16)], 64, 8, 8) == Split(
        tuple(f"n{i}" for i in range(8)), tuple(f"n{i}" for i in range(8, 16)), 8)


@pytest.mark.parametrize(("engines", "flags", "split", "want"), [
    (2, "", Split(("n1", "n2", "n3"), (), 8), ("n1", "n2")),
    (1, "", Split(("n1", "n2", "n3"), (), 8), ()),  # the run starts it beside rank 0
    (1, "--tp 16 --nnodes 2", Split(("n1", "n2", "n3"), (), 8), ("n1", "n2")),
    (8, "--tp 16 --nnodes 2", Split(("n1", "n2", "n3"), (), 8), ("n1", "n2")),  # the third node has no other to go with
    (1, "--tp=16 --nnodes=2", Split(("n1",), ("e1", "e2"), 8), ("e1", "e2")),
])
def test_which_nodes_have_supervisors(engines: int, flags: str, split: Split, want: tuple[str, ...]) -> None:
    config = Config(rollout=RolloutConfig(engine="sglang", num_engines=engines, engine_args=(flags,)))
    assert slurm.engine_hosts(config, split) == want


@pytest.mark.parametrize(("nodes", "world", "engines", "message"), [
    (3, 32, 0, "the allocation has 3 nodes, the run needs 4"), (4, 32, 1, "--nodes=5"), (2, 12, 0, "take a multiple")])
def test_sizes_that_do_not_add_up(nodes: int, world: int, engines: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_nodes([f"n{i}" for i in range(nodes)], world, 8, engines)


def test_srun_gives_a_rank_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "address_of", lambda node: f"address-of-{node}")
    env = dict(STEP)
    environment.adopt(env)
    assert {k: env[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", TERM_STOPS)} == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "address-of-n3",
        TERM_STOPS: "1"}
    assert env["MASTER_PORT"] == str(20000 + 7 * 7 + 2)


def test_torchrun_and_a_loop_of_ssh_are_left_alone() -> None:
    env = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    environment.adopt(env)
    assert env["LOCAL_RANK"] == "1" and TERM_STOPS not in env
    assert environment.launcher_of(env) == "torchrun"


def test_mpirun_needs_the_master_and_then_works() -> None:
    env = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    with pytest.raises(UserError, match="MASTER_ADDR is not set; export it for Open MPI"):
        environment.adopt(dict(env))
    env |= {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    environment.adopt(env)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"]) == ("3", "4", "1")


@pytest.mark.parametrize(("env", "found"), [
    ({}, None), ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, None),
    ({"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    (STEP, "srun")])
def test_who_started_this_process(env: dict[str, str], found: str | None) -> None:
    assert environment.launcher_of(env) == found


def test_the_driver_is_wanted_in_a_batch_script_only() -> None:
    auto = LaunchConfig()
    batch = {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}
    assert slurm.wanted(auto, batch) and not slurm.wanted(auto, {})
    assert not slurm.wanted(auto, batch | {"SLURM_STEP_ID": "0"})
    assert not slurm.wanted(LaunchConfig(launcher="local"), batch)
    with pytest.raises(UserError, match="no Slurm allocation; submit with sbatch"):
        slurm.wanted(LaunchConfig(launcher="slurm"), {})


def test_a_name_that_resolves_to_nothing_or_to_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "NodeName=n1 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=n1 Port=17001"
    monkeypatch.setattr(allocation, "slurm_output", lambda *command: shown)
    monkeypatch.setattr(allocation.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert allocation.address_of("n1") == "10.1.2.3"
    monkeypatch.setattr(allocation.socket, "gethostbyname", lambda name: "10.9.9.9")
    assert allocation.address_of("n1") == "n1"

    def unknown(name: str) -> str:
        raise OSError("unknown")

    monkeypatch.setattr(allocation.socket, "gethostbyname", unknown)
    assert allocation.address_of("n1") == "10.1.2.3"


def test_starts_are_counted_by_their_logs(tmp_path: Path) -> None:
    assert slurm.start_number(tmp_path, 2) == 0
    (tmp_path / "rank-1.log").touch()
    assert slurm.start_number(tmp_path, 2) == 1
    (tmp_path / "rank-0.1.log").touch()
    assert slurm.start_number(tmp_path, 2) == 2


SRUN = """#!/bin/sh
while [ $# -gt 0 ] && [ "$1" != "--" ]; do case "$1" in --*) shift ;; *) break ;; esac; done
{body}
"""


def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Stand-ins for srun and scontrol."""
    calls = f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
    for name, text in (("srun", SRUN.format(body=body)), ("scontrol", calls)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(slurm, "REQUEUE_WAIT", 0.2)
    (tmp_path / "logs").mkdir(exist_ok=True)


def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, requeue: bool = True) -> tuple[int, Path]:
    prepare(tmp_path, monkeypatch, body)
    logs = tmp_path / "logs"
    job = slurm.Job(Split(("localhost",), (), 2), logs, 0, LaunchConfig(requeue=requeue))
    return job.run([sys.executable, "-c", "pass"], 2), logs


def test_a_rank_that_fails_is_named_with_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                        capfd: pytest.CaptureFixture[str]) -> None:
    body = ('echo "the reason" > $(echo $LUSPO_RANK_LOG | sed s/{rank}/1/)\n'
            'echo "srun: error: n7: task 1: Exited with exit code 9" >&2\nexit 9').replace("{rank}", "{{rank}}")
    code, logs = drive(tmp_path, monkeypatch, body.replace("{{", "{").replace("}}", "}"))
    assert code == 9
    said = capfd.readouterr().err
    assert "rank 1 on n7: Exited with exit code 9" in said and "  the reason" in said
    assert (logs / "rank-0.log").exists() and "requeue" not in (tmp_path / "calls").read_text().split()


def test_ranks_that_do_not_end_with_the_failed_one_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             capfd: pytest.CaptureFixture[str]) -> None:
    """Not by SIGTERM, which ranks take for a request to stop. The job has the failed rank's exit code."""
    monkeypatch.setattr(slurm, "AFTER_FAILURE", 0.5)
    body = 'trap "" TERM\ntrap "exit 140" USR2\necho "srun: error: n7: task 1: Exited with exit code 9" >&2\n' \
        "for i in $(seq 300); do sleep 0.1; done\nexit 0"
    began = time.monotonic()
    assert drive(tmp_path, monkeypatch, body)[0] == 9
    assert time.monotonic() - began < 9
    assert "rank 1 on n7: Exited with exit code 9" in capfd.readouterr().err


def test_ranks_that_stopped_because_they_were_asked_to_are_requeued(tmp_path: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="was requeued .* and still runs"):  # a real Slurm would have ended the driver
        drive(tmp_path, monkeypatch, "touch $LUSPO_STOP_MARK")
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "requeue 12"
    assert not list((tmp_path / "logs").glob("stopped*"))


def test_no_requeue_where_none_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert drive(tmp_path, monkeypatch, "touch $LUSPO_STOP_MARK", requeue=False)[0] == 0
    assert "requeue" not in (tmp_path / "calls").read_text().split()


@pytest.mark.parametrize(("supervisor", "trainer", "code"), [
    ("echo no such command; exit 2", "sleep 60", 2),  # bad input of the engines ends the job at once
    ("exit 1", "sleep 1", 0),  # a lost supervisor does not
])
def test_supervisors_of_engine_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervisor: str, trainer: str,
                                     code: int, capfd: pytest.CaptureFixture[str]) -> None:
    prepare(tmp_path, monkeypatch, 'exec "$@"')
    job = slurm.Job(Split(("localhost",), ("e1", "e2"), 1), tmp_path / "logs", 0, LaunchConfig(),
                    ("e1", "e2"), ["sh", "-c", supervisor])
    began = time.monotonic()
    assert job.run(["sh", "-c", trainer], 1) == code
    assert time.monotonic() - began < 20
    said = capfd.readouterr().err
    assert "engines on e1, e2" in said
    assert ("refuse to start" in said and "  no such command" in said) == (code == 2)


def test_a_finished_run_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, logs = drive(tmp_path, monkeypatch, "echo step 1")
    assert code == 0 and (logs / "rank-0.log").read_text() == "step 1\n"


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_sbatch_scripts_have_one_shape() -> None:
    """Each has the same end, which finds the script of its name beside it."""
    scripts = sorted(EXAMPLES.glob("*/*.sbatch"))
    assert len(scripts) >= 8
    ends = {script.read_text().split("set -euo pipefail\n")[1] for script in scripts}
    assert len(ends) == 1
    for script in scripts:
        assert script.with_suffix(".sh").is_file()
        assert "#SBATCH --requeue" in script.read_text() and "#SBATCH --open-mode=append" in script.read_text()


@pytest.mark.parametrize("arguments", [[], ["--run.steps", "3"], ["a  b", "*", "$HOME", "%"]])
def test_a_copy_in_slurms_spool_finds_its_original(tmp_path: Path, arguments: list[str]) -> None:
    home = tmp_path / "my  project [1]" / "examples"
    home.mkdir(parents=True)
    (home / "convert.sh").write_text('printf "%s\\n" "$0" "$@"\n')
    spool = tmp_path / "slurm_script"
    shutil.copy(EXAMPLES / "qwen3_moe/convert.sbatch", spool)
    said = f"   Command={' '.join([str(home / 'convert.sbatch'), *arguments])}\n"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\ncat <<'END'\nJobId=1\n{said}   WorkDir=/\nJobId=2\n{said}END\n")
    (tmp_path / "scontrol").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    done = subprocess.run(["bash", spool, *arguments], env=env, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.splitlines() == [str(home / "convert.sh"), *arguments]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    root = EXAMPLES.parent
    scripts = [*root.glob("examples/*/*.s[hb]*"), *root.glob("tests/slurm/*.s[hb]*"), *root.glob("tools/*.sh"),
               root / ".ci/run"]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_scripts_are_clean() -> None:
    scripts = sorted(EXAMPLES.glob("*/*.s[hb]*"))
    assert len(scripts) >= 11
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)
        text = script.read_text()
        assert "pkill" not in text and "killall" not in text
        assert text.startswith("#!/") and os.access(script, os.X_OK)
