"""The launcher of local ranks, with small modules in the place of the trainer: no torch, real processes and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from luspo_megatron.launch import local
from luspo_megatron.launch.local import open_logs, rank_environment, tail, under_launcher

REPOSITORY = Path(__file__).resolve().parents[2]
WAIT = 60.0  # seconds; generous for a busy machine, every wait ends as soon as its condition holds


class Launcher:
    """``launch`` in a process of its own, over a module whose source the test gives."""

    def __init__(self, folder: Path, source: str, world_size: int, extra: str = "") -> None:
        self.folder = folder
        (folder / "fake_trainer.py").write_text(
            "import os, signal, subprocess, sys, time\nfrom pathlib import Path\n"
            f"here, rank = Path({str(folder)!r}), int(os.environ['RANK'])\n" + textwrap.dedent(source)
        )
        code = (
            f"import sys; from luspo_megatron.launch import local\n{extra}\n"
            f"run = {str(folder / 'run')!r}\n"
            f"sys.exit(local.launch('fake_trainer', 'resolved.yaml', {world_size}, run, {{'MINE': 'x'}}))"
        )
        env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
        path = os.pathsep.join([str(REPOSITORY), str(folder)])
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=env | {"PYTHONPATH": path},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=WAIT)
        return self.process.returncode, out, err

    def wait_for(self, *names: str) -> None:
        """Wait for files that the ranks write."""
        until(lambda: all((self.folder / name).exists() for name in names))

    def pid(self, name: str) -> int:
        """A process id that a rank wrote into a file."""
        until(lambda: (self.folder / name).exists() and (self.folder / name).read_text().endswith("\n"))
        return int((self.folder / name).read_text())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that nobody reaps in a container counts)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def launcher(tmp_path) -> Iterator[Callable[..., Launcher]]:
    started: list[Launcher] = []

    def start(source: str, world_size: int = 2, extra: str = "") -> Launcher:
        started.append(Launcher(tmp_path, source, world_size, extra))
        return started[-1]

    yield start
    for item in started:
        if item.process.poll() is None:
            item.process.kill()  # its ranks end with it
        for stream in (item.process.stdout, item.process.stderr):
            with contextlib.suppress(Exception):
                stream.close()


def test_ranks_get_their_place_and_the_configuration(launcher, tmp_path):
    code, out, err = launcher(
        """
        names = "LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS MINE".split()
        (here / f"place-{rank}").write_text(" ".join([*(os.environ[n] for n in names), *sys.argv[1:]]))
        (here / f"port-{rank}").write_text(os.environ["MASTER_PORT"])
        assert os.getpgid(0) == os.getpid() and __name__ == "__main__"
        print("from rank", rank)
        """,
        world_size=3,
    ).finish()
    assert (code, out, err) == (0, "from rank 0\n", "")
    for rank in range(3):
        assert (tmp_path / f"place-{rank}").read_text() == f"{rank} 3 3 127.0.0.1 1 x --config resolved.yaml"
    assert len({(tmp_path / f"port-{rank}").read_text() for rank in range(3)}) == 1
    logs = [(tmp_path / f"run/logs/rank-{rank}.log").read_text() for rank in (1, 2)]
    assert logs == ["from rank 1\n", "from rank 2\n"]


def test_logs_of_earlier_starts_are_kept(launcher, tmp_path):
    for text in ("first", "second", "third"):
        assert launcher(f"print({text!r}, flush=True)").finish()[0] == 0
    logs = {path.name: path.read_text() for path in (tmp_path / "run/logs").iterdir()}
    assert logs == {"rank-1.log": "first\n", "rank-1.1.log": "second\n", "rank-1.2.log": "third\n"}


def test_a_rank_that_fails_ends_the_others_and_its_log_is_shown(launcher, tmp_path):
    code, out, err = launcher(
        """
        (here / f"pid-{rank}").write_text(f"{os.getpid()}\\n")
        if rank == 1:
            while not (here / "pid-0").exists(): time.sleep(.01)
            print("the reason")
            sys.exit(7)
        time.sleep(600)
        """
    ).finish()
    assert code == 7 and "Rank 1 failed with exit code 7" in err and "  the reason" in err and "rank-1.log" in err
    assert gone(int((tmp_path / "pid-0").read_text()))


def test_a_rank_that_a_signal_ended(launcher):
    code, _, err = launcher("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)").finish()
    assert code == 128 + signal.SIGKILL and "Rank 1 ended by SIGKILL" in err


def test_bad_input_that_all_ranks_complain_about_is_told_once(launcher):
    code, out, err = launcher("print('no column q', file=sys.stderr); sys.exit(2)").finish()
    assert code == 2 and err == "no column q\n"


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(launcher):
    run = launcher(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        (here / "child").write_text(f"{child.pid}\\n")
        if rank == 0: sys.exit(3)
        time.sleep(600)
        """,
        extra="local.KILL_AFTER = 0.5; local.FAILURE_GRACE = 0.1",
    )
    assert run.finish()[0] == 3
    until(lambda: gone(run.pid("child")))


