"""Start the trainer ranks of a run on this machine, watch them, and stop them in good order.

Each rank leads its own process group, so that Ctrl-C reaches the launcher alone and the launcher can end a rank with
all its children (controller, reward workers, engines). Rank 0 writes to the terminal, the others to
<run_dir>/logs/rank-N.log. The first Ctrl-C (or SIGTERM, SIGHUP) asks every rank to finish its step, save and exit 0; a
second one ends them at once. When one rank fails, the others are ended and the end of its log is shown. Left out:
several machines (torchrun and srun do that; see ``under_launcher``) and restarts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from luspo_megatron.errors import UserError
from luspo_megatron.launch.environment import launcher_of
from luspo_megatron.launch.rank import LIFELINE
from luspo_megatron.launch.stop import TERM_STOPS

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_STOPPED = 128 + signal.SIGINT
POLL = 0.05  # seconds
KILL_AFTER = 5.0  # seconds between SIGTERM and SIGKILL
FAILURE_GRACE = 1.0  # seconds that the other ranks get to fail by themselves, with their own message
TELLING_GRACE = 30.0  # seconds that rank 0 gets to complain of bad input that another rank has met first
DEBOUNCE = 0.5  # seconds within which a second signal is the same Ctrl-C, forwarded by a wrapper
LOG_LINES = 20


def under_launcher(environ: Mapping[str, str] | None = None) -> bool:
    """Whether torchrun, srun, mpirun or ``launch`` has started this process as one rank of a run (environment.py)."""
    return launcher_of(os.environ if environ is None else environ) is not None


def launch(
    module: str,
    config_path: str,
    world_size: int,
    run_dir: str,
    platform_env: Mapping[str, str] | None = None,
) -> int:
    """Run ``python -m module --config config_path`` as ``world_size`` ranks and return the exit code.

    ``platform_env`` is added to the environment of every rank. Exit code: 0 when all ranks end with 0; that of the
    first rank that failed (128 + N when signal N ended it); 130 after a second Ctrl-C. Main thread only.
    """
    signals = _Signals()
    with signals.installed(), _Lifeline() as lifeline, contextlib.ExitStack() as files:
        logs = open_logs(run_dir, world_size, files)
        port = free_port()
        command = [sys.executable, "-m", "luspo_megatron.launch.rank", module, "--config", config_path]
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                env = rank_environment(os.environ, platform_env or {}, rank, world_size, port)
                ranks.append(_start(rank, command, env | {LIFELINE: str(lifeline)}, logs[rank], lifeline))
            return _watch(ranks, signals)
        finally:
            _end(ranks)


def rank_environment(
    environ: Mapping[str, str], platform_env: Mapping[str, str], rank: int, world_size: int, port: int
) -> dict[str, str]:
    """What torchrun would set for this rank, over ``environ`` and ``platform_env``; one OpenMP thread by default."""
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        TERM_STOPS: "",
    }
    return {"OMP_NUM_THREADS": "1", **environ, **platform_env, **place}


def open_logs(run_dir: str, world_size: int, files: contextlib.ExitStack) -> list[IO[bytes] | None]:
    """The log file of every rank but the first: logs/rank-N.log, from the second start on logs/rank-N.K.log.

    All files of one start have the same K, and none is ever overwritten.
    """
    folder = Path(run_dir) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    while any(log_path(folder, rank, start).exists() for rank in range(1, world_size)):
        start += 1
    logs: list[IO[bytes] | None] = [None]
    for rank in range(1, world_size):
        logs.append(files.enter_context(log_path(folder, rank, start).open("xb")))
    return logs


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    log: str | None
    code: int | None = None  # None while it runs

    def poll(self) -> int | None:
        """The exit code, 128 + N for signal N. The process stays a zombie, so that its group id stays ours."""
        if self.code is None:
            info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                self.code = info.si_status if info.si_code == os.CLD_EXITED else 128 + info.si_status
        return self.code

    def signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class _Signals:
    """Counts the requests to stop. One Ctrl-C that arrives twice (a wrapper forwards it) counts once."""

    def __init__(self) -> None:
        self.count = 0
        self._last = float("-inf")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > DEBOUNCE:  # since the last one that counted: who presses on and on is heard
            self.count += 1
            self._last = now

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Lifeline:
    """The pipe that tells the ranks that this process lives; gives the end that they read."""

    def __enter__(self) -> int:
        self._ends = os.pipe()
        return self._ends[0]

    def __exit__(self, *error: object) -> None:
        for end in self._ends:
            os.close(end)


def _start(rank: int, command: Sequence[str], env: Mapping[str, str], log: IO[bytes] | None, lifeline: int) -> _Rank:
    # The request to stop is blocked until the rank has its handler (rank.py), so that an early one waits.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT if log else None,
            process_group=0,
            pass_fds=(lifeline,),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return _Rank(rank, process, log.name if log else None)  # type: ignore[arg-type]


def _watch(ranks: Sequence[_Rank], signals: _Signals) -> int:
    """Wait for the ranks, pass on requests to stop; returns the exit code of the run."""
    asked = False
    while True:
        running = [rank for rank in ranks if rank.poll() is None]
        failed = [rank for rank in ranks if rank.code]
        if failed:
            return _failure(failed[0], ranks)
        if not running:
            return 0
        if signals.count >= 2:
            print("\nStopping at once.", file=sys.stderr, flush=True)
            return EXIT_STOPPED
        if signals.count == 1 and not asked:
            asked = True
            text = "Stopping: the step is finished and saved first. Press Ctrl-C again to stop at once."
            print(f"\n{text}", file=sys.stderr, flush=True)
            for rank in running:
                os.kill(rank.process.pid, signal.SIGUSR1)  # not Popen.send_signal, which reaps
        time.sleep(POLL)


def _failure(first: _Rank, ranks: Sequence[_Rank]) -> int:
    """Say which rank failed and show the end of its log; nothing where rank 0 has explained bad input already."""
    bad_input = first.code == UserError.exit_code
    awaited = ranks[:1] if bad_input else ranks
    until = time.monotonic() + (TELLING_GRACE if bad_input else FAILURE_GRACE)
    while time.monotonic() < until and any(rank.poll() is None for rank in awaited):
        time.sleep(POLL)
    code = first.code or 1
    told = ranks[0].code == code == UserError.exit_code  # every rank makes the same complaint
    if not told:
        how = f"ended by {_signal_name(code - 128)}" if code > 128 else f"failed with exit code {code}"
        print(f"\nRank {first.number} {how}; the other ranks are ended.", file=sys.stderr)
        if first.log:
            print(f"The end of {first.log}:\n{tail(first.log)}", file=sys.stderr)
        elif len(ranks) > 1 and ranks[1].log:
            print(f"The other ranks' logs are in {Path(ranks[1].log).parent}", file=sys.stderr)
        sys.stderr.flush()
    return code


def tail(path: str, lines: int = LOG_LINES) -> str:
    """The last lines of a text file, each indented by two spaces."""
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - 64 * 1024))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:])


def _end(ranks: Sequence[_Rank]) -> None:
    """End what is left of every rank's process group: SIGTERM, after a while SIGKILL. Reaps the ranks."""
    for rank in ranks:
        rank.signal_group(signal.SIGTERM)
    until = time.monotonic() + KILL_AFTER
    while time.monotonic() < until and any(rank.poll() is None for rank in ranks):
        time.sleep(POLL)
    for rank in ranks:
        rank.signal_group(signal.SIGKILL)
        rank.process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_path(folder: Path, rank: int, start: int) -> Path:
    return folder / (f"rank-{rank}.{start}.log" if start else f"rank-{rank}.log")
