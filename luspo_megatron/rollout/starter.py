"""Starts one engine server of a kind: its command from the configuration, its environment, its log, until it listens.

Shared by the fleet (engines of a run) and `luspo engines` (engines of a node). Imports no torch: a GPU is what has a
device file.
"""

from __future__ import annotations

import asyncio
import dataclasses
import glob
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from luspo_megatron.config import Config, RolloutConfig
from luspo_megatron.engine_layout import EngineLayout, engine_flags, engine_layout
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.hand_over import hands_over
from luspo_megatron.launch.local import free_port
from luspo_megatron.rollout.engine import EngineKind, EngineStart
from luspo_megatron.rollout.processes import EngineProcess, OwnProcess, next_log_path

POLL_SECONDS = 0.2
TOKEN_VARIABLE = "LUSPO_ENGINE_TOKEN"


def on_cpu() -> bool:
    """True when engines run on the CPU: no GPU here, or LUSPO_PLATFORM=cpu."""
    return os.environ.get("LUSPO_PLATFORM") == "cpu" or not glob.glob("/dev/nvidia[0-9]*")


def gpus_of(index: int, config: RolloutConfig, layout: EngineLayout) -> str | None:
    """CUDA_VISIBLE_DEVICES of the ``index``-th engine of this node; None: as it is. Raises UserError for too few."""
    if on_cpu() or config.num_engines == 1:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = visible.split(",") if visible else [str(i) for i in range(len(glob.glob("/dev/nvidia[0-9]*")))]
    each = layout.workers_per_node
    if each * config.num_engines > len(devices):
        raise UserError(f"rollout.num_engines={config.num_engines} engines of {each} GPUs each need "
                        f"{each * config.num_engines} GPUs, this node has {len(devices)}; start fewer, or lower their "
                        "parallel sizes in rollout.engine_args")
    return ",".join(devices[index * each : (index + 1) * each])


def with_hand_over(config: Config) -> RolloutConfig:
    """The settings of the engines with rollout.hand_over decided: on or off."""
    on = hands_over(config.rollout, config.launch, on_cpu())
    return dataclasses.replace(config.rollout, hand_over="on" if on else "off")


@dataclass(frozen=True)
class Starter:
    """``model``: Hugging Face folder; ``folder``: where the logs go; ``verify``: engines read weights back;
    ``max_length``: tokens of prompt and response together; ``host``: address to listen on, empty: loopback."""

    config: RolloutConfig
    kind: EngineKind
    model: str
    dtype: str
    folder: Path
    token: str
    verify: bool = True
    max_length: int = 0
    host: str = ""

    @property
    def layout(self) -> EngineLayout:
        return engine_layout(self.kind.name, engine_flags(self.config))

    def rendezvous(self) -> str:
        """Where the parts of an engine over several nodes meet, anew for each start; empty for an engine of one."""
        return f"{self.host or '127.0.0.1'}:{free_port()}" if self.layout.nodes > 1 else ""

    def command(self, port_file: str, rendezvous: str = "", part: int = 0) -> list[str]:
        config = self.config
        return self.kind.command(EngineStart(
            self.model, self.dtype, config.threads, config.batch_size, port_file, self.verify,
            args=tuple(engine_flags(config)), python=config.engine_python or sys.executable, max_length=self.max_length,
            temperature=config.temperature, top_p=config.top_p, routed_experts=config.routed_experts, on_cpu=on_cpu(),
            host=self.host, sleeps=config.hand_over == "on", rendezvous=rendezvous, part=part))

    def environment(self, index: int) -> dict[str, str]:
        env = {TOKEN_VARIABLE: self.token, "OMP_NUM_THREADS": str(self.config.threads)}
        if on_cpu():
            env["LUSPO_PLATFORM"] = "cpu"
        gpus = gpus_of(index, self.config, self.layout)
        if gpus is not None:
            env["CUDA_VISIBLE_DEVICES"] = gpus
        return env | dict(pair.split("=", 1) for pair in self.config.engine_env)

    async def launch(self, name: str, index: int, deadline: float, started: Callable[[OwnProcess], None],
                     rendezvous: str = "") -> str:
        """Start the process and wait until it listens; its URL. ``started`` is told of the process at once, so that
        whoever ends us can end it. Raises RunError or UserError with the log's last lines."""
        with tempfile.TemporaryDirectory(prefix="luspo-engine-") as scratch:
            port_file = Path(scratch) / "url"
            process = OwnProcess(name, self.command(str(port_file), rendezvous), next_log_path(self.folder, name),
                                 self.environment(index))
            started(process)
            while not port_file.exists():
                check_start(self.config, name, process, deadline, "it does not listen yet")
                await asyncio.sleep(POLL_SECONDS)
            return port_file.read_text().strip()

    def launch_part(self, name: str, index: int, part: int, rendezvous: str) -> OwnProcess:
        """Start the process of an engine's part that serves nobody: the server says when all parts are there."""
        name = f"{name}-part-{part}"
        return OwnProcess(name, self.command("-", rendezvous, part), next_log_path(self.folder, name),
                          self.environment(index))


def check_start(config: RolloutConfig, name: str, process: EngineProcess | None, deadline: float, last: str) -> None:
    """Raise when an engine that is starting has ended or takes too long; ``last``: what is missing still."""
    if process is not None and process.returncode is not None:
        kind = UserError if process.returncode == UserError.exit_code else RunError
        raise kind(f"{name} could not start: {process.describe_end()}")
    if time.monotonic() > deadline:
        end = process.describe_end() if process is not None else last
        raise RunError(f"{name} was not healthy within rollout.start_timeout={config.start_timeout:g} s ({last}); "
                       f"{end}")