STEPS = """
from luspo_megatron.launch import stop
(here / f"ready-{rank}").touch()
while not stop.requested(): time.sleep(.01)
(here / f"saved-{rank}").touch()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_lets_every_rank_finish_and_save(launcher, tmp_path, number):
    run = launcher(STEPS)
    run.wait_for("ready-0", "ready-1")
    run.process.send_signal(number)
    code, _, err = run.finish()
    assert code == 0 and err.count("Stopping: the step is finished and saved first") == 1
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


def test_a_signal_during_start_up_is_kept(launcher, tmp_path):
    """The request arrives before the rank has imported anything slow, or even has a handler."""
    run = launcher("(here / f'early-{rank}').touch(); time.sleep(1)\n" + STEPS)
    run.wait_for("early-0")
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 0 and (tmp_path / "saved-1").exists()


def test_a_request_before_the_handler_waits(tmp_path):
    """rank.py itself: SIGUSR1 is pending when the interpreter starts, as when the launcher is very quick."""
    code = (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}); os.kill(os.getpid(), signal.SIGUSR1)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'luspo_megatron.launch.rank', 'asks'])\n"
    )
    (tmp_path / "asks.py").write_text("from luspo_megatron.launch import stop; print(stop.requested())")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(tmp_path)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=WAIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_the_second_signal_stops_at_once(launcher, tmp_path):
    run = launcher("(here / f'pid-{rank}').write_text(f'{os.getpid()}\\n'); time.sleep(600)")
    pids = [run.pid("pid-0"), run.pid("pid-1")]
    run.process.send_signal(signal.SIGINT)
    time.sleep(2 * local.DEBOUNCE)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.finish()
    assert code == 130 and "Stopping at once." in err and all(gone(pid) for pid in pids)


def test_one_ctrl_c_that_arrives_twice_counts_once(launcher, tmp_path):
    run = launcher(STEPS.replace("(here / f\"saved", "time.sleep(1.5)\n(here / f\"saved"))
    run.wait_for("ready-0", "ready-1")
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 0 and (tmp_path / "saved-0").exists()


def test_ranks_and_their_children_die_with_the_launcher(launcher):
    run = launcher(
        """
        child = subprocess.Popen(["sleep", "600"])
        (here / f"child-{rank}").write_text(f"{child.pid}\\n")
        (here / f"pid-{rank}").write_text(f"{os.getpid()}\\n")
        time.sleep(600)
        """
    )
    pids = [run.pid(name) for name in ("pid-0", "pid-1", "child-0", "child-1")]
    run.process.kill()
    until(lambda: all(gone(pid) for pid in pids))


def test_what_a_finished_rank_leaves_behind_is_ended(launcher):
    run = launcher("child = subprocess.Popen(['sleep', '600']); (here / f'c{rank}').write_text(f'{child.pid}\\n')")
    pids = [run.pid("c0"), run.pid("c1")]
    assert run.finish()[0] == 0
    until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        ({"RANK": "3"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, True),
        # The batch script of a job of 4 tasks is no rank.
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, False),
        # srun --ntasks=1 inside a job of 4 tasks.
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"}, False),
    ],
)
def test_under_launcher(environ, expected):
    assert under_launcher(environ) is expected


def test_environment_of_a_rank():
    env = rank_environment({"OMP_NUM_THREADS": "8", "RANK": "9", "A": "1"}, {"A": "2"}, 1, 2, 5)
    assert env["OMP_NUM_THREADS"] == "8" and env["RANK"] == "1" and env["A"] == "2" and env["MASTER_PORT"] == "5"


def test_all_logs_of_one_start_have_the_same_number(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-2.log").write_text("kept")
    with contextlib.ExitStack() as files:
        names = [log and Path(log.name).name for log in open_logs(str(tmp_path), 3, files)]
    assert names == [None, "rank-1.1.log", "rank-2.1.log"] and (tmp_path / "logs/rank-2.log").read_text() == "kept"


def test_tail(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"x" * 200_000 + b"\n" + b"\n".join(b"line %d" % i for i in range(30)) + b"\n\xff\n")
    assert tail(str(path), 2) == "  line 29\n  \N{REPLACEMENT CHARACTER}"
