"""Buckets through shared GPU memory: engine workers on the source's own GPU map its buffers and copy from them.

Nothing travels but a handle of each buffer, once, and small messages in the store that both ends meet at: "bucket n
lies in buffer h" from the source, "copied" from every worker. The source fills a buffer again only after every worker
has said so; the worker says it after its copy has finished on the device. Never run yet: it needs a GPU, with all
engine workers and all sources on the same one (or on peers that can map each other's memory)."""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from luspo_megatron.weights.manifest import Bucket, EngineConnection, Manifest
from luspo_megatron.weights.transports.base import TransferError, Verify, check_trailer, make_trailer


def _connect(host: str, port: int, generation: int, timeout: float) -> Any:
    store = dist.TCPStore(host, port, None, False, timedelta(seconds=timeout))
    return dist.PrefixStore(f"ipc/{generation}", store)


def pack_handle(handle: tuple[Any, ...]) -> str:
    """The tuple of `UntypedStorage._share_cuda_` (numbers, bytes, None, bool) as JSON; no pickle crosses processes."""
    return json.dumps([{"b64": base64.b64encode(x).decode()} if isinstance(x, bytes) else x for x in handle])


def unpack_handle(text: str) -> tuple[Any, ...]:
    return tuple(base64.b64decode(x["b64"]) if isinstance(x, dict) else x for x in json.loads(text))


class _Shared:
    """A bucket in a shared buffer until all workers have copied it."""

    def __init__(self, store: Any, keys: list[str], what: str) -> None:
        self._store, self._keys, self._what = store, keys, what

    def wait(self) -> None:
        try:
            self._store.wait(self._keys)
        except RuntimeError as error:
            raise TransferError(f"{self._what} was not taken by every engine worker: {error}") from error


class CudaIpcSender:
    """One source's end."""

    def __init__(self, store_host: str, store_port: int, generation: int, source: int, world_size: int,
                 timeout: float = 600.0, *, verify: Verify = "full", device: str | torch.device = "cuda") -> None:
        self.source, self.verify, self._workers = source, verify, world_size - 1
        self._store = _connect(store_host, store_port, generation, timeout)
        self._number = self._turn = 0
        self._handles: dict[int, str] = {}

    def begin(self, manifest: Manifest) -> None:
        self._turn = manifest.version
        self._handles = {}  # the caller's two buffers are new in each push

    def send(self, bucket: Bucket, buffer: Tensor) -> _Shared:
        storage = buffer.untyped_storage()
        if storage.data_ptr() not in self._handles:
            self._handles[storage.data_ptr()] = pack_handle(storage._share_cuda_())
        trailer = make_trailer(bucket, buffer, self.verify, self._turn)
        torch.cuda.current_stream(buffer.device).synchronize()  # the bytes are there before anybody is told
        name = f"{self.source}/{self._number}"
        what = f"weight bucket {self._number} from source {self.source} ({bucket.nbytes} bytes)"
        self._number += 1
        try:
            self._store.set(name, json.dumps({
                "handle": self._handles[storage.data_ptr()], "start": buffer.storage_offset(),
                "trailer": trailer.tolist()}))
        except RuntimeError as error:
            raise TransferError(f"{what} could not be announced: {error}") from error
        return _Shared(self._store, [f"{name}/copied/{rank}" for rank in range(1, self._workers + 1)], what)

    def close(self) -> None:
        return None


class CudaIpcReceiver:
    """An engine worker's end."""

    def __init__(self, connection: EngineConnection, device: str | torch.device = "cuda") -> None:
        self.device, self._rank = torch.device(device), connection.rank
        self._store = _connect(connection.host, connection.port, connection.generation, connection.timeout)
        self._number = dict.fromkeys(connection.sources, 0)
        self._mapped: dict[str, Any] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self.device)

    def begin(self, manifest: Manifest) -> None:
        self._mapped = {}

    def receive(self, bucket: Bucket) -> Tensor:
        """The next bucket of its source in memory of this process, uint8 [bucket.nbytes], checksums compared."""
        number = self._number[bucket.source]
        self._number[bucket.source] += 1
        name = f"{bucket.source}/{number}"
        try:
            message = json.loads(self._store.get(name))
        except RuntimeError as error:
            raise TransferError(f"weight bucket {number} from source {bucket.source} did not come: {error}") from error
        if message["handle"] not in self._mapped:
            storage = torch.UntypedStorage._new_shared_cuda(*unpack_handle(message["handle"]))
            self._mapped[message["handle"]] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if self._buffer.numel() < bucket.nbytes:
            self._buffer = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
        buffer = self._buffer[: bucket.nbytes]
        buffer.copy_(self._mapped[message["handle"]][message["start"] : message["start"] + bucket.nbytes])
        torch.cuda.current_stream(self.device).synchronize()
        self._store.set(f"{name}/copied/{self._rank}", "1")
        check_trailer(bucket, buffer, torch.tensor(message["trailer"], dtype=torch.int64), number)
        return buffer

    def close(self) -> None:
        self._mapped = {}
