"""Buckets over a torch.distributed process group: gloo between CPU processes, NCCL between GPUs.

For each source there is one group {source = rank 0, engine workers = ranks 1..W}. The groups are built directly on a
PrefixStore over a TCPStore, not on the default group, so both ends work in processes with or without
``torch.distributed.init_process_group`` (a trainer rank has one, an engine usually has its own or none). The device of
the buffers chooses the backend. The NCCL path has not run on a GPU yet.

A broadcast is over at the source when all its bytes have left the buffer, so it may be filled again; the receiver has
two buffers of its own, and the next bucket travels into one while the other is checked and loaded.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from luspo_megatron.weights.manifest import Bucket, EngineConnection, Manifest
from luspo_megatron.weights.transports.base import TransferError, Verify, check_trailer, make_trailer

ABORTED = "aborted"
ABORT_POLL = timedelta(seconds=0.5)  # how often who waits looks whether the push was broken off


def host_store(host: str = "127.0.0.1", timeout: float = 600.0) -> tuple[dist.TCPStore, str, int]:
    """Open the store that all ends meet at, on a free port. Keep the store alive as long as groups are built on it.

    ``host``: the address the engines reach this process at; loopback when they run on the same node.
    """
    store = dist.TCPStore(host, 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
    return store, host, int(store.port)


def _build_group(host: str, port: int, generation: int, source: int, rank: int, world_size: int, timeout: float,
                 device: torch.device) -> tuple[Any, Any]:
    """(group of one source, store); blocks until all its members have come, at most ``timeout`` seconds."""
    span = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore(host, port, None, False, span)
        prefix = dist.PrefixStore(f"weights/{generation}/source{source}", store)
        _await_members(store, prefix, rank, world_size, timeout)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = span
            return dist.ProcessGroupNCCL(prefix, rank, world_size, options), store
        gloo: Any = dist.ProcessGroupGloo
        gloo_options = gloo._Options()
        gloo_options._timeout = span
        gloo_options._threads = 1  # broadcasts of one source keep their order
        gloo_options._devices = [_gloo_device(gloo, host)]
        return gloo(prefix, rank, world_size, gloo_options), store
    except RuntimeError as error:  # DistStoreError, DistNetworkError and gloo's own are all RuntimeErrors
        raise TransferError(
            f"weight group of source {source}, generation {generation}: member {rank} of {world_size} could not "
            f"connect through {host}:{port} within {timeout:g} s: {_first_line(error)}"
        ) from error


def abort_meeting(store: Any) -> None:
    """Tells whoever waits at the store for another member that it will not come."""
    store.set(ABORTED, "1")


def _await_members(store: Any, prefix: Any, rank: int, world_size: int, timeout: float) -> None:
    """Waits until every member is at the store. Building a group cannot be broken off once begun, waiting here can."""
    prefix.set(f"here/{rank}", "1")
    everybody = [f"here/{member}" for member in range(world_size)]
    deadline = time.monotonic() + timeout
    pause = 0.005
    while not prefix.check(everybody):
        if store.check([ABORTED]):
            raise RuntimeError("a member failed before all had come")
        if time.monotonic() > deadline:
            missing = [str(member) for member in range(world_size) if not prefix.check([f"here/{member}"])]
            raise RuntimeError(f"member {', '.join(missing)} did not come")
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _gloo_device(gloo: Any, host: str) -> Any:
    """Loopback store: stay on loopback. Else the interface gloo chooses (GLOO_SOCKET_IFNAME is honoured)."""
    if socket.gethostbyname(host).startswith("127."):
        return gloo.create_device(hostname="127.0.0.1")
    return gloo.create_default_device()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _is_aborted(store: Any) -> bool:
    try:
        return bool(store.check([ABORTED]))
    except RuntimeError:  # whoever hosts it is gone
        return True


def _finish(work: Any, store: Any, device: torch.device) -> None:
    """Wait for a broadcast. RuntimeError when it failed, or when the push was broken off meanwhile."""
    if device.type == "cuda":  # its wait only orders streams
        looked = time.monotonic()
        while not work.is_completed():
            if time.monotonic() - looked > ABORT_POLL.total_seconds():
                looked = time.monotonic()
                if _is_aborted(store):
                    raise RuntimeError("the push was broken off")
            time.sleep(0.0002)
        work.wait()
        return
    while True:
        try:
            work.wait(ABORT_POLL)
            return
        except RuntimeError:
            if work.is_completed():
                raise
            if _is_aborted(store):
                raise RuntimeError("the push was broken off") from None


_LEFT: list[Any] = []  # see _leave


def _leave(group: Any, store: Any, works: list[Any]) -> None:
    """Leave a group for good; whoever waits in it learns of it from the store, at the latest after ABORT_POLL.

    Closing gloo's end does not reach a member that waits, and taking a group down waits for what is still under way in
    it, ``works``: such a group is kept as it is, out of use, until the process ends.
    """
    with contextlib.suppress(RuntimeError):
        abort_meeting(store)
    pending = [work for work in works if not work.is_completed()]
    if pending:
        _LEFT.append((group, pending))
        if hasattr(group, "abort"):
            group.abort()
    else:
        group.shutdown()


def _broadcast(group: Any, tensor: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)


class _Handle:
    """A bucket on its way: the broadcasts of bytes and trailer."""

    def __init__(self, works: list[Any], tensors: list[Tensor], what: str, store: Any) -> None:
        self._works, self._tensors, self._what, self._store = works, tensors, what, store

    def wait(self) -> None:
        try:
            for work in self._works:
                _finish(work, self._store, self._tensors[0].device)
        except RuntimeError as error:
            raise TransferError(f"{self._what} could not be sent: {_first_line(error)}") from error
        self._works, self._tensors = [], []


class ProcessGroupSender:
    """The source's end. Building one blocks until every engine worker has joined (or ``timeout`` seconds).

    ``source``: the trainer rank; ``world_size``: engine workers + 1; ``device``: where the buffers lie.
    """

    def __init__(self, store_host: str, store_port: int, generation: int, source: int, world_size: int,
                 timeout: float = 600.0, *, verify: Verify = "full", device: str | torch.device = "cpu") -> None:
        self.source, self.verify, self.device = source, verify, torch.device(device)
        self._number = self._turn = 0
        self._works: deque[Any] = deque(maxlen=4)  # two buckets, each with its trailer
        self._group, self._store = _build_group(store_host, store_port, generation, source, 0, world_size, timeout,
                                                self.device)

    def begin(self, manifest: Manifest) -> None:
        self._turn = manifest.version

    def send(self, bucket: Bucket, buffer: Tensor) -> _Handle:
        """Start broadcasting ``buffer``, uint8 [bucket.nbytes]; the handle's ``wait()`` frees it for reuse."""
        if bucket.source != self.source:
            raise ValueError(f"a bucket of source {bucket.source} given to the sender of source {self.source}")
        if buffer.dtype != torch.uint8 or buffer.numel() != bucket.nbytes or not buffer.is_contiguous():
            raise ValueError(f"buffer must be contiguous uint8 [{bucket.nbytes}], got {buffer.dtype} "
                             f"{tuple(buffer.shape)}")
        if self._group is None:
            raise TransferError(f"the weight group of source {self.source} is closed")
        what = f"weight bucket {self._number} from source {self.source} ({bucket.nbytes} bytes)"
        self._number += 1
        try:
            # The bytes go first: the checksums are computed while they travel.
            works = [_broadcast(self._group, buffer)]
            trailer = make_trailer(bucket, buffer, self.verify, self._turn).to(self.device)
            works.append(_broadcast(self._group, trailer))
            self._works += works
        except RuntimeError as error:
            raise TransferError(f"{what} could not be sent: {_first_line(error)}") from error
        return _Handle(works, [buffer, trailer], what, self._store)

    def close(self) -> None:
        """Leave the group; members still waiting in it get an error."""
        if self._group is not None:
            _leave(self._group, self._store, list(self._works))
            self._group = None


