"""Where the two ends of a transport meet, and which transport it is: one choice for the sender and for the receiver."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from luspo_megatron.weights.manifest import EngineConnection
from luspo_megatron.weights.transports.base import Receiver, Sender, Verify
from luspo_megatron.weights.transports.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from luspo_megatron.weights.transports.disk import DiskReceiver, DiskSender
from luspo_megatron.weights.transports.process_group import (
    ProcessGroupReceiver,
    ProcessGroupSender,
    abort_meeting,
    host_store,
)


@dataclass
class Meeting:
    """What a trainer rank needs to be a sender. The rank that made it hosts the store; copies sent to others do not."""

    transport: str
    host: str
    port: int
    generation: int
    world_size: int  # engine workers + 1
    folder: str
    timeout: float
    store: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "store": None}

    def abort(self) -> None:
        """Whoever still waits for another member gets an error at once."""
        if self.store is not None:
            abort_meeting(self.store)


def host_meeting(transport: str, generation: int, world_size: int, folder: str, timeout: float) -> Meeting:
    # engines may be on other nodes: rank 0 is reached where the ranks have reached it
    store, host, port = host_store(os.environ.get("MASTER_ADDR", "127.0.0.1"), timeout)
    return Meeting(transport, host, port, generation, world_size, folder, timeout, store)


def open_sender(meeting: Meeting, source: int, *, verify: Verify, device: torch.device) -> Sender:
    """The end of trainer rank `source`; with a process group it blocks until every engine worker has joined."""
    if meeting.transport == "disk":
        return DiskSender(meeting.folder, source, verify=verify)
    kind = CudaIpcSender if meeting.transport == "cuda_ipc" else ProcessGroupSender
    return kind(meeting.host, meeting.port, meeting.generation, source, meeting.world_size, meeting.timeout,
                verify=verify, device=device)


def open_receiver(connection: EngineConnection, device: torch.device) -> Receiver:
    """The end of one engine worker."""
    if connection.transport == "disk":
        return DiskReceiver(connection)
    kind = CudaIpcReceiver if connection.transport == "cuda_ipc" else ProcessGroupReceiver
    return kind(connection, device)
