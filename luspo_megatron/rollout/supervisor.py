"""`luspo engines`: starts this node's share of a run's engines, makes them known, keeps them alive. No torch.

Slurm starts one per engine node (launch/slurm.py); by hand it is started on each engine machine with the run's
configuration, the same registry folder and --node I --nodes N, and the run is given rollout.registry. Supervisor I of N
has the engines I * num_engines / N and on; an engine over several nodes (--nnodes among rollout.engine_args) takes as
many supervisors in a row (engine_parts.py). An engine that dies is started again, a bounded number of times; one that
the run finds silent, or that holds another run's weights, is started again when the run asks for it. Engines that share
the trainers' GPUs (rollout.hand_over) start only when the run has handed its memory over.

SIGTERM ends the engines and then the supervisor. A run that still uses them is let finish first, at most
launch.stop_grace seconds, because Slurm's preemption signals everybody and the trainers then finish their step; a
second signal ends them at once. When the supervisor is killed its engines end by themselves. Exit codes: 0 asked to
end, 1 no engine is left, 2 bad input.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import socket
import time
from pathlib import Path

from luspo_megatron.config_tools import EnginesConfig
from luspo_megatron.engine_layout import layout_of
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.launch.allocation import address_of, default_registry
from luspo_megatron.rollout.engine import load_engine_kind
from luspo_megatron.rollout.keeper import EngineKeeper, Slot
from luspo_megatron.rollout.registry import (
    BEAT_SECONDS,
    RUN,
    RUN_STALE_SECONDS,
    Beats,
    EngineRecord,
    make_folder,
    read_file,
    records_to_json,
    write_file,
)
from luspo_megatron.rollout.starter import gpus_of, with_hand_over

log = logging.getLogger("engines")


def share_of(num_engines: int, node: int, nodes: int, span: int = 1) -> range:
    """The engines of supervisor ``node`` of ``nodes``, where an engine takes ``span`` nodes in a row: the first groups
    of nodes have one more where it does not divide."""
    if not 0 <= node < nodes:
        raise UserError(f"--node {node}: take 0 to {nodes - 1} (--nodes {nodes})")
    if nodes % span:
        raise UserError(f"rollout.engine_args: engines over {span} nodes each cannot share {nodes} engine nodes; take "
                        f"a multiple of {span} (launch.engine_nodes)")
    groups, group = nodes // span, node // span
    if num_engines < groups:
        raise UserError(f"--rollout.num_engines {num_engines}: leaves some of {nodes} engine nodes without an engine; "
                        f"take at least {groups}, or fewer nodes (launch.engine_nodes)")
    each, more = divmod(num_engines, groups)
    first = group * each + min(group, more)
    return range(first, first + each + (group < more))


def place_of(config: EnginesConfig) -> tuple[int, int]:
    """(this node, nodes): the flags, else this task's place in its Slurm step, else the only one."""
    if config.nodes:
        return config.node, config.nodes
    if "SLURM_STEP_ID" in os.environ:
        return int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    return 0, 1


def host_of(config: EnginesConfig) -> str:
    """Where the engines listen: --host, else under Slurm the address that other nodes reach this one at."""
    if config.host or "SLURM_STEP_ID" not in os.environ:
        return config.host or "127.0.0.1"
    return address_of(os.environ.get("SLURMD_NODENAME") or socket.gethostname())