class _Arrival:
    """A bucket on its way here: the works of bytes and trailer, and where they go."""

    def __init__(self, group: Any, store: Any, bucket: Bucket, number: int, buffer: Tensor) -> None:
        self._store = store
        self.bucket, self.number, self.buffer = bucket, number, buffer[: bucket.nbytes]
        self._trailer = torch.zeros(len(bucket.slices), 2, dtype=torch.int64, device=buffer.device)
        with self._named():
            self.works = [_broadcast(group, self.buffer), _broadcast(group, self._trailer)]

    def take(self) -> Tensor:
        with self._named():
            for work in self.works:
                _finish(work, self._store, self.buffer.device)
        check_trailer(self.bucket, self.buffer, self._trailer.cpu(), self.number)
        return self.buffer

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            names = ", ".join(str(piece) for piece in self.bucket.slices[:3])
            raise TransferError(
                f"weight bucket {self.number} from source {self.bucket.source} ({self.bucket.nbytes} bytes: {names}"
                f"{', ...' if len(self.bucket.slices) > 3 else ''}) did not come: {_first_line(error)}") from error


class ProcessGroupReceiver:
    """An engine worker's end: one group per source, joined in the order of ``connection.sources``."""

    def __init__(self, connection: EngineConnection, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=self.device) for _ in range(2)]
        self._turn = 0
        self._coming: deque[Bucket] = deque()
        self._next: _Arrival | None = None
        self._number = dict.fromkeys(connection.sources, 0)
        self._groups: dict[int, tuple[Any, Any]] = {}
        self._arrivals: deque[_Arrival] = deque(maxlen=2)
        for source in connection.sources:
            self._groups[source] = _build_group(
                connection.host, connection.port, connection.generation, source, connection.rank,
                connection.world_size, connection.timeout, self.device
            )

    def begin(self, manifest: Manifest) -> None:
        self._coming, self._next = deque(manifest.buckets), None

    def receive(self, bucket: Bucket) -> Tensor:
        """The next bucket of its source, uint8 [bucket.nbytes], checksums compared.

        The tensor is a view of a buffer that the next call overwrites. Raises TransferError.
        """
        arrival, self._next = self._next or self._start(bucket), None
        if arrival.bucket is not bucket and arrival.bucket != bucket:
            raise TransferError("buckets are not received in the manifest's order")
        if self._coming and self._coming[0] == bucket:
            self._coming.popleft()
            if self._coming:
                self._next = self._start(self._coming[0])
        return arrival.take()

    def _start(self, bucket: Bucket) -> _Arrival:
        if bucket.source not in self._groups:
            raise TransferError(f"no weight group for source {bucket.source}; connected: {sorted(self._groups)}")
        number = self._number[bucket.source]
        self._number[bucket.source] += 1
        self._turn ^= 1
        if self._buffers[self._turn].numel() < bucket.nbytes:
            self._buffers[self._turn] = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self.device)
        self._arrivals.append(_Arrival(*self._groups[bucket.source], bucket, number, self._buffers[self._turn]))
        return self._arrivals[-1]

    def close(self) -> None:
        """Leave all groups; a source still sending gets an error."""
        for source, (group, store) in self._groups.items():
            _leave(group, store, [work for arrival in self._arrivals if arrival.bucket.source == source
                                  for work in arrival.works])
        self._arrivals.clear()
        self._groups, self._next = {}, None
        self._coming.clear()
