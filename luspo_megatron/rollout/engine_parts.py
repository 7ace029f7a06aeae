"""Engines over several nodes: part 0 is the server, the others are workers on the nodes after it. No torch.

The supervisor of part 0 has the engine, as any supervisor has its own: it makes each start known with the address where
the parts meet. The supervisors of the other parts follow it: they start their part when they see a new start of part 0,
end it when that start is over, and when their part ends by itself they ask for a new start of the whole. Which start is
one too many is decided for the whole engine by part 0's supervisor.
"""

from __future__ import annotations

import asyncio
import logging

from luspo_megatron.config_tools import EnginesConfig
from luspo_megatron.engine_layout import layout_of
from luspo_megatron.rollout.keeper import Slot
from luspo_megatron.rollout.processes import OwnProcess
from luspo_megatron.rollout.registry import (
    BEAT_SECONDS,
    STALE_SECONDS,
    Beats,
    EngineRecord,
    ask_restart,
    engines_in,
    read_file,
)
from luspo_megatron.rollout.supervisor import Supervisor, place_of

log = logging.getLogger("engines")

LOOK_SECONDS = BEAT_SECONDS / 4


class PartSupervisor(Supervisor):
    """The parts 1 and on. A slot's ``process`` is the part; its engine is ``serving`` when part 0 says so."""

    def __init__(self, config: EnginesConfig) -> None:
        super().__init__(config)
        self._head = self.node - self.part
        self._head_file = self.registry_folder / f"node-{self._head}.json"
        self._head_beats = Beats(STALE_SECONDS)
        self._head_engines: dict[int, EngineRecord] = {}
        self._starts: dict[int, str] = {}  # of part 0, that our parts belong to, by engine
        log.info("part %d of each engine; part 0 is node %d's", self.part, self._head)

    def _records(self) -> list[EngineRecord]:
        return []  # the engines are part 0's

    async def _obey(self) -> None:
        """Wishes are for part 0's supervisor. This looks what it says."""
        data = read_file(self._head_file)
        alive = self._head_beats.alive("head", data and (data["id"], data["beat"]))
        self._head_engines = {record.index: record for record in engines_in(data)} if alive else {}

    def _forget_wishes(self) -> None:
        pass

    async def _may_start(self) -> None:
        """Part 0 waits for the memory, and the others for part 0."""

    async def _bring_up(self, slot: Slot) -> None:
        """Wait for the next start of part 0, and start ours."""
        while (head := self._head_engines.get(slot.index)) is None or not head.rendezvous or \
                head.start in ("", self._starts.get(slot.index)):
            if head is not None and head.state == "lost":
                await self._give_up(slot, head.why)
                return
            await asyncio.sleep(LOOK_SECONDS)
        self._starts[slot.index] = head.start
        if head.state == "serving":  # with a part of a supervisor before us, which has ended
            ask_restart(self.registry_folder, head, f"part {self.part} of it has another supervisor now")
            return await self._bring_up(slot)
        slot.process = self._starter.launch_part(slot.name, slot.index - self._first, self.part, head.rendezvous)
        await self._set_ready(slot, True)
        log.info("part %d of %s joins it at %s", self.part, slot.name, head.rendezvous)

    async def _watch(self, slot: Slot) -> None:
        while not self._closing and not slot.lost:
            assert isinstance(slot.process, OwnProcess)
            head, start = self._head_engines.get(slot.index), self._starts[slot.index]
            over = head is None or head.start != start or head.state == "lost"
            if slot.process.returncode is None and not over:
                await asyncio.sleep(LOOK_SECONDS)
                continue
            if head is None or over:
                log.info("part %d of %s is ended: part 0 is not what it belonged to", self.part, slot.name)
            else:
                end = slot.process.describe_end()
                log.warning("%s", end)
                ask_restart(self.registry_folder, head, f"part {self.part} of it, on node {self.node}: {end}")
            await self._retire(slot)
            await self._bring_up(slot)


def supervisor_of(config: EnginesConfig) -> Supervisor:
    """Of this node's engines, or of its parts of engines. Raises UserError for settings that cannot be."""
    part = place_of(config)[0] % layout_of(config.rollout).nodes
    return PartSupervisor(config) if part else Supervisor(config)
