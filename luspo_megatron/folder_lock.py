"""One at a time in a folder, by an advisory lock on a file in it.

The kernel lets go of the lock when the last process that has the file open has died, however it dies: nothing is left
to clean up, and the file may stay. Where the file system has no locks, nobody is kept out.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from luspo_megatron.errors import UserError

POLL = 0.1  # seconds


def take_lock(path: Path, patience: float) -> int | None:
    """The descriptor of `path`, made where it is not, whose closing ends the lock; None where another process still
    holds it after `patience` seconds."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                os.close(fd)
                return None
            time.sleep(POLL)
            continue
        except OSError:
            pass  # no locks here
        return fd


@contextlib.contextmanager
def alone_in(run_dir: str | Path, patience: float) -> Iterator[None]:
    """Keeps every other start out of a run folder, where it would mix its logs, metrics and checkpoints with ours.

    UserError, which names who is there, where that one has not ended after `patience` seconds.
    """
    path = Path(run_dir) / "logs" / "lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = take_lock(path, patience)
    if fd is None:
        there = path.read_text().strip() or "another start"
        raise UserError(f"{run_dir}: {there} is at work in it; wait for its end, or give this run a --run.dir of its "
                        "own")
    try:
        job = os.environ.get("SLURM_JOB_ID", "")
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{f'job {job}, ' if job else ''}process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)
