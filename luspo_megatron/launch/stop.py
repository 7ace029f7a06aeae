"""The request to stop in good order: "finish the step, save, exit 0", sent to a rank as SIGUSR1.

The flag is set by the signal handler and read by the training loop, which is the only place that knows when a step is
finished. ``install`` is called before anything slow is imported (launch/rank.py does), so that a Ctrl-C during start-up
is kept and not deadly. Left out: telling the other ranks, who get the signal too; a loop of several ranks must agree on
the step at which it stops.
"""

from __future__ import annotations

import signal

_requested = False


def install(signals: tuple[signal.Signals, ...] = (signal.SIGUSR1,)) -> None:
    """Let these signals set the flag, and take in the ones that came while they were blocked. Main thread only."""
    for number in signals:
        signal.signal(number, _remember)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def requested() -> bool:
    """Whether this process has been asked to stop after the current step."""
    return _requested


def _remember(number: int, frame: object) -> None:
    global _requested
    _requested = True
