"""Worker processes for a conversion, and the line that says how far it is.

Workers are forked, so that they share the parent's imports and its opened checkpoint (`context`) and start at once;
they die with the parent. No CUDA, no megatron in any of them.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing as mp
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TextIO

import torch

from luspo_megatron.convert.tensors import CheckpointError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PR_SET_PDEATHSIG = 1

_context: Any = None
_counter: Any = None


def default_workers() -> int:
    return max(1, min(8, len(os.sched_getaffinity(0))))


def advance(nbytes: int) -> None:
    """Called by tasks: so many more bytes are done."""
    with _counter.get_lock():
        _counter.value += nbytes


class Progress:
    """Bytes done, rate and time left: one line that is rewritten in a terminal, else a line now and then."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None, quiet: bool = False) -> None:
        self.label, self.total, self.quiet = label, total, quiet
        self._stream = stream or sys.stderr
        self._began = self._shown = time.monotonic()
        self._live = self._stream.isatty()

    def show(self, done: int, last: bool = False) -> None:
        now = time.monotonic()
        if self.quiet or not (last or now - self._shown >= (0.5 if self._live else 10.0)):
            return
        self._shown = now
        seconds = max(now - self._began, 1e-9)
        rate = done / seconds
        share = 100 * done / self.total if self.total else 100
        left = f"{(self.total - done) / rate:.0f} s left" if rate and not last else f"{seconds:.1f} s"
        line = (f"{self.label}: {done / 1e9:.2f} of {self.total / 1e9:.2f} GB ({share:.0f}%), {rate / 1e6:.0f} MB/s, "
                f"{left}")
        if self._live:
            self._stream.write(f"\r\x1b[K{line}" + ("\n" if last else ""))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


class Pool:
    """Runs `function(context, *task)` in workers. Use as a context manager."""

    def __init__(self, workers: int, context: Any, quiet: bool = False) -> None:
        self._quiet = quiet
        fork = mp.get_context("fork")
        self._counter = fork.Value("q", 0)
        self._executor = ProcessPoolExecutor(workers, mp_context=fork, initializer=_start,
                                             initargs=(context, self._counter, os.getpid()))

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def run(self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], *, progress: Progress,
            finished: Callable[[tuple[Any, ...], Any], None], before: int = 0) -> int:
        """Runs all tasks and calls `finished(task, result)` for each as it ends; the first failure ends the run.

        `before` and the result are bytes of `progress`.
        """
        base = self._counter.value - before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: they hold no locks of ours
            waiting: dict[Future[Any], tuple[Any, ...]] = {
                self._executor.submit(_call, function, task): task for task in tasks}
        try:
            while waiting:
                done, _ = wait(waiting, timeout=0.25, return_when=FIRST_COMPLETED)
                for future in done:
                    finished(waiting.pop(future), future.result())
                progress.show(self._counter.value - base)
        except BrokenProcessPool as error:
            raise CheckpointError("a worker process was killed (out of memory?); try fewer --workers and go on with "
                                  "--resume") from error
        finally:
            for future in waiting:
                future.cancel()
        return int(self._counter.value - base)


def _start(context: Any, counter: Any, parent: int) -> None:
    global _context, _counter
    _context, _counter = context, counter
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _call(function: Callable[..., Any], task: tuple[Any, ...]) -> Any:
    return function(_context, *task)
