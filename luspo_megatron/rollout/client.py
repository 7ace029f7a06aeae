"""ControllerClient: the controller as trainer rank 0 sees it. Blocking calls, no torch, no asyncio.

A reader thread hands answers to the calls that wait for them, so a weight update can be under way in the controller
while this process sends the weights. When the controller dies, every waiting and every later call raises RunError at
once, with the last lines of its log.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luspo_megatron.errors import RunError
from luspo_megatron.rollout.processes import OwnProcess, next_log_path
from luspo_megatron.rollout.wire import ERRORS, encode, group_from_dict, receive_message
from luspo_megatron.types import Group

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class WeightsStatus:
    """``num_workers`` engine workers would join now; ``needs_connect``: build the groups anew (next generation)
    before the next push, because it is the first or an engine was replaced; ``version``: what engines serve."""

    version: int
    num_workers: int
    needs_connect: bool
    generation: int


class Handle:
    """A call under way."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, seconds: float) -> bool:
        """Whether the answer (or the error) has come, after at most so long."""
        return bool(wait([self._future], seconds).done)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer. Raises the controller's RunError or UserError; TimeoutError after ``timeout`` s."""
        return self._future.result(timeout)


class ControllerClient:
    """Use ``ControllerClient.start``. ``statistics``: numbers of the last ``next_batch`` (seconds, retries, ...).

    ``push_version``: the version of the next push, set before it; a push of the version that engines serve already goes
    only to those that lack it. ``on_progress(phase, done, total)`` counts sequences during next_batch and evaluate; it
    runs in the reader thread.
    """

    def __init__(self, process: OwnProcess, connection: socket.socket, on_progress: Progress | None = None) -> None:
        self._process, self._connection, self._on_progress = process, connection, on_progress
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._ended: str | None = None
        self._news = threading.Condition()
        self._stale = False  # an engine waits for the current weights
        self.push_version: int | None = None
        self.statistics: dict[str, float] = {}
        self._reader = threading.Thread(target=self._read, name="controller-reader", daemon=True)
        self._reader.start()

    @classmethod
    def start(cls, config_path: str | Path, run_dir: str | Path, *, on_progress: Progress | None = None,
              command: list[str] | None = None) -> ControllerClient:
        """Start the controller and wait until data, engines and rewards are ready.

        ``config_path``: the resolved configuration (YAML); the log goes to <run_dir>/logs/controller.log. ``command``
        replaces the module in tests. Raises UserError or RunError, with nothing left running.
        """
        command = command or [sys.executable, "-m", "luspo_megatron.rollout.controller_server"]
        with tempfile.TemporaryDirectory(prefix="luspo-") as folder:  # a socket's path must be short
            path = Path(folder) / "controller"
            arguments = ["--config", str(config_path), "--socket", str(path), "--run-dir", str(run_dir)]
            process = OwnProcess("controller", [*command, *arguments],
                                 next_log_path(Path(run_dir) / "logs", "controller"))
            try:
                client = cls(process, _connect(path, process), on_progress)
            except BaseException:
                process.stop()
                raise
        try:
            client.call("start")
        except BaseException:
            client.close()
            raise
        return client

    def call_async(self, method: str, **params: Any) -> Handle:
        """Send a call; the handle's result is its answer."""
        future: Future[Any] = Future()
        with self._lock:
            if self._ended is not None:
                raise RunError(self._ended)
            number = next(self._numbers)
            self._waiting[number] = future
            # When the controller is gone, the reader notices the same and fails the future, with the reason.
            with contextlib.suppress(OSError):
                self._connection.sendall(encode({"id": number, "method": method, "params": params}))
        return Handle(future)

    def call(self, method: str, **params: Any) -> Any:
        return self.call_async(method, **params).result()

    def _read(self) -> None:
        while (message := receive_message(self._connection)) is not None:
            if "progress" in message:
                if self._on_progress is not None:
                    with contextlib.suppress(Exception):  # a fault in a display must not end the run
                        event = message["progress"]
                        self._on_progress(event["phase"], event["done"], event["total"])
                continue
            if "stale" in message:
                self._tell(stale=True)
                continue
            with self._lock:
                future = self._waiting.pop(message["id"])
            if "error" in message:
                future.set_exception(ERRORS[message["error"]["kind"]](message["error"]["text"]))
            else:
                future.set_result(message["result"])
            self._tell()
        deadline = time.monotonic() + 2.0
        while self._process.returncode is None and time.monotonic() < deadline:
            time.sleep(0.02)  # its exit code belongs in the message
        with self._lock:
            self._ended = f"the controller is gone: {self._process.describe_end()}"
            waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.set_exception(RunError(self._ended))
        self._tell()

    def _tell(self, stale: bool = False) -> None:
        with self._news:
            self._stale = self._stale or stale
            self._news.notify_all()

    def wait(self, handle: Handle, unless: Callable[[], bool] = lambda: False) -> bool:
        """Until the call is done, or ``unless`` is true while it is not (both True); or until an engine that was
        started again needs the current weights (False): push them once more, with ``push_version`` unchanged, and wait
        again. ``unless`` is asked every tenth of a second: a signal handler's flag wakes nobody."""
        while True:
            with self._news:
                while not (handle.done() or self._stale or unless()):
                    self._news.wait(0.1)
                if handle.done() or not self._stale:
                    return True
                self._stale = False
            if self.weights_status().num_workers:
                return False

    # ---- what it can do --------------------------------------------------------------------------------------

    def next_batch(self, rollout_id: int) -> list[Group]:
        """The groups of one rollout step, rewards and ``sample.correct`` filled in."""
        return self.batch_of(self.next_batch_async(rollout_id))

    def next_batch_async(self, rollout_id: int) -> Handle:
        return self.call_async("next_batch", rollout_id=rollout_id)

    def batch_of(self, handle: Handle) -> list[Group]:
        """The groups of a finished ``next_batch_async``."""
        answer = handle.result()
        self.statistics = answer["statistics"]
        return [group_from_dict(group) for group in answer["groups"]]

    def evaluate(self, samples: int, temperature: float, greedy: bool, size: int, seed: int) -> dict[str, float]:
        """pass_at_1, pass_at_1_se, pass_at_k, greedy (if wanted), mean_length, reward, truncated, n on held-out
        prompts; ``size`` 0: all of them."""
        result: dict[str, float] = self.evaluate_async(samples, temperature, greedy, size, seed).result()
        return result

    def evaluate_async(self, samples: int, temperature: float, greedy: bool, size: int, seed: int) -> Handle:
        return self.call_async("evaluate", samples=samples, temperature=temperature, greedy=greedy, size=size,
                               seed=seed)

    def weights_status(self) -> WeightsStatus:
        """What a push of ``push_version`` would find."""
        return WeightsStatus(**self.call("weights_status", version=self.push_version))

    def connect_weights(self, store_host: str, store_port: int, generation: int, sources: tuple[int, ...], *,
                        world_size: int, timeout: float = 600.0, transport: str = "process_group",
                        folder: str = "") -> Handle:
        """Engines start to join the groups. Does not wait: build the senders, then take ``.result()``.

        ``world_size``: weights_status().num_workers + 1. ``generation``: larger than every earlier one of the run.
        ``transport``, ``folder``: as in EngineConnection.
        """
        return self.call_async("connect_weights", store_host=store_host, store_port=store_port, generation=generation,
                               sources=list(sources), world_size=world_size, timeout=timeout, transport=transport,
                               folder=folder, version=self.push_version)

    def update_weights_async(self, manifest: Mapping[str, Any]) -> Handle:
        """Engines start to receive a push (Manifest.to_dict()); send it, then take ``.result()``."""
        return self.call_async("update_weights", manifest=dict(manifest))

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint; between steps only."""
        state: dict[str, Any] = self.call("state")
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; push its weights (any version >= 1, or none for version 0) before sampling."""
        self.call("load_state", state=dict(state))

    def close(self) -> None:
        """End the controller, its engines and reward workers. Can be called twice; never raises for a dead one."""
        with contextlib.suppress(RunError, TimeoutError):
            if self._process.returncode is None:
                self.call_async("close").result(20.0)
        self._process.stop()
        self._connection.close()

    def __enter__(self) -> ControllerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _connect(path: Path, process: OwnProcess, timeout: float = 120.0) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            return connection
        except OSError:
            connection.close()
        if process.returncode is not None:
            raise RunError(f"the controller could not start: {process.describe_end()}")
        if time.monotonic() > deadline:
            raise RunError(f"the controller did not listen within {timeout:g} s: {process.describe_end()}")
        time.sleep(0.05)
