"""The reward worker: a process that grades one response after another for its parent, and cannot outlive it.

Started by pool.py as ``python -c`` with one end of a socket pair; never forked (the parent has threads) and never
re-imports the parent's main module, so it loads neither torch nor megatron. Bounds it sets for itself: address space,
no core dumps, and a kernel timer that ends a sample for good even when its C code never returns to Python and the
parent is gone. It does not hear SIGINT, SIGTERM and the like: those are for the parent, who finishes its step first.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from luspo_megatron.config import RewardConfig
from luspo_megatron.errors import UserError
from luspo_megatron.reward.base import RewardInput, RewardResult
from luspo_megatron.reward.scorer import RewardScorer, failure

ORPHAN_CHECK_SECONDS = 5.0
TIMER_GRACE_SECONDS = 5.0
_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Ready:
    """The worker's first message: it can grade, or why not. ``user_error``: the message is meant for a person."""

    problem: str | None = None
    user_error: bool = False


def main(descriptor: int, config: RewardConfig) -> None:
    """Serve requests on the socket ``descriptor`` until the parent closes it or is gone."""
    for number in _FOR_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    connection = Connection(descriptor)
    try:
        scorer = RewardScorer(config)
    except UserError as error:
        connection.send(Ready(str(error), user_error=True))
        return
    except BaseException as error:
        connection.send(Ready(f"{type(error).__name__}: {error}"))
        raise
    limit_memory(config.memory_mb)
    connection.send(Ready())
    try:
        while _wait(connection, parent):
            result, healthy = _grade(scorer, connection.recv(), config.timeout)
            connection.send(result)
            if not healthy:
                return
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent has closed the pool, or is gone


def _wait(connection: Connection, parent: int) -> bool:
    """True when a request is there, False when the parent is gone (another process may hold its socket open)."""
    while not connection.poll(ORPHAN_CHECK_SECONDS):
        if os.getppid() != parent:
            return False
    return True


def _grade(scorer: RewardScorer, item: RewardInput, timeout: float) -> tuple[RewardResult, bool]:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process whatever it is doing
    signal.setitimer(signal.ITIMER_REAL, timeout + TIMER_GRACE_SECONDS)
    try:
        return scorer.score(item), True
    except MemoryError:
        return failure(scorer.config, f"memory: more than reward.memory_mb={scorer.config.memory_mb}"), False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def limit_memory(megabytes: int) -> None:
    """Bound this process's address space to what it has now plus ``megabytes`` (0: no bound; Linux only)."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    if not megabytes or not statm.exists():
        return
    now = int(statm.read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = now + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    sys.exit("this module is started by luspo_megatron.reward.pool")
