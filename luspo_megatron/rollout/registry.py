"""How supervisors (`luspo engines`) and a run find each other: small files in a folder that all their nodes see.

    node-<i>.json       written by supervisor i: a beat that counts up, and its engines (URL, token, pid, GPUs, state)
    restart-<e>.json    engine e is to be started again: written by the run (it is silent, or holds weights of another),
                        or by a supervisor whose part of it has ended (then it says why)
    run.json            written by the run: a beat, so that a supervisor that is asked to end knows whether it is
                        needed, and whether engines that share the trainers' memory may take it (``room``)

Every file is replaced in one piece and readable by its owner only: tokens are in them. Nobody compares clocks: a writer
is alive when its beat changes while one looks, so what a dead process has left behind is never taken for a living one.
Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from luspo_megatron.errors import RunError

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
STALE_SECONDS = 30.0  # without a new beat, after which a supervisor is taken for dead: shared folders lag
RUN_STALE_SECONDS = 5.0  # the same for a run; only looked at when a supervisor has been asked to end
RUN = "run.json"


@dataclass(frozen=True)
class EngineRecord:
    """One engine as its supervisor knows it. ``start`` names this start of it; ``why``: of an engine that is lost;
    ``rendezvous``: where its parts on other nodes are to join it."""

    index: int
    start: str
    state: str  # starting, serving or lost
    url: str = ""
    token: str = ""
    pid: int = 0
    gpus: str = ""
    log: str = ""
    why: str = ""
    rendezvous: str = ""


def make_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def write_file(path: Path, data: Any) -> None:
    """In one piece, for the owner's eyes."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(data, file)
    partial.replace(path)


def read_file(path: Path) -> Any:
    """None where there is no such file (any more)."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def engines_in(data: Any) -> list[EngineRecord]:
    """Of a node's file."""
    return [EngineRecord(**record) for record in data["engines"]]


def ask_restart(folder: Path, record: EngineRecord, why: str = "") -> None:
    """``why``: of a supervisor's wish; empty for the run's, which counts its wishes itself."""
    with contextlib.suppress(OSError):
        write_file(folder / f"restart-{record.index}.json", {"start": record.start, "why": why})


class Beats:
    """Which writers are alive: those whose (identity, beat) has been seen to change, not longer ago than ``stale``."""

    def __init__(self, stale: float) -> None:
        self._stale = stale
        self._seen: dict[str, tuple[Any, float | None]] = {}

    def alive(self, name: str, beat: Any) -> bool:
        """``beat``: what the file says now; None: it is not there."""
        if beat is None:
            self._seen.pop(name, None)
            return False
        last, changed = self._seen.get(name, (beat, None))
        if last != beat:
            changed = time.monotonic()
        self._seen[name] = (beat, changed)
        return changed is not None and time.monotonic() - changed < self._stale


class FleetRegistry:
    """The run's view: its beat, and the engines of living supervisors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.closed = False
        self._room = True
        self._me, self._beat, self._writing = secrets.token_hex(8), 0, asyncio.Lock()
        self._beats = Beats(STALE_SECONDS)
        self._engines: dict[int, EngineRecord] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await asyncio.to_thread(make_folder, self.folder)
        self._task = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            try:
                await self._publish()
                self._engines = await asyncio.to_thread(self._look)
            except OSError as error:
                log.warning("the registry %s cannot be used now: %s", self.folder, error)
            await asyncio.sleep(BEAT_SECONDS)

    async def _publish(self) -> None:
        async with self._writing:
            self._beat += 1
            me = {"id": self._me, "beat": self._beat, "pid": os.getpid(), "room": self._room}
            await asyncio.to_thread(write_file, self.folder / RUN, me)

    async def set_room(self, room: bool) -> None:
        """Whether supervisors may start engines where they share the trainers' memory."""
        self._room = room
        with contextlib.suppress(OSError):  # the next beat says so, or why it cannot
            await self._publish()

    def _look(self) -> dict[int, EngineRecord]:
        found: dict[int, EngineRecord] = {}
        for path in sorted(self.folder.glob("node-*.json")):
            data = read_file(path)
            if self._beats.alive(path.name, data and (data["id"], data["beat"])):
                found |= {record.index: record for record in engines_in(data)}
        return found

    def engine(self, index: int) -> EngineRecord | None:
        """None: no living supervisor has it."""
        return self._engines.get(index)

    def ask_restart(self, record: EngineRecord) -> None:
        if not self.closed:
            ask_restart(self.folder, record)

    async def launch(self, name: str, index: int, deadline: float, before: str,
                     started: Callable[[RemoteProcess], None]) -> tuple[str, str]:
        """Wait until the engine serves in another start than ``before``; (URL, token)."""
        while True:
            record = self.engine(index)
            if record is not None and record.state == "lost":
                raise RunError(f"{name} is lost, says its supervisor: {record.why}")
            if record is not None and record.state == "serving" and record.start != before:
                started(RemoteProcess(name, self, record))
                return record.url, record.token
            if time.monotonic() > deadline:
                state = f"it is {record.state}, log {record.log}" if record else \
                    "no living supervisor has it; is `luspo engines` running on every engine node, with this registry?"
                raise RunError(f"{name} did not come within rollout.start_timeout ({state}; registry {self.folder})")
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        """The engines stay: they are their supervisors'."""
        self.closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            (self.folder / RUN).unlink(missing_ok=True)


class RemoteProcess:
    """One start of an engine that a supervisor owns, with the face of OwnProcess."""

    def __init__(self, name: str, registry: FleetRegistry, record: EngineRecord) -> None:
        self.name, self.start = name, record.start
        self._registry, self._record = registry, record

    @property
    def pid(self) -> int:
        return self._record.pid

    @property
    def returncode(self) -> int | None:
        """None while its supervisor lives and says that this start serves."""
        now = self._registry.engine(self._record.index)
        return None if now is not None and (now.start, now.state) == (self.start, "serving") else 1

    def describe_end(self) -> str:
        now = self._registry.engine(self._record.index)
        how = "still runs" if self.returncode is None else (
            "its supervisor has not been heard of" if now is None else now.why or "has ended")
        return f"{self.name} (pid {self.pid}, {self._record.url}): {how}; its log is {self._record.log}"

    def stop(self) -> None:
        """Have its supervisor end it and start it again. Nothing for one that has ended, or once the run has."""
        if self.returncode is None:
            self._registry.ask_restart(self._record)


def records_to_json(records: list[EngineRecord]) -> list[dict[str, Any]]:
    return [asdict(record) for record in records]
