"""The engines of a run: started, kept healthy, given work and weights.

Each generate request goes to the least loaded engine that serves the current weights. A request that fails is tried
again, elsewhere where possible, a bounded number of times. An engine whose process ends is started again (bounded)
but serves only once it holds the current weights: until the next push it waits, and ``needs_connect`` tells the
trainer that the weight groups must be built anew. Only processes that the fleet started are ended, and they end with
it. External engines (rollout.urls) are used, never started or stopped. Left out: adding engines during a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luspo_megatron.config import RolloutConfig
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.engine import (
    EngineFailure,
    EngineKind,
    EngineStart,
    GenerateRequest,
    Generation,
    RolloutEngine,
)
from luspo_megatron.rollout.processes import OwnProcess, next_log_path
from luspo_megatron.weights.manifest import EngineConnection

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
POLL_SECONDS = 0.2
TOKEN_VARIABLE = "LUSPO_ENGINE_TOKEN"


@dataclass
class Slot:
    """One engine's place. ``weight_version`` is what it serves; ``connected`` is the generation it is part of."""

    index: int
    client: RolloutEngine | None = None
    process: OwnProcess | None = None
    ready: bool = False
    weight_version: int = 0
    connected: int = -1
    in_flight: int = 0
    max_requests: int = 1
    restarts: int = 0
    failures: int = 0  # in a row
    lost: str = ""  # why it is out of the run for good

    @property
    def name(self) -> str:
        return f"engine-{self.index}"


