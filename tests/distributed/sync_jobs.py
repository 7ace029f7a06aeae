"""What worker processes do in the weight sync tests: an actor pushes to engine doubles, threads of rank 0 that receive
through the real transports."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from luspo_megatron.config import WeightSyncConfig
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.rollout.client import Handle
from luspo_megatron.weights.manifest import EngineConnection, Manifest
from luspo_megatron.weights.transports.meeting import open_receiver
from tests.distributed.actor_jobs import Case, actor_of


@dataclasses.dataclass
class Status:
    version: int
    num_workers: int
    needs_connect: bool
    generation: int


class Engines:
    """`workers` engine workers. `faults` maps the number of a call (connects and updates, from 0) to what goes wrong:
    die (worker 0 leaves after one bucket), absent (worker 0 never joins), refuse (RunError), bad (UserError)."""

    def __init__(self, workers: int, faults: dict[int, str], gone_for: int = 0) -> None:
        self.workers, self.faults = workers, faults
        self.calls: list[str] = []
        self.received: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]
        self.version, self.generation = 0, -1
        self._receivers: list[Any] = []
        self._pool = ThreadPoolExecutor(8)
        self._gone_for, self._asked = gone_for, 0

    def weights_status(self) -> Status:
        self._asked += 1
        gone = len(self.calls) > 1 and self._asked <= self._gone_for
        return Status(self.version, 0 if gone else self.workers, self.generation < 0, self.generation)

    def connect_weights(self, host: str, port: int, generation: int, sources: tuple[int, ...], *, world_size: int,
                        timeout: float, transport: str, folder: str) -> Handle:
        fault = self.faults.get(len(self.calls), "")
        self.calls.append(f"connect {generation}")

        def join(worker: int) -> Any:
            if fault == "absent" and worker == 0:
                raise RunError("engine-0 died before it joined")
            return open_receiver(EngineConnection(host, port, generation, sources, world_size, worker + 1, timeout,
                                                  transport, folder), torch.device("cpu"))

        def all_join() -> None:
            futures = [self._pool.submit(join, worker) for worker in range(self.workers)]
            self._receivers = [future.result() for future in futures]
            self.generation = generation

        return Handle(self._pool.submit(all_join))

    def update_weights_async(self, data: Any) -> Handle:
        fault = self.faults.get(len(self.calls), "")
        manifest = Manifest.from_dict(data)
        self.calls.append(f"update {manifest.version}")

        def receive(worker: int) -> None:
            receiver = self._receivers[worker]
            try:
                receiver.begin(manifest)
                assert manifest.violations() == []
                for number, bucket in enumerate(manifest.buckets):
                    if worker == 0 and fault == "die" and number == 1:
                        raise RunError("engine-0 was killed")
                    if fault == "refuse":
                        raise RunError("the engine refuses")
                    if fault == "bad":
                        raise UserError("the engine cannot take this model")
                    buffer = receiver.receive(bucket)
                    for piece in bucket.slices:
                        dtype = getattr(torch, piece.dtype)
                        whole = self.received[worker].setdefault(piece.name, torch.full(piece.shape, -7.0, dtype=dtype))
                        whole.view(-1)[piece.start : piece.start + piece.numel] = buffer[
                            piece.offset : piece.offset + piece.nbytes].view(dtype)
            except BaseException:
                receiver.close()
                raise

        def all_receive() -> None:
            futures = [self._pool.submit(receive, worker) for worker in range(self.workers)]
            errors = [error for future in futures if (error := future.exception()) is not None]
            if errors:
                raise errors[0]
            self.version = manifest.version

        return Handle(self._pool.submit(all_receive))


def push(rank: int, case: Case, folder: Any, *, settings: WeightSyncConfig, workers: int = 1, versions: int = 1,
         faults: dict[int, str] | None = None, gone_for: int = 0, mark_experts: bool = False, timeout: float = 20.0,
         dtype: str = "float32") -> dict[str, Any]:
    """Pushes versions 1 to `versions`. Rank 0 reports calls, warnings and what worker 0 holds; every rank its error."""
    from luspo_megatron.weights.load import local_parameters
    from luspo_megatron.weights.sync import WeightSync

    with actor_of(rank, case, folder) as actor:
        if mark_experts:
            for entry, parameter in local_parameters(actor.gpt, actor.table, case.layout, rank):
                if entry.row.per_expert:
                    parameter.data.fill_(float(entry.expert))
        engines = Engines(workers, faults or {}, gone_for) if rank == 0 else None
        warnings: list[str] = []
        sync = WeightSync(actor.gpt, actor.table, actor.ranks, settings, dtype=dtype, device=actor.device,
                          engines=engines, timeout=timeout, warn=warnings.append)
        error, began = "", time.monotonic()
        try:
            for version in range(1, versions + 1):
                sync.push(version)
        except (RunError, UserError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        finally:
            sync.close()
        seconds = time.monotonic() - began
        if engines is None:
            return {"error": error}
        received = [{name: tensor.numpy() if dtype == "float32" else tensor.float().numpy()
                     for name, tensor in one.items()} for one in engines.received]
        return {"error": error, "calls": engines.calls, "warnings": warnings, "received": received,
                "seconds": seconds}