class Supervisor(EngineKeeper):
    """The engines of one node. Used by ``main``; ``ask_to_end`` from a signal handler."""

    def __init__(self, config: EnginesConfig) -> None:
        self.node, nodes = place_of(config)
        layout = layout_of(config.rollout)
        mine = share_of(config.rollout.num_engines, self.node, nodes, layout.nodes)
        self.part = self.node % layout.nodes
        local = dataclasses.replace(with_hand_over(config), num_engines=len(mine))
        super().__init__(local, load_engine_kind(config.rollout.engine), model=config.model.hf,
                         dtype=config.model.dtype, folder=Path(config.run.dir) / "logs",
                         verify=config.weight_sync.verify == "full", first=mine.start, host=host_of(config),
                         max_length=config.data.max_prompt_tokens + config.rollout.max_response_tokens)
        self._gpus = [gpus_of(i, local, layout) or os.environ.get("CUDA_VISIBLE_DEVICES", "") for i in range(len(mine))]
        self.registry_folder = Path(config.registry or config.rollout.registry or default_registry(config.run.dir))
        self._grace = config.launch.stop_grace
        self._file = self.registry_folder / f"node-{self.node}.json"
        self._id, self._beat = secrets.token_hex(8), 0
        self._run = Beats(RUN_STALE_SECONDS)
        self._run_is_there = False
        self._asked: list[int] = []  # signals
        self._news = asyncio.Event()

    # ---- the life of it --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until asked to end. Raises UserError or RunError, with nothing left running."""
        make_folder(self.registry_folder)
        await self._refuse_a_second()
        beating = asyncio.create_task(self._keep_beating())
        try:
            await self._start_or_stop()
            while not self._asked and not all(slot.lost for slot in self.slots):
                await self._wait(BEAT_SECONDS)
            if not self._asked:
                raise RunError(f"no engine of this node is left{self._logs()}")
            await self._let_the_run_finish()
        except (RunError, UserError) as error:
            for slot in self.slots:
                slot.lost = slot.lost or str(error)
            self._publish()  # so that the run need not wait for what will not come
            raise
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            await self.close()
            self._forget_wishes()
            if all(not slot.lost for slot in self.slots):
                self._file.unlink(missing_ok=True)

    async def _start_or_stop(self) -> None:
        """Start all engines, unless asked to end meanwhile."""
        starting = asyncio.create_task(self.start())
        while not starting.done() and not self._asked:
            await self._wait(BEAT_SECONDS)
        if not starting.done():
            starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting

    async def _let_the_run_finish(self) -> None:
        deadline = time.monotonic() + self._grace
        if self._run_is_there:
            log.info("asked to end; the run that uses these engines gets up to %.0f s to finish first", self._grace)
        while self._run_is_there and len(self._asked) < 2 and time.monotonic() < deadline:
            await self._wait(BEAT_SECONDS)
        log.info("ending the engines")

    def ask_to_end(self, number: int) -> None:
        self._asked.append(number)
        self._news.set()

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
        self._news.clear()

    # ---- the registry ----------------------------------------------------------------------------------------

    async def _refuse_a_second(self) -> None:
        beats, deadline = Beats(RUN_STALE_SECONDS), time.monotonic() + 3 * BEAT_SECONDS
        while (other := read_file(self._file)) is not None and time.monotonic() < deadline:
            if beats.alive("other", (other["id"], other["beat"])):
                raise UserError(f"--registry {self.registry_folder}: node {self.node} has a supervisor already, on "
                                f"{other['host']} (pid {other['pid']}); end it, or give --node and --nodes")
            await asyncio.sleep(BEAT_SECONDS / 4)

    async def _keep_beating(self) -> None:
        while True:
            try:
                self._publish()
                self._look_for_the_run()
                await self._obey()
            except OSError as error:
                log.warning("the registry %s cannot be used now: %s", self.registry_folder, error)
            await asyncio.sleep(BEAT_SECONDS)

    def _publish(self) -> None:
        self._beat += 1
        write_file(self._file, {"id": self._id, "beat": self._beat, "host": socket.gethostname(), "pid": os.getpid(),
                                "engines": records_to_json(self._records())})

    def _start_name(self, slot: Slot) -> str:
        return f"{self._id}.{slot.process.pid}" if slot.process is not None else ""

    def _records(self) -> list[EngineRecord]:
        return [self._record(slot) for slot in self.slots]

    def _record(self, slot: Slot) -> EngineRecord:
        process = slot.process
        state = "lost" if slot.lost else "serving" if slot.ready else "starting"
        return EngineRecord(slot.index, self._start_name(slot), state, slot.url, self._token,
                            process.pid if process else 0, self._gpus[slot.index - self._first],
                            str(getattr(process, "log", "")), slot.lost, slot.rendezvous)

    async def _obey(self) -> None:
        """End the engines that the run, or the supervisor of a part, wants started again; their watchers start them."""
        for slot in self.slots:
            path = self.registry_folder / f"restart-{slot.index}.json"
            wish = read_file(path)
            if wish is None:
                continue
            path.unlink(missing_ok=True)
            if slot.process is None or wish["start"] != self._start_name(slot):
                continue
            if wish["why"]:
                log.warning("%s is ended: %s", slot.name, wish["why"])
            elif slot.ready:
                log.info("%s is ended because the run asks for a new one", slot.name)
                slot.restarts -= 1  # the run counts these
            else:
                continue
            await asyncio.to_thread(slot.process.stop)

    def _forget_wishes(self) -> None:
        for slot in self.slots:
            (self.registry_folder / f"restart-{slot.index}.json").unlink(missing_ok=True)

    def _look_for_the_run(self) -> bool:
        """Whether it is there and has no need of the memory that engines share with it."""
        run = read_file(self.registry_folder / RUN)
        self._run_is_there = self._run.alive(RUN, run and (run["id"], run["beat"]))
        return self._run_is_there and bool(run["room"])

    # ---- what differs from a run's own engines ---------------------------------------------------------------

    async def _may_start(self) -> None:
        if self.config.hand_over != "on" or self._look_for_the_run():
            return
        log.info("engines start when a run has handed its memory over")
        while not self._look_for_the_run():
            await asyncio.sleep(BEAT_SECONDS / 4)

    async def _set_ready(self, slot: Slot, ready: bool) -> None:
        await super()._set_ready(slot, ready)
        with contextlib.suppress(OSError):
            self._publish()

    async def _ask(self, slot: Slot) -> None:
        """A run asks its engines by itself, and knows when they are busy with weights."""
        if not self._run_is_there:
            await super()._ask(slot)


def main(config: EnginesConfig) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    async def run() -> None:
        from luspo_megatron.rollout.engine_parts import supervisor_of  # its supervisors are this module's, and more

        supervisor = supervisor_of(config)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.ask_to_end, number)
        log.info("engines %s of %d as node %d; registry %s; logs %s", [slot.index for slot in supervisor.slots],
                 config.rollout.num_engines, supervisor.node, supervisor.registry_folder, Path(config.run.dir) / "logs")
        await supervisor.run()

    asyncio.run(run())
    return 0
