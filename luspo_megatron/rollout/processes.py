"""Child processes that we own: started in their own process group, logged, ended by us and with us.

``OwnProcess`` holds the write end of the child's standard input and never writes: when this process dies, however it
dies, the pipe closes and the child (which called ``be_owned``) ends too. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

LOOKED_AT = 16 * 2**20  # characters of a log
ERROR_LINE = re.compile(r"(?:.*\bERROR\b.*?\s)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .{1,400})")


def next_log_path(folder: Path, stem: str) -> Path:
    """``stem.log``, or ``stem.1.log``, ``stem.2.log``, ...: the first that is not there, so no restart overwrites."""
    path, number = folder / f"{stem}.log", 0
    while path.exists():
        number += 1
        path = folder / f"{stem}.{number}.log"
    return path


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, for an error message."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join(text.rstrip().splitlines()[-lines:]) or "(the log is empty)"


def first_error(path: Path) -> str:
    """The first line of a log that names an exception, without the logger's words before it; empty: there is none.

    An engine's own processes go on talking after the one that failed, so that its cause is seldom in the last lines.
    """
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        for line in file.read(LOOKED_AT).splitlines():
            if found := ERROR_LINE.match(line):
                return found[1].strip()
    return ""


class EngineProcess(Protocol):
    """A running engine as its keeper sees it, wherever it runs. ``returncode`` is None while it runs."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def describe_end(self) -> str: ...

    def stop(self) -> None: ...


class OwnProcess:
    """One child. ``log``: the file its output goes to (must be new); ``env``: additions to our environment."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        # Slurm sends the ranks' request to stop (SIGUSR1) to every process of a job step: ours are born deaf to it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            with log.open("xb") as file:
                self._process = subprocess.Popen(
                    list(command), stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})}, start_new_session=True,
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it.

        Once it has ended, what is left of its group is killed: an engine's own processes outlive the one we started
        when that is killed. It is still a zombie then, so the group's id cannot belong to anyone else.
        """
        if self._process.returncode is None:
            try:
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                ended = None
            if ended is None:
                return None
            self._signal(signal.SIGKILL)
        return self._process.poll()

    def describe_end(self) -> str:
        """What happened, with the log's first error and its last lines."""
        code = self.returncode
        how = "still runs" if code is None else (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}")
        error, last = first_error(self.log), tail(self.log)
        cause = f"; the first error: {error}" if error and error not in last else ""
        return f"{self.name} (pid {self.pid}) {how}{cause}; the last lines of {self.log}:\n{last}"

    def stop(self, grace: float = 5.0) -> None:
        """Close its input, ask the group to end, and kill what is left of the group after ``grace`` seconds."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if self.returncode is None:
            self._signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            while self.returncode is None and time.monotonic() < deadline:
                time.sleep(0.02)
            if self.returncode is None:
                self._signal(signal.SIGKILL)
                while self.returncode is None:
                    time.sleep(0.02)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)  # start_new_session: the group's id is the child's pid


def be_owned() -> None:
    """Call early in the child: it ends as soon as its owner is gone, and only then.

    Signals that reach a whole job (Ctrl-C, slurm's SIGTERM) are the owner's to act upon: it may want to finish a step.
    """

    def watch() -> None:
        # os.read, not sys.stdin: a thread inside the buffered reader aborts an interpreter that shuts down.
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not inherited by our own children
    threading.Thread(target=watch, name="owner-watch", daemon=True).start()
