"""Keeps the engines of a run alive: starts them, notices when one dies or no longer answers, starts it again.

An engine is dead when its process ends, and also when it stays without an answer to health checks: then it is ended
first. Restarts are bounded. Only processes started here are ended, and they end with us. Engines of supervisors
(`luspo engines`, found through a registry) are watched alike, but it is their supervisor that ends and starts them.
External engines (rollout.urls) are used, never started or stopped. What engines are given to do is the fleet's business
(fleet.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luspo_megatron.config import RolloutConfig
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.engine import EngineFailure, EngineKind, RolloutEngine
from luspo_megatron.rollout.processes import EngineProcess
from luspo_megatron.rollout.registry import FleetRegistry, RemoteProcess
from luspo_megatron.rollout.starter import POLL_SECONDS, TOKEN_VARIABLE, Starter, check_start

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
PROBE_SECONDS = 15.0  # between health checks of an engine that seems well
MAX_SILENCES = 3  # health checks in a row without an answer, over at least this time:
SILENCE_SECONDS = 60.0  # a busy machine is slow, not dead


@dataclass
class Slot:
    """One engine's place. ``weight_version`` is what it serves, -1 while that is uncertain; ``connected`` is the
    generation of weight groups that it is part of; ``busy``: taking weights, not to be asked how it is."""

    index: int
    client: RolloutEngine | None = None
    process: EngineProcess | None = None
    url: str = ""
    rendezvous: str = ""  # where the parts of this start meet, for an engine over several nodes
    ready: bool = False
    weight_version: int = 0
    connected: int = -1
    in_flight: int = 0
    max_requests: int = 1
    num_workers: int = 1
    restarts: int = 0
    failures: int = 0  # in a row
    silences: int = 0  # in a row
    silent_since: float = 0.0
    suspect: bool = False  # a request has failed; ask how it is before giving it another
    busy: bool = False
    asleep: bool = False  # its memory is the trainer's
    lost: str = ""  # why it is out of the run for good

    @property
    def name(self) -> str:
        return f"engine-{self.index}"


class EngineKeeper:
    """``model``: Hugging Face folder; ``folder``: where the logs go; ``verify``: engines read weights back;
    ``max_length``: tokens of prompt and response together; ``routing``: (layers, topk) of the model, for the routed
    experts; ``registry``: folder where supervisors make their engines known, None: engines are started here;
    ``first``: number of the first engine here; ``host``: address that engines started here listen on."""

    def __init__(self, config: RolloutConfig, kind: EngineKind, *, model: str, dtype: str, folder: Path,
                 verify: bool = True, max_length: int = 0, routing: tuple[int, int] | None = None,
                 registry: Path | None = None, first: int = 0, host: str = "") -> None:
        self.config, self.kind = config, kind
        self._first = first
        self._registry = FleetRegistry(registry) if registry is not None else None
        self.counts: Counter[str] = Counter()  # retries, restarts
        self.slots = [Slot(first + index) for index in range(len(config.urls) or config.num_engines)]
        # Hexadecimal, since SGLang takes it as a value of a flag, which a dash at its beginning would end.
        self._token = os.environ.get(TOKEN_VARIABLE, "") if config.urls else secrets.token_hex(24)
        self._starter = Starter(config, kind, model, dtype, folder, self._token, verify, max_length, host)
        self._options: dict[str, Any] = {"in_flight": True} if config.in_flight_updates else {}
        if config.routed_experts and routing is not None:
            self._options["routing"] = routing
        self._changed = asyncio.Condition()
        self._watchers: list[asyncio.Task[None]] = []
        self._closing = False

    async def start(self) -> None:
        """Start every engine and wait until all are healthy. Raises RunError with an engine's last log lines."""
        try:
            if self._registry is not None:
                await self._registry.start()
            await self._may_start()
            await asyncio.gather(*(self._bring_up(slot) for slot in self.slots))
        except BaseException:
            await self.close()
            raise
        if not self.config.urls:
            self._watchers = [asyncio.create_task(self._watch(slot)) for slot in self.slots]

    async def _bring_up(self, slot: Slot) -> None:
        deadline = time.monotonic() + self.config.start_timeout

        def started(process: EngineProcess) -> None:
            slot.process = process

        token = self._token
        if self.config.urls:
            slot.url = self.config.urls[slot.index]
        elif self._registry is not None:
            before = slot.process.start if isinstance(slot.process, RemoteProcess) else ""
            slot.url, token = await self._registry.launch(slot.name, slot.index, deadline, before, started)
        else:
            slot.rendezvous = self._starter.rendezvous()
            slot.url = await self._starter.launch(slot.name, slot.index - self._first, deadline, started,
                                                  slot.rendezvous)
        slot.client = self.kind.connect(slot.url, token, self.config.request_timeout, **self._options)
        while True:
            try:
                info = await slot.client.health()
                break
            except EngineFailure as error:
                check_start(self.config, slot.name, slot.process, deadline, str(error))
                await asyncio.sleep(POLL_SECONDS)
        if self.config.urls and info.weight_version:
            raise UserError(f"the engine at {slot.url} holds pushed weights (version {info.weight_version}) of another "
                            "run; restart it")
        if self._registry is not None and info.weight_version and slot.process is not None:
            log.info("%s holds weights of another run (version %d): it is started again", slot.name,
                     info.weight_version)
            slot.process.stop()
            await slot.client.close()
            return await self._bring_up(slot)
        slot.weight_version, slot.max_requests = info.weight_version, max(1, info.max_requests)
        slot.num_workers, slot.connected = info.num_workers, -1
        slot.failures, slot.silences, slot.suspect, slot.busy, slot.asleep = 0, 0, False, False, False
        await self._set_ready(slot, True)
        log.info("%s serves at %s", slot.name, slot.url)

    async def _set_ready(self, slot: Slot, ready: bool) -> None:
        async with self._changed:
            slot.ready = ready
            self._changed.notify_all()

    # ---- watching --------------------------------------------------------------------------------------------

    async def _watch(self, slot: Slot) -> None:
        """Notice the end or the silence of an engine and start it again; give up after MAX_RESTARTS."""
        asked = time.monotonic()
        while not self._closing and slot.process is not None:
            if slot.process.returncode is None:
                if not slot.busy and (slot.suspect or slot.silences or time.monotonic() - asked > PROBE_SECONDS):
                    await self._ask(slot)
                    asked = time.monotonic()
                await asyncio.sleep(POLL_SECONDS if not slot.silences else 1.0)
                continue
            end = slot.process.describe_end()
            log.warning("%s", end)
            await self._retire(slot)
            if slot.restarts == MAX_RESTARTS:
                await self._give_up(slot, f"it was started again {MAX_RESTARTS} times; {end}")
                return
            await self._may_start()
            slot.restarts += 1
            self.counts["engine_restarts"] += 1
            log.warning("%s is started again (%d of at most %d times)", slot.name, slot.restarts, MAX_RESTARTS)
            try:
                await self._bring_up(slot)
            except (RunError, UserError, OSError) as error:
                if slot.process is not None:
                    await asyncio.to_thread(slot.process.stop)
                log.warning("%s", error)

    async def _may_start(self) -> None:
        """Returns when there is memory for an engine to be started, or started again."""

    async def _ask(self, slot: Slot) -> None:
        """A health check. An engine that fails a request but answers here is well again; a silent one is ended."""
        assert slot.client is not None and slot.process is not None
        try:
            await slot.client.health()
        except (RunError, UserError) as error:
            slot.silent_since = slot.silent_since if slot.silences else time.monotonic()
            slot.silences += 1
            silence = time.monotonic() - slot.silent_since
            await self._set_ready(slot, False)
            if slot.silences == 1:
                log.warning("%s does not answer: %s", slot.name, error)
            if slot.silences >= MAX_SILENCES and silence > SILENCE_SECONDS:
                log.error("%s is ended: it has not answered for %.0f s", slot.name, silence)
                await asyncio.to_thread(slot.process.stop)
            return
        slot.suspect, slot.silences = False, 0
        if not slot.ready:
            await self._set_ready(slot, True)

    async def _retire(self, slot: Slot) -> None:
        """Out of service, whatever happens next."""
        client, slot.client = slot.client, None
        await self._set_ready(slot, False)
        if client is not None:
            await client.close()
        if slot.process is not None:
            await asyncio.to_thread(slot.process.stop)  # it has ended; this closes our end of its input

    async def _give_up(self, slot: Slot, why: str) -> None:
        slot.lost = why
        await self._set_ready(slot, False)
        log.error("%s is out of the run: %s", slot.name, why)

    def _logs(self) -> str:
        ends = [f"\n{slot.process.describe_end()}" for slot in self.slots if slot.process is not None]
        return "".join(ends) + "".join(f"\n{slot.name}: {slot.lost}" for slot in self.slots if slot.lost)

    async def close(self) -> None:
        """End the engines that were started here. Can be called twice."""
        self._closing = True
        if self._registry is not None:
            await self._registry.close()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for slot in self.slots:
            if slot.client is not None:
                with contextlib.suppress(Exception):
                    await slot.client.close()
            slot.client, slot.ready = None, False
        await asyncio.gather(*(asyncio.to_thread(slot.process.stop) for slot in self.slots if slot.process))
