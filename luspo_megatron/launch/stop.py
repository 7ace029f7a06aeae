"""The request to stop in good order: "finish the step, save, exit 0", sent to a rank as SIGUSR1.

The flag is set by the signal handler and read by the training loop, which is the only place that knows when a step is
finished. ``install`` is called before anything slow is imported (launch/rank.py does), so that a Ctrl-C during start-up
is kept and not deadly. Under Slurm SIGTERM means the same: preemption and scancel send it to every task, some time
before SIGKILL. Left out: telling the other ranks, who get the signal too; a loop of several ranks must agree on the
step at which it stops.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

MARK = "LUSPO_STOP_MARK"  # environment variable: the file that says the run stopped because it was asked to
TERM_STOPS = "LUSPO_TERM_STOPS"  # environment variable: 1 where SIGTERM is such a request (launch/environment.py)
_requested = False


def install() -> None:
    """Let the signals set the flag, and take in the ones that came while they were blocked. Main thread only."""
    signals = [signal.SIGUSR1, *([signal.SIGTERM] if os.environ.get(TERM_STOPS) == "1" else [])]
    for number in signals:
        signal.signal(number, _remember)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def requested() -> bool:
    """Whether this process has been asked to stop after the current step."""
    return _requested


def mark() -> None:
    """Leave word for the Slurm driver that the run has stopped as it was asked to: in good order and before its end."""
    if MARK in os.environ:
        Path(os.environ[MARK]).touch()


def _remember(number: int, frame: object) -> None:
    global _requested
    _requested = True