class Fleet:
    """``model``: Hugging Face folder; ``folder``: where the logs go; ``verify``: engines read weights back."""

    def __init__(self, config: RolloutConfig, kind: EngineKind, *, model: str, dtype: str, folder: Path,
                 verify: bool = True) -> None:
        self.config, self.kind, self.folder = config, kind, folder
        self.model, self.dtype, self.verify = model, dtype, verify
        self.weight_version = 0
        self.generation = -1
        self.counts: Counter[str] = Counter()  # retries, restarts
        self.slots = [Slot(index) for index in range(len(config.urls) or config.num_engines)]
        self._token = os.environ.get(TOKEN_VARIABLE, "") if config.urls else secrets.token_urlsafe(24)
        self._changed = asyncio.Condition()
        self._watchers: list[asyncio.Task[None]] = []
        self._closing = False

    # ---- starting and watching -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every engine and wait until all are healthy. Raises RunError with an engine's last log lines."""
        try:
            await asyncio.gather(*(self._bring_up(slot) for slot in self.slots))
        except BaseException:
            await self.close()
            raise
        if not self.config.urls:
            self._watchers = [asyncio.create_task(self._watch(slot)) for slot in self.slots]

    async def _bring_up(self, slot: Slot) -> None:
        deadline = time.monotonic() + self.config.start_timeout
        with tempfile.TemporaryDirectory(prefix="luspo-engine-") as scratch:
            url = self.config.urls[slot.index] if self.config.urls else await self._launch(slot, scratch, deadline)
        slot.client = self.kind.connect(url, self._token, self.config.request_timeout)
        while True:
            try:
                info = await slot.client.health()
                break
            except EngineFailure as error:
                self._check_start(slot, deadline, str(error))
                await asyncio.sleep(POLL_SECONDS)
        if self.config.urls and info.weight_version:
            raise UserError(f"the engine at {url} holds pushed weights (version {info.weight_version}) of another run; "
                            "restart it")
        slot.weight_version, slot.max_requests = info.weight_version, max(1, info.max_requests)
        slot.failures, slot.connected = 0, -1
        async with self._changed:
            slot.ready = True
            self._changed.notify_all()
        log.info("%s serves at %s", slot.name, url)

    async def _launch(self, slot: Slot, scratch: str, deadline: float) -> str:
        """Start the process; its URL. The operating system gives the port, so that no two runs collide."""
        port_file = Path(scratch) / "url"
        start = EngineStart(self.model, self.dtype, self.config.threads, self.config.batch_size, str(port_file),
                            self.verify)
        threads = str(self.config.threads)
        slot.process = OwnProcess(slot.name, self.kind.command(start), next_log_path(self.folder, slot.name),
                                  {TOKEN_VARIABLE: self._token, "OMP_NUM_THREADS": threads})
        while not port_file.exists():
            self._check_start(slot, deadline, "it does not listen yet")
            await asyncio.sleep(POLL_SECONDS)
        return port_file.read_text().strip()

    def _check_start(self, slot: Slot, deadline: float, last: str) -> None:
        if slot.process is not None and slot.process.returncode is not None:
            kind = UserError if slot.process.returncode == UserError.exit_code else RunError
            raise kind(f"{slot.name} could not start: {slot.process.describe_end()}")
        if time.monotonic() > deadline:
            end = slot.process.describe_end() if slot.process is not None else last
            raise RunError(f"{slot.name} was not healthy within rollout.start_timeout={self.config.start_timeout:g} s "
                           f"({last}); {end}")

    async def _watch(self, slot: Slot) -> None:
        """Notice the end of an engine's process and start it again; give up after MAX_RESTARTS."""
        while not self._closing and slot.process is not None:
            if slot.process.returncode is None:
                await asyncio.sleep(POLL_SECONDS)
                continue
            end = slot.process.describe_end()
            log.warning("%s", end)
            await self._retire(slot)
            if slot.restarts == MAX_RESTARTS:
                await self._give_up(slot, f"it was started again {MAX_RESTARTS} times; {end}")
                return
            slot.restarts += 1
            self.counts["engine_restarts"] += 1
            try:
                await self._bring_up(slot)
            except (RunError, UserError, OSError) as error:
                await asyncio.to_thread(slot.process.stop)
                log.warning("%s", error)

    async def _retire(self, slot: Slot) -> None:
        """Out of service, whatever happens next."""
        async with self._changed:
            slot.ready, client, slot.client = False, slot.client, None
            self._changed.notify_all()
        if client is not None:
            await client.close()
        if slot.process is not None:
            slot.process.stop()  # it has ended; this closes our end of its input

    async def _give_up(self, slot: Slot, why: str) -> None:
        async with self._changed:
            slot.lost, slot.ready = why, False
            self._changed.notify_all()
        log.error("%s is out of the run: %s", slot.name, why)

    # ---- generating ------------------------------------------------------------------------------------------

    def _serving(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.ready and slot.weight_version == self.weight_version]

    def _hope(self) -> bool:
        """True when an engine may still come (back) with the current weights without the trainer's help."""
        starting = any(not slot.ready and not slot.lost for slot in self.slots)
        return bool(self._serving()) or (starting and self.weight_version == 0)

    async def generate(self, request: GenerateRequest) -> list[Generation]:
        """One request, on whichever engine; tried again after an EngineFailure, at most max_retries times."""
        avoid: Slot | None = None
        for attempt in range(self.config.max_retries + 1):
            slot = await self._acquire(avoid)
            try:
                assert slot.client is not None
                answer = await slot.client.generate(request)
                if len(answer) != len(request.prompts):
                    raise EngineFailure(f"{slot.name} gave {len(answer)} of {len(request.prompts)} responses")
                slot.failures = 0
                return answer
            except EngineFailure as error:
                slot.failures += 1
                avoid = slot
                log.warning("request failed on %s (try %d of %d): %s", slot.name, attempt + 1,
                            self.config.max_retries + 1, error)
                if self.config.urls and slot.failures > self.config.max_retries:
                    await self._give_up(slot, str(error))
                if attempt == self.config.max_retries:
                    raise RunError(f"a generate request failed {attempt + 1} times (rollout.max_retries="
                                   f"{self.config.max_retries}); last: {error}{self._logs()}") from error
                self.counts["retries"] += 1
                await asyncio.sleep(POLL_SECONDS)
                if slot.process is not None and slot.process.returncode is not None:
                    slot.ready = False  # its watcher does the rest
            finally:
                await self._release(slot)
        raise AssertionError("unreachable")

    async def _acquire(self, avoid: Slot | None) -> Slot:
        """The least loaded serving engine with room; ``avoid`` only when it is the only one serving."""
        async with self._changed:
            while True:
                serving = self._serving()
                if not serving and not self._hope():
                    raise RunError(f"no engine is left that serves weight version {self.weight_version}{self._logs()}")
                candidates = [slot for slot in serving if slot is not avoid] or serving
                free = [slot for slot in candidates if slot.in_flight < slot.max_requests]
                if free:
                    slot = min(free, key=lambda one: (one.in_flight, one.index))
                    slot.in_flight += 1
                    return slot
                await self._changed.wait()

    async def _release(self, slot: Slot) -> None:
        async with self._changed:
            slot.in_flight = max(0, slot.in_flight - 1)
            self._changed.notify_all()

    def _logs(self) -> str:
        ends = [f"\n{slot.process.describe_end()}" for slot in self.slots if slot.process is not None]
        return "".join(ends) + "".join(f"\n{slot.name}: {slot.lost}" for slot in self.slots if slot.lost)

    # ---- weights ---------------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """Engine workers that the next connection would have."""
        return sum(slot.ready for slot in self.slots)

    @property
    def needs_connect(self) -> bool:
        """True when the weight groups are not what is running now: before the first, or after a restart."""
        ready = [slot for slot in self.slots if slot.ready]
        return self.generation < 0 or any(slot.connected != self.generation for slot in ready) or \
            any(slot.connected == self.generation and not slot.ready for slot in self.slots)

    async def connect_weights(self, host: str, port: int, generation: int, sources: tuple[int, ...],
                              world_size: int, timeout: float) -> None:
        """All ready engines join the groups of ``sources``; returns when every one is in.

        ``world_size`` is what the trainer counted (workers + 1); RunError when an engine died in between.
        """
        ready = [slot for slot in self.slots if slot.ready and slot.client is not None]
        if len(ready) + 1 != world_size:
            raise RunError(f"the weight groups were planned for {world_size - 1} engine workers, {len(ready)} are ready"
                           f"{self._logs()}")
        ranks = {slot.index: rank for rank, slot in enumerate(ready, start=1)}
        await self._on_all(ready, lambda slot, client: client.connect_weights(
            EngineConnection(host, port, generation, sources, world_size, ranks[slot.index], timeout)))
        for slot in ready:
            slot.connected = generation
        self.generation = generation

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        """Every connected engine takes the push; afterwards its version is the fleet's."""
        version = int(manifest["version"])
        if version != self.weight_version + 1 and not (self.weight_version == 0 and version >= 1):
            raise RunError(f"weight push {version} does not follow version {self.weight_version}")
        members = [slot for slot in self.slots if slot.ready and slot.connected == self.generation >= 0]
        if not members:
            raise RunError(f"no engine is connected for weight push {version}{self._logs()}")
        await self._on_all(members, lambda slot, client: client.update_weights(manifest))
        async with self._changed:
            for slot in members:
                slot.weight_version = version
            self.weight_version = version
            self._changed.notify_all()

    async def _on_all(self, slots: list[Slot], action: Callable[[Slot, RolloutEngine], Any]) -> None:
        """Run ``action`` on all at once; wait for every one, then raise the first error with its engine's name."""
        async def one(slot: Slot) -> None:
            if slot.client is None:
                raise RunError(f"{slot.name} died{self._logs()}")
            await action(slot, slot.client)

        results = await asyncio.gather(*(one(slot) for slot in slots), return_exceptions=True)
        for slot, result in zip(slots, results, strict=True):
            if isinstance(result, EngineFailure) and slot.process is not None:
                raise RunError(f"{slot.name}: {result}\n{slot.process.describe_end()}") from result
            if isinstance(result, BaseException):
                raise result

    async def close(self) -> None:
        """End the engines that the fleet started. Can be called twice."""
        self._closing = True
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for slot in self.slots:
            if slot.client is not None:
                with contextlib.suppress(Exception):
                    await slot.client.close()
            slot.client, slot.ready = None, False
        await asyncio.gather(*(asyncio.to_thread(slot.process.stop) for slot in self.slots if slot.process))
