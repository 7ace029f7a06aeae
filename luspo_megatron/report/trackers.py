"""Where metrics go besides metrics.jsonl: TensorBoard files, Weights & Biases, an endpoint that Prometheus reads.

Each takes the same rows. A tracker that the network takes away costs its data, never the run: Weights & Biases has a
process of its own, Prometheus asks us. Left out: alerts and dashboards, which are theirs.
"""

from __future__ import annotations

import numbers
import os
import re
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from luspo_megatron.errors import UserError

WANDB_ID_FILE = "wandb_id"


class Tracker(Protocol):
    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Numbers of one step; the same step may come again with more of them. What is no number is passed over."""

    def close(self) -> None: ...


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, numbers.Real)}


class TensorBoard:
    """Scalars to a TensorBoard event file, without torch or tensorflow."""

    def __init__(self, folder: Path, resume_step: int | None) -> None:
        try:
            event_pb2: Any = import_module("tensorboard.compat.proto.event_pb2")
            summary_pb2: Any = import_module("tensorboard.compat.proto.summary_pb2")
            writer: Any = import_module("tensorboard.summary.writer.event_file_writer")
        except ImportError as error:
            raise UserError(f"run.tensorboard is on but the package tensorboard does not import ({error}); "
                            "install it or set --run.tensorboard false") from error
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = writer.EventFileWriter(str(folder))
        if resume_step is not None:
            # TensorBoard drops the points at and after a START mark's step that earlier files of the folder hold.
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._writer.add_event(self._event(wall_time=time.time(), step=resume_step + 1, session_log=start))
        self._writer.flush()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in _numbers(values).items()]
        if scalars:
            self._writer.add_event(self._event(wall_time=time.time(), step=int(step),
                                               summary=self._summary(value=scalars)))
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases. Its own files lie in <run_dir>/wandb; `wandb sync` uploads those of an offline run.

    One W&B run per run folder: its id is kept in <run_dir>/wandb_id, so that a resumed run goes on in the same charts.
    The step is a metric that all others are drawn over, not W&B's own counter, which may not go back on a resume.
    """

    def __init__(self, run_dir: Path, mode: Literal["offline", "online"], project: str, config: Mapping[str, Any],
                 resume_step: int | None) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError as error:
            raise UserError(f"run.wandb is {mode} but the package wandb does not import ({error}); pip install wandb, "
                            "or set --run.wandb off") from error
        path = run_dir / WANDB_ID_FILE
        known = path.read_text().strip() if resume_step is not None and path.is_file() else ""
        try:
            self._run = wandb.init(project=project, name=run_dir.resolve().name, id=known or None, resume="allow",
                                   mode=mode, dir=str(run_dir), config=dict(config),
                                   settings=wandb.Settings(silent=True, console="off"))
        except wandb.errors.Error as error:
            raise UserError(f"Weights & Biases does not start ({error}); log in with `wandb login`, or set --run.wandb "
                            "offline (and later `wandb sync`) or off") from error
        path.write_text(self._run.id + "\n")
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        if scalars := _numbers(values):
            self._run.log({**scalars, "step": int(step)})

    def close(self) -> None:
        self._run.finish()


class Prometheus:
    """The newest value of every metric at http://HOST:PORT/metrics, as gauges `luspo_<name>`."""

    def __init__(self, host: str, port: int) -> None:
        try:
            self._client: Any = import_module("prometheus_client")
        except ImportError as error:
            raise UserError(f"run.prometheus_port is set but the package prometheus_client does not import ({error}); "
                            "pip install prometheus_client, or set --run.prometheus_port 0") from error
        self._registry = self._client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = self._client.start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise UserError(f"the Prometheus endpoint cannot listen on {host}:{port} ({reason}); choose another "
                            "--run.prometheus_port") from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in {**_numbers(values), "step": float(step)}.items():
            known = "luspo_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if known not in self._gauges:
                self._gauges[known] = self._client.Gauge(known, f"{name} of the newest step", registry=self._registry)
            self._gauges[known].set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
