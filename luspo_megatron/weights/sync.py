"""Weight sync: the actor's shards -> every engine, as one push with one version.

The trainer ranks that own weights are the sources; the engines receive from all of them. Rank 0 tells the controller,
which walks the engines through pause, load, flush, version and resume while the sources send. Two buffers alternate,
so that gathering the next bucket overlaps sending this one; a buffer is filled again only after its send was
acknowledged. At most three buckets of extra memory: the two, and what one other member of a gather contributes.

A push that fails (an engine died, bytes were changed on the wire) is repeated with the same version over new groups,
MAX_ATTEMPTS times in all: a lost engine costs time, not the run. All ranks agree on the outcome over the control plane.
A rank whose sends fail goes on gathering, so that nobody waits for it inside a collective.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from luspo_megatron.config import WeightSyncConfig
from luspo_megatron.errors import RunError, UserError
from luspo_megatron.ranks import Ranks
from luspo_megatron.weights.gather import ShardGatherer
from luspo_megatron.weights.manifest import Manifest
from luspo_megatron.weights.plan import ONE_WORKER, Receivers, plan_sync
from luspo_megatron.weights.table import WeightTable
from luspo_megatron.weights.transports.base import Sender, SendHandle, TransferError
from luspo_megatron.weights.transports.disk import finish
from luspo_megatron.weights.transports.meeting import Meeting, host_meeting, open_sender

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
POLL_SECONDS = 0.5


class EngineSide(Protocol):
    """What rank 0 needs of the controller (rollout/client.py). Two calls return handles: this rank sends meanwhile."""

    def weights_status(self) -> Any: ...

    def connect_weights(self, store_host: str, store_port: int, generation: int, sources: tuple[int, ...], *,
                        world_size: int, timeout: float, transport: str, folder: str) -> Any: ...

    def update_weights_async(self, manifest: Mapping[str, Any]) -> Any: ...


class WeightSync:
    """Owns the whole transfer. Every rank makes one; only rank 0 passes the controller's client.

    ``folder``: where the disk transport writes; ``warn``: told (on rank 0) why a push is repeated.
    """

    def __init__(self, gpt: Any, table: WeightTable, ranks: Ranks, settings: WeightSyncConfig, *, dtype: str,
                 device: torch.device, engines: EngineSide | None, timeout: float = 600.0, folder: str = "",
                 receivers: Receivers = ONE_WORKER, warn: Callable[[str], None] = log.warning) -> None:
        self._ranks, self._settings, self._engines, self._warn = ranks, settings, engines, warn
        self._device, self._timeout = device, timeout
        self._folder = str(Path(settings.folder or folder).absolute())  # engines have their own working folder
        bucket_bytes = settings.bucket_bytes
        if settings.transport == "disk":  # files hold whole tensors, so that any engine can read them
            bucket_bytes = max(bucket_bytes, table.largest_bytes(dtype))
        self.plan = plan_sync(table, ranks.layout, dtype, bucket_bytes, receivers)
        self._gatherer = ShardGatherer(gpt, table, ranks)
        self._kept: list[torch.Tensor] = []
        self._sender: Sender | None = None
        self._meeting: Meeting | None = None
        self._generation = -1
        self._broken = False  # the groups of the last generation cannot be used again

    def push(self, version: int) -> None:
        """Sends all weights as `version`; returns when every engine has taken them and resumed.

        RunError on all ranks when the engines refuse for good or none comes back.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            reason = self._connect() or self._send_all(version)
            if reason is None:
                return
            self.close()
            self._broken = True
            if attempt < MAX_ATTEMPTS and self._engines is not None:
                self._warn(f"push of weight version {version} failed (try {attempt} of {MAX_ATTEMPTS}), again: "
                           f"{reason}")
                time.sleep(POLL_SECONDS)  # what ended has been noticed by then
        raise RunError(f"push of weight version {version} failed {MAX_ATTEMPTS} times; last: {reason}")

    # ------------------------------------------------------------------ joining the engines
    def _connect(self) -> str | None:
        """Meets the engines where the groups are new: at the start, and after an engine was replaced or a push failed.
        Why that was not possible, or None; the same on all ranks."""
        handle: Any = None

        def invite() -> Meeting | None:
            nonlocal handle
            status = self._wait_for_engines()
            if not status.needs_connect and not self._broken and self._generation >= 0:
                return None
            self._generation = max(status.generation, self._generation) + 1
            meeting = host_meeting(self._settings.transport, self._generation, status.num_workers + 1, self._folder,
                                   self._timeout)
            handle = self._client.connect_weights(
                meeting.host, meeting.port, meeting.generation, self.plan.sources, world_size=meeting.world_size,
                timeout=self._timeout, transport=meeting.transport, folder=meeting.folder)
            return meeting

        meeting: Meeting | None = self._on_rank_0(invite)
        if meeting is None:
            return None
        self.close()
        self._meeting = meeting
        with ThreadPoolExecutor(1) as pool:  # this rank watches the engines' answer while it joins
            joining = pool.submit(self._join, meeting) if self._ranks.rank in self.plan.sources else None
            refusal = self._answer_of(handle)
            if refusal is not None:
                meeting.abort()  # wakes every rank that waits for an engine that will not come
            error = joining.result() if joining is not None else None
        reason = self._agree(refusal, error)
        self._broken = self._broken and reason is not None
        return reason

    def _wait_for_engines(self) -> Any:
        """The fleet's status once at least one engine is there. Engines that are still starting join a later push."""
        deadline = time.monotonic() + self._timeout
        while (status := self._client.weights_status()).num_workers == 0:
            if time.monotonic() > deadline:
                raise RunError(f"no engine came back within {self._timeout:g} s to receive the weights")
            time.sleep(POLL_SECONDS)
        return status

    def _join(self, meeting: Meeting) -> Exception | None:
        try:
            self._sender = open_sender(meeting, self._ranks.rank, verify=self._settings.verify, device=self._device)
        except TransferError as error:
            return error
        return None

    # ------------------------------------------------------------------ one push
    def _send_all(self, version: int) -> str | None:
        """One try: why it failed, or None; the same on all ranks."""
        manifest = self.plan.manifest(version)
        handle: Any = None
        before = self._settings.transport != "disk"  # files are written first, so that no engine is paused meanwhile
        if self._engines is not None and before:
            handle = self._start_update(manifest)
            self._break_off_with(handle)
        error: Exception | None = None
        try:
            self._send(manifest)
        except TransferError as failure:
            error = failure
        if not before:
            errors = self._ranks.gather(error)  # everybody has written
            if self._engines is not None and errors is not None and not any(errors):
                finish(self._folder, manifest)
                handle = self._start_update(manifest)
        refusal = self._answer_of(handle)
        return self._agree(refusal, error, taken=handle is not None and refusal is None)

    def _start_update(self, manifest: Manifest) -> Any:
        try:
            return self._client.update_weights_async(manifest.to_dict())
        except RunError as error:
            return _Refused(error)

    def _break_off_with(self, handle: Any) -> None:
        """When an engine fails in the middle of the push, every rank that waits to send to it is to stop waiting."""
        meeting = self._meeting

        def watch() -> None:
            if self._answer_of(handle) is not None and meeting is not None:
                meeting.abort()

        threading.Thread(target=watch, name="push-watch", daemon=True).start()

    def _scratch(self, *sizes: int) -> list[torch.Tensor]:
        """Byte buffers. On a CPU they are kept for the next push: touching fresh memory costs more than the copies into
        it. On a GPU they are given back, for training; the allocator there has them at hand."""
        if [buffer.numel() for buffer in self._kept] == list(sizes):
            return self._kept
        buffers = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in sizes]
        if self._device.type == "cpu":
            self._kept = buffers
        return buffers

    def _send(self, manifest: Manifest) -> None:
        """Walks the plan. After a failed send it only gathers, for the other members' sake, and raises at the end."""
        rank = self._ranks.rank
        mine = [(unit, bucket) for unit in self.plan.units if rank in unit.members for bucket in unit.buckets]
        sending = max((bucket.nbytes for unit, bucket in mine if unit.source == rank), default=0)
        staged = max((bucket.nbytes for unit, bucket in mine if len(unit.members) > 1), default=0)
        *buffers, staging = self._scratch(sending, sending, staged)
        in_flight: list[SendHandle | None] = [None, None]
        error: TransferError | None = None
        if self._sender is not None:
            self._sender.begin(manifest)
        turn = 0
        for unit, bucket in mine:
            if unit.source != rank:
                self._gatherer.fill(unit, bucket, None, staging)
                continue
            turn ^= 1
            error = error or _acknowledged(in_flight[turn])
            buffer = buffers[turn][: bucket.nbytes]
            self._gatherer.fill(unit, bucket, buffer, staging)
            if error is None and self._sender is not None:
                try:
                    in_flight[turn] = self._sender.send(bucket, buffer)
                except TransferError as failure:
                    error = failure
            if error is not None and self._sender is not None:
                self._sender.close()  # engines waiting for this source learn of it at once
                self._sender = None
        for handle in (in_flight[turn ^ 1], in_flight[turn]):
            error = error or _acknowledged(handle)
        if error is not None:
            raise error

    # ------------------------------------------------------------------ agreeing
    @property
    def _client(self) -> EngineSide:
        assert self._engines is not None
        return self._engines

    def _answer_of(self, handle: Any) -> Exception | None:
        if handle is None:
            return None
        try:
            handle.result()
        except (RunError, UserError) as error:
            return error
        return None

    def _agree(self, refusal: Exception | None, error: Exception | None, taken: bool = False) -> str | None:
        """The one outcome on all ranks. The engines' own reason comes first: a closed connection is its consequence.
        ``taken``: every engine has the push; a sender that broke afterwards only needs new groups next time."""
        errors = self._ranks.gather(str(error) if error is not None else None)
        outcome: tuple[str | None, bool, bool] | None = None
        if errors is not None:
            ours = next((text for text in errors if text is not None), None)
            reason = str(refusal) if refusal is not None else None if taken else ours
            outcome = (reason, ours is not None, isinstance(refusal, UserError))
        reason, broken, fatal = self._ranks.broadcast(outcome)
        if fatal:
            raise UserError(reason)
        self._broken = self._broken or broken
        return reason  # type: ignore[no-any-return]

    def _on_rank_0(self, call: Callable[[], Any]) -> Any:
        """What `call` gives on rank 0, on all ranks; its RunError or UserError is raised on all."""
        answer: tuple[Any, Exception | None] = (None, None)
        if self._engines is not None:
            try:
                answer = (call(), None)
            except (RunError, UserError) as error:
                answer = (None, type(error)(str(error)))
        value, failure = self._ranks.broadcast(answer)
        if failure is not None:
            raise failure
        return value

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        self._meeting = None  # and its store, where this rank hosts it


class _Refused:
    """A call that could not even be made, as a handle."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> None:
        raise self._error


def _acknowledged(handle: SendHandle | None) -> TransferError | None:
    """Waits until the handle's buffer may be filled again."""
    if handle is not None:
        try:
            handle.wait()
        except TransferError as error:
            return error
    return None
