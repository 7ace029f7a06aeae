"""A transport double inside one process, for tests of planning and syncing: queues instead of a process group.

It copies each buffer on send and checks the same trailer as the real one. Senders and receivers may be used from
threads or, because queues are unbounded, one after the other in a single thread.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable

from torch import Tensor

from luspo_megatron.weights.manifest import Bucket, Manifest
from luspo_megatron.weights.transports.base import TransferError, Verify, check_trailer, make_trailer

_Item = tuple[Bucket, Tensor, Tensor]


class _Done:
    def wait(self) -> None:
        return None


class InProcessNetwork:
    """All groups of a push: ``num_workers`` engine workers and the given sources."""

    def __init__(self, sources: Iterable[int], num_workers: int, timeout: float = 10.0) -> None:
        self.timeout = timeout
        self._queues: dict[tuple[int, int], queue.Queue[_Item]] = {
            (source, worker): queue.Queue() for source in sources for worker in range(num_workers)
        }
        self._num_workers = num_workers

    def sender(self, source: int, verify: Verify = "full") -> InProcessSender:
        return InProcessSender([self._queues[source, worker] for worker in range(self._num_workers)], verify)

    def receiver(self, worker: int = 0) -> InProcessReceiver:
        mine = {source: q for (source, owner), q in self._queues.items() if owner == worker}
        return InProcessReceiver(mine, self.timeout)


class InProcessSender:
    def __init__(self, queues: list[queue.Queue[_Item]], verify: Verify) -> None:
        self._queues, self._verify = queues, verify

    def begin(self, manifest: Manifest) -> None:
        return None

    def send(self, bucket: Bucket, buffer: Tensor) -> _Done:
        trailer = make_trailer(bucket, buffer, self._verify)
        for q in self._queues:
            q.put((bucket, buffer.clone(), trailer))
        return _Done()

    def close(self) -> None:
        return None


class InProcessReceiver:
    def __init__(self, queues: dict[int, queue.Queue[_Item]], timeout: float) -> None:
        self._queues, self._timeout = queues, timeout
        self._number = dict.fromkeys(queues, 0)

    def begin(self, manifest: Manifest) -> None:
        return None

    def receive(self, bucket: Bucket) -> Tensor:
        try:
            sent, buffer, trailer = self._queues[bucket.source].get(timeout=self._timeout)
        except queue.Empty:
            raise TransferError(f"weight bucket from source {bucket.source} did not come") from None
        if sent != bucket:
            raise TransferError(f"source {bucket.source} sent another bucket than the manifest's next one")
        check_trailer(bucket, buffer, trailer, self._number[bucket.source])
        self._number[bucket.source] += 1
        return buffer

    def close(self) -> None:
        return None
