"""The engines of a run: given work and weights. (keeper.py starts them and keeps them alive.)

Each generate request goes to the least loaded engine that serves the current weights. A request that fails is tried
again, elsewhere where possible, a bounded number of times. An engine that was started again serves only once it holds
the current weights. With ``on_stale`` the fleet asks for them at once, and the trainer pushes the current version again
to those engines alone, in the middle of a rollout if need be; without it they wait for the next push. Left out: adding
engines during a run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.engine import EngineFailure, GenerateRequest, Generation, RolloutEngine
from luspo_megatron.rollout.keeper import EngineKeeper, Slot
from luspo_megatron.rollout.starter import POLL_SECONDS
from luspo_megatron.weights.manifest import EngineConnection

log = logging.getLogger(__name__)


class Fleet(EngineKeeper):
    """``on_stale()`` is called when a healthy engine holds other weights than the current version's; it may be called
    more than once for the same engine."""

    def __init__(self, *args: Any, on_stale: Callable[[], None] | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self._registry is None and not self.config.urls:
            span = self._starter.layout.nodes
            if span > 1:
                raise UserError(f"rollout.engine_args: an engine over {span} nodes is started by supervisors: use the "
                                "Slurm scripts with as many nodes for engines, or `luspo engines` on each node and "
                                "rollout.registry (docs/engines.md)")
        self.weight_version = 0
        self.generation = -1
        self._late: set[asyncio.Task[None]] = set()  # calls of a push that has failed elsewhere
        self.on_stale = on_stale
        self._short_since: float | None = None  # since when fewer than min_engines are healthy
        self._awake = asyncio.Event()  # cleared while engines sleep: their GPUs' memory is then the trainer's
        self._awake.set()

    # ---- generating ------------------------------------------------------------------------------------------

    def _serving(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.ready and slot.weight_version == self.weight_version]

    @property
    def stale(self) -> list[Slot]:
        """Healthy engines that wait for the current weights."""
        return [slot for slot in self.slots if slot.ready and slot.weight_version != self.weight_version > 0]

    def _hope(self) -> bool:
        """True when an engine may still come (back) with the current weights."""
        starting = any(not slot.ready and not slot.lost for slot in self.slots)
        if self.weight_version == 0:
            return bool(self._serving()) or starting
        return bool(self._serving()) or (self.on_stale is not None and (starting or bool(self.stale)))

    async def _set_ready(self, slot: Slot, ready: bool) -> None:
        await super()._set_ready(slot, ready)
        if sum(slot.ready for slot in self.slots) >= self.config.min_engines:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = time.monotonic()
        # where the trainer's memory is handed over, a push in mid-rollout needs all of it: only when none serves
        late = self.stale and self._awake.is_set() and not (self.config.hand_over == "on" and self._serving())
        if late and self.on_stale is not None:
            self.on_stale()

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
                avoid = slot
                log.warning("request failed on %s (try %d of %d): %s", slot.name, attempt + 1,
                            self.config.max_retries + 1, error)
                await self._doubt(slot, str(error))
                if attempt == self.config.max_retries:
                    raise RunError(f"a generate request failed {attempt + 1} times (rollout.max_retries="
                                   f"{self.config.max_retries}); last: {error}{self._logs()}") from error
                self.counts["retries"] += 1
                await asyncio.sleep(POLL_SECONDS)
            finally:
                await self._release(slot)
        raise AssertionError("unreachable")

    async def _doubt(self, slot: Slot, why: str) -> None:
        """After a failed request: an own engine gets no other before it has answered a health check (its watcher asks
        it, or starts it again); an external one is given up after too many failures in a row."""
        slot.failures += 1
        if not self.config.urls:
            slot.suspect = True
            await self._set_ready(slot, False)
        elif slot.failures > self.config.max_retries:
            await self._give_up(slot, why)

    async def _acquire(self, avoid: Slot | None) -> Slot:
        """The least loaded serving engine with room; ``avoid`` only when it is the only one serving."""
        alone_since = time.monotonic()
        patience = self.config.restart_timeout or 2 * self.config.start_timeout
        async with self._changed:
            while True:
                serving = self._serving()
                if serving:
                    alone_since = time.monotonic()
                if not serving and (not self._hope() or time.monotonic() - alone_since > patience):
                    raise RunError(f"no engine is left that serves weight version {self.weight_version}{self._logs()}")
                self._require_enough(patience)
                candidates = [slot for slot in serving if slot is not avoid] or serving
                free = [slot for slot in candidates if slot.in_flight < slot.max_requests]
                if free:
                    slot = min(free, key=lambda s: (s.in_flight / s.max_requests, s.index))
                    slot.in_flight += 1
                    return slot
                try:
                    await asyncio.wait_for(self._changed.wait(), 10.0)
                except TimeoutError:
                    continue  # look at the clock

    def _require_enough(self, patience: float) -> None:
        """RunError when too few engines are healthy for too long, or cannot be any more."""
        least = self.config.min_engines
        if len(self.slots) - sum(bool(slot.lost) for slot in self.slots) < least:
            raise RunError(f"fewer than rollout.min_engines={least} engines are left{self._logs()}")
        if self._short_since is not None and time.monotonic() - self._short_since > patience:
            raise RunError(f"fewer than rollout.min_engines={least} engines have been healthy for {patience:.0f} s "
                           f"(rollout.restart_timeout){self._logs()}")

    async def _release(self, slot: Slot) -> None:
        async with self._changed:
            slot.in_flight = max(0, slot.in_flight - 1)
            self._changed.notify_all()

    # ---- weights ---------------------------------------------------------------------------------------------

    def members(self, version: int | None = None) -> list[Slot]:
        """Engines that a push of ``version`` goes to: those that lack it when it is the current one, else all."""
        if version is not None and version == self.weight_version > 0:
            return self.stale
        return [slot for slot in self.slots if slot.ready]

    @property
    def num_workers(self) -> int:
        """Engine workers that the next connection would have."""
        return self.workers()

    def workers(self, version: int | None = None) -> int:
        return sum(slot.num_workers for slot in self.members(version))

    @property
    def needs_connect(self) -> bool:
        """True when the weight groups are not what is running now: before the first, or after a restart."""
        return self.must_connect()

    def must_connect(self, version: int | None = None) -> bool:
        connected = [slot for slot in self.slots if slot.connected == self.generation]
        return self.generation < 0 or connected != self.members(version)

    async def connect_weights(self, host: str, port: int, generation: int, sources: tuple[int, ...],
                              world_size: int, timeout: float, version: int | None = None, **how: str) -> None:
        """The engines of a push of ``version`` join the groups of ``sources``; returns when every one is in.

        ``world_size`` is what the trainer counted (workers + 1); RunError when an engine died in between. ``how``: more
        fields of EngineConnection.
        """
        await self._settle()
        members = [slot for slot in self.members(version) if slot.client is not None]
        workers = sum(slot.num_workers for slot in members)
        if workers + 1 != world_size:
            raise RunError(f"the weight groups were planned for {world_size - 1} engine workers, {workers} are ready"
                           f"{self._logs()}")
        ranks: dict[int, int] = {}
        for slot in members:
            ranks[slot.index] = 1 + sum(other.num_workers for other in members if other.index < slot.index)
        await self._on_all(members, lambda slot, client: client.connect_weights(
            EngineConnection(host, port, generation, sources, world_size, ranks[slot.index], timeout, **how)))
        for slot in self.slots:
            slot.connected = generation if slot in members else -1
        self.generation = generation

    async def update_weights(self, manifest: dict[str, Any]) -> None:
        """Every connected engine takes the push; afterwards its version is the fleet's.

        RunError when one could not: none of them serves then until a whole push has come through. The same version may
        be pushed again.
        """
        await self._settle()
        version = int(manifest["version"])
        if version not in (self.weight_version, self.weight_version + 1) and not (
                self.weight_version == 0 and version >= 1):
            raise RunError(f"weight push {version} does not follow version {self.weight_version}")
        members = [slot for slot in self.slots if slot.ready and slot.connected == self.generation >= 0]
        if not members:
            raise RunError(f"no engine is connected for weight push {version}{self._logs()}")
        for slot in members:
            slot.weight_version = -1
        log.info("weight push %d begins on %s", version, ", ".join(slot.name for slot in members))
        try:
            await self._on_all(members, lambda slot, client: client.update_weights(manifest))
        except BaseException:
            for slot in members:
                slot.connected = -1
            raise
        async with self._changed:
            for slot in members:
                slot.weight_version = version
            self.weight_version = version
            self._changed.notify_all()
        log.info("weight version %d is on %s", version, ", ".join(slot.name for slot in members))

    # ---- memory (hand_over.py) -----------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Every engine gives its memory back. One that is just being started (again) comes up first."""
        async with self._changed:
            while any(not slot.ready and not slot.lost for slot in self.slots):
                await self._changed.wait()
            await self._set_awake(False)
        members = [slot for slot in self.slots if slot.ready and not slot.asleep]
        await self._on_all(members, lambda slot, client: client.sleep())
        for slot in members:
            slot.asleep, slot.weight_version = True, -1
        log.info("asleep: %s", ", ".join(slot.name for slot in members))

    async def wake(self, what: str) -> None:
        """``what``: "weights" or "kv_cache"; afterwards an engine that has died meanwhile may be started again. Where
        none is left alive that happens at once, since the next push needs one."""
        if not any(slot.ready for slot in self.slots):
            await self._set_awake(True)
            async with self._changed:
                while not any(slot.ready for slot in self.slots) and not all(slot.lost for slot in self.slots):
                    await self._changed.wait()
        members = [slot for slot in self.slots if slot.ready and slot.asleep]
        await self._on_all(members, lambda slot, client: client.wake(what))
        log.info("%s awake: %s", what, ", ".join(slot.name for slot in members))
        if what == "kv_cache":
            for slot in members:
                slot.asleep = False
            await self._set_awake(True)

    async def _set_awake(self, awake: bool) -> None:
        if self._registry is not None:
            await self._registry.set_room(awake)
        (self._awake.set if awake else self._awake.clear)()

    async def _may_start(self) -> None:
        await self._awake.wait()

    async def _on_all(self, slots: list[Slot], action: Callable[[Slot, RolloutEngine], Any]) -> None:
        """Run ``action`` on all at once. The first error is raised as soon as it comes, with its engine's name: the
        others may be stuck until the trainer, who learns of it by this, has broken the push off (`_settle`)."""
        async def one(slot: Slot) -> None:
            if slot.client is None:
                raise RunError(f"{slot.name} died{self._logs()}")
            slot.busy = True
            try:
                await action(slot, slot.client)
            except EngineFailure:
                slot.suspect = True
                raise
            finally:
                slot.busy = False

        if not slots:
            return
        # With the process that takes part: the keeper may soon have another one in a dead one's place.
        tasks = {asyncio.create_task(one(slot)): (slot, slot.process) for slot in slots}
        try:
            done, late = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        self._late |= late
        for task in done:
            (slot, process), error = tasks[task], task.exception()
            if isinstance(error, EngineFailure) and process is not None:
                for _ in range(20):  # a connection breaks a moment before the end of its process can be seen
                    if process.returncode is not None:
                        break
                    await asyncio.sleep(0.05)
                raise RunError(f"{slot.name}: {error}\n{process.describe_end()}") from error
            if error is not None:
                raise error

    async def _settle(self) -> None:
        """Engines that were still at a push which has failed give up before they are given the next one."""
        late, self._late = self._late, set()
        if not late:
            return
        done, stuck = await asyncio.wait(late, timeout=self.config.request_timeout)
        for task in done:
            task.exception()  # it is a consequence of the one that was raised
        if stuck:
            self._late = stuck
            raise RunError(f"{len(stuck)} engines have not given up a failed push within "
                           f"{self.config.request_timeout:g} s{self._logs()}")

    async def close(self) -> None:
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        self._late = set()
        await super().close()
