"""A fleet in the test's process that worker processes push to and generate with, over a local socket.

One call is one connection; the trainer's side of it (``RemoteSide``) is what WeightSync takes for the controller.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from typing import Any

from luspo_megatron.errors import RunError
from luspo_megatron.rollout.client import WeightsStatus
from luspo_megatron.rollout.engine import GenerateRequest
from luspo_megatron.rollout.fleet import Fleet


class FleetHost:
    """Runs a fleet's event loop in a thread. ``events``: what was asked, in order."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.events: list[str] = []
        self.fleet: Fleet = self.call(self._make(args, settings))
        self._listener = Listener()
        self.address = self._listener.address
        threading.Thread(target=self._accept, daemon=True).start()

    async def _make(self, args: Any, settings: Any) -> Fleet:
        return Fleet(*args, **settings)

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def start(self) -> None:
        self.call(self.fleet.start())

    def close(self) -> None:
        self.call(self.fleet.close())
        self._listener.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Any) -> None:
        with connection:
            method, arguments = connection.recv()
            self.events.append(method)
            try:
                connection.send((True, getattr(self, f"_{method}")(**arguments)))
            except Exception as error:
                connection.send((False, str(error)))

    def _weights_status(self) -> WeightsStatus:
        fleet = self.fleet
        return WeightsStatus(fleet.weight_version, fleet.num_workers, fleet.needs_connect, fleet.generation)

    def _connect_weights(self, store_host: str, store_port: int, generation: int, sources: Any, world_size: int,
                         timeout: float, **how: Any) -> None:
        self.call(self.fleet.connect_weights(store_host, store_port, generation, tuple(sources), world_size, timeout,
                                             **how))

    def _update_weights(self, manifest: Any) -> None:
        self.call(self.fleet.update_weights(manifest))

    def _generate(self, request: GenerateRequest) -> Any:
        return self.call(self.fleet.generate(request))


class RemoteSide:
    """EngineSide in a worker process."""

    def __init__(self, address: Any) -> None:
        self._address, self._pool = address, ThreadPoolExecutor(8)

    def call(self, method: str, **arguments: Any) -> Any:
        with Client(self._address) as connection:
            connection.send((method, arguments))
            good, answer = connection.recv()
        if not good:
            raise RunError(answer)
        return answer

    def start(self, method: str, **arguments: Any) -> Any:
        """The same without waiting: a future."""
        return self._pool.submit(self.call, method, **arguments)

    def weights_status(self) -> WeightsStatus:
        status: WeightsStatus = self.call("weights_status")
        return status

    def connect_weights(self, store_host: str, store_port: int, generation: int, sources: Any, **rest: Any) -> Any:
        return self.start("connect_weights", store_host=store_host, store_port=store_port,
                                 generation=generation, sources=sources, **rest)

    def update_weights_async(self, manifest: Any) -> Any:
        return self.start("update_weights", manifest=manifest)
