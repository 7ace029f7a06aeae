"""RewardPool: grades responses in worker processes, bounded in time and memory, from asyncio.

One thread per worker does the blocking talk (send, wait, kill, replace), so the controller's event loop stays free and
the pool belongs to no particular loop. A sample that hangs or kills its worker gets 0 and a counted warning; the
worker is replaced before its next sample. Workers are fresh interpreters, not forks of a process with threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import TracebackType

from luspo_megatron.config import RewardConfig
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.reward.base import RewardInput, RewardResult
from luspo_megatron.reward.scorer import failure, reward_violations

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 5
# The child takes the parent's import path (a plug-in may live beside the parent's script) before anything else.
_START = (
    "import pickle, sys; path, fd, config = pickle.loads(bytes.fromhex(sys.stdin.read())); sys.path[:] = path; "
    "from luspo_megatron.reward.worker import main; main(fd, pickle.loads(config))"
)


class _Worker:
    """One child process and the parent's end of its socket."""

    def __init__(self, config: RewardConfig) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            path = [entry or os.getcwd() for entry in sys.path]
            start = pickle.dumps((path, theirs.fileno(), pickle.dumps(config)))
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=2,  # what a reward prints must not end up in the parent's output
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a terminal's Ctrl-C is for the parent; and its own group can be killed whole
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(start.hex().encode())
            self.process.stdin.close()
        self.connection = Connection(ours.detach())

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self, seconds: float) -> None:
        """Raises UserError for a mistake in the reward settings, RunError when the worker cannot start."""
        try:
            if not self.connection.poll(seconds):
                raise RunError(f"a reward worker was not ready after {seconds:.0f} s")
            ready = self.connection.recv()
        except (EOFError, OSError):
            self.process.wait(10)
            raise RunError(f"a reward worker ended at its start with code {self.process.returncode}") from None
        if ready.problem is not None:
            raise (UserError if ready.user_error else RunError)(ready.problem)

    def kill(self) -> None:
        """End the process and whatever it started in its group."""
        if self.process.returncode is None:  # not reaped yet, so the id is still ours
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def discard(self) -> None:
        self.kill()
        self.connection.close()


class RewardPool:
    """``reward.workers`` processes behind ``await pool.score(items)``.

    ``counts``: scored, and of these timeout, died, memory, error; restarted counts replaced workers.
    Raises UserError at ``start`` for wrong settings (a missing plug-in, ...). Only when workers can no longer be
    started at all (five times in a row) does ``score`` raise RunError.
    """

    def __init__(self, config: RewardConfig, *, start_timeout: float = 120.0) -> None:
        violations = reward_violations(config)
        if violations:
            raise UserError("\n".join(violations))
        self.config = config
        self.start_timeout = start_timeout
        self.counts: Counter[str] = Counter()
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()  # slots whose worker has nothing to do
        self._threads = ThreadPoolExecutor(config.workers, thread_name_prefix="reward")
        self._lock = threading.Lock()
        self._started = self._closed = False
        self._failed_starts = 0

    def start(self) -> RewardPool:
        """Start every worker and wait until all can grade; a second call does nothing."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            if self._started:
                return self
            self._workers = [_Worker(self.config) for _ in range(self.config.workers)]
            deadline = time.monotonic() + self.start_timeout
            try:
                for worker in self._workers:
                    worker.wait_ready(max(0.0, deadline - time.monotonic()))
            except BaseException:
                for worker in self._workers:
                    worker.discard()
                self._workers = []
                raise
            for slot in range(self.config.workers):
                self._idle.put(slot)
            self._started = True
        return self

    async def score(self, items: Sequence[RewardInput]) -> list[RewardResult]:
        """One result per item, in the items' order."""
        await asyncio.to_thread(self.start)
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(self._threads, self._grade, item) for item in items)))

    def _grade(self, item: RewardInput) -> RewardResult:
        slot = self._idle.get()
        try:
            self._ensure_alive(slot)
            result = self._grade_on(self._workers[slot], item)
        finally:
            self._idle.put(slot)
        self._count(result, item)
        return result

    def _grade_on(self, worker: _Worker, item: RewardInput) -> RewardResult:
        try:
            worker.connection.send(item)
            if not worker.connection.poll(self.config.timeout):
                worker.kill()
                return failure(self.config, f"timeout: not graded within reward.timeout={self.config.timeout:g} s")
            result: RewardResult = worker.connection.recv()
        except (TypeError, AttributeError, pickle.PicklingError) as error:  # nothing has been sent yet
            return failure(self.config, f"error: the row cannot be sent to a worker: {error}")
        except (EOFError, OSError):
            worker.kill()
            return failure(self.config, f"died: the worker ended with code {worker.process.returncode}")
        if result.failed is not None and result.failed.startswith("memory"):
            worker.kill()
        return result

    def _ensure_alive(self, slot: int) -> None:
        """Replace a dead worker before it is given a sample, so that no sample pays for another's fault."""
        if self._workers[slot].alive:
            return
        while True:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the reward pool is closed")
                self._workers[slot].discard()
                self._workers[slot] = worker = _Worker(self.config)
                self.counts["restarted"] += 1
            try:
                worker.wait_ready(self.start_timeout)
            except (RunError, UserError) as error:
                worker.kill()
                with self._lock:
                    self._failed_starts += 1
                    if self._failed_starts >= MAX_FAILED_STARTS:
                        raise RunError(f"reward workers cannot be started any more: {error}") from None
                continue
            with self._lock:
                self._failed_starts = 0
            return

    def _count(self, result: RewardResult, item: RewardInput) -> None:
        with self._lock:
            self.counts["scored"] += 1
            if result.failed is None:
                return
            kind = result.failed.split()[0].rstrip(":")
            self.counts[kind] += 1
            count = self.counts[kind]
        if count & (count - 1) == 0:  # the 1st, 2nd, 4th, 8th, ...: heard, but not a flood
            tail = item.response_text[-80:]
            logger.warning("reward 0 for a sample (%s; %d such so far); response ends %r", result.failed, count, tail)

    def close(self) -> None:
        """End the workers (only these) and wait for them; a sample in flight comes back as failed. Idempotent."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.connection.close()
        self._workers = []

    def __enter__(self) -> RewardPool:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
