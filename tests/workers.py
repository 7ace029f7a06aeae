"""A pool of worker processes with a gloo world, shared by all distributed tests of a session.

`pool(n).run(function, *args)` calls `function(rank, *args)` in every process and returns the results in rank order. The
function must be importable (module level) and leave no model-parallel state behind (see `layout` in worker code).
A worker that fails or hangs takes its pool down; the next test gets a new one.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import psutil

_POOLS: dict[int, WorkerPool] = {}
RUNS_PER_POOL = 6


def _serve(rank: int, size: int, store_path: str, connection: Any) -> None:
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank),
                      LUSPO_PLATFORM="cpu")
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    from luspo_megatron.platform import platform

    platform()
    dist.init_process_group("gloo", store=dist.FileStore(store_path, size), rank=rank, world_size=size)
    connection.send(("ready", None))
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        function, args, kwargs = call
        try:
            connection.send(("ok", function(rank, *args, **kwargs)))
        except BaseException:  # noqa: BLE001 - reported to the test, which fails
            connection.send(("error", traceback.format_exc()))


class WorkerPool:
    def __init__(self, size: int) -> None:
        context = mp.get_context("spawn")
        self.size, self.runs = size, 0
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._connections, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, theirs),)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._receive(180)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240, **kwargs: Any) -> list[Any]:
        self.runs += 1
        for connection in self._connections:
            connection.send((function, args, kwargs))
        return self._receive(timeout)

    def _receive(self, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        waiting = dict(zip(self._connections, range(self.size), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer in {timeout} s")
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[index]
                try:
                    status, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    status, value = "error", "the process died"
                if status == "error":
                    self.close()
                    raise RuntimeError(f"rank {rank}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        _POOLS.pop(self.size, None)
        for process in self._processes:
            # megatron's checkpoint writer leaves helpers in each rank, which outlive a rank that is killed
            helpers = psutil.Process(process.pid).children(recursive=True) if process.is_alive() else []
            for one in (process, *helpers):
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def pool(size: int) -> WorkerPool:
    # megatron's DDP holds itself through autograd hooks, and with it its model and dozens of process groups
    if size in _POOLS and _POOLS[size].runs >= RUNS_PER_POOL:
        _POOLS[size].close()
    if size not in _POOLS:
        _POOLS[size] = WorkerPool(size)
    return _POOLS[size]


@atexit.register
def _close_all() -> None:
    for workers in list(_POOLS.values()):
        workers.close()
