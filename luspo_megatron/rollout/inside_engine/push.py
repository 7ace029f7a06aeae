"""Receives one weight push inside an engine worker and hands out whole tensors for the engine's own loader.

Both engines keep the tensors they are given until a layer is complete (vLLM buffers the arguments of its weight
loaders), while the receiver overwrites its buffer with every bucket. So every tensor handed out owns its memory; a view
of the receive buffer would be silently wrong weights. Peak extra memory: one bucket, the tensors under assembly (those
cut over several buckets), and what the engine itself keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from luspo_megatron.weights.manifest import EngineConnection, Manifest
from luspo_megatron.weights.transports.base import Receiver, TransferError
from luspo_megatron.weights.transports.meeting import open_receiver


class PushReceiver:
    """The weight groups of one engine worker. ``device``: where the buckets arrive."""

    def __init__(self, device: str | torch.device = "cpu") -> None:
        self._device = torch.device(device)
        self._receiver: Receiver | None = None

    def connect(self, connection: dict[str, Any], worker: int) -> None:
        """Join the groups as the engine's ``worker``-th process (0-based). Blocks until every member has come.

        ``connection``: EngineConnection.to_dict() whose rank is the one of the engine's first worker.
        """
        self.close()
        first = EngineConnection.from_dict(connection)
        self._receiver = open_receiver(
            EngineConnection.from_dict({**connection, "rank": first.rank + worker}), self._device)

    def tensors(self, manifest: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """(on-disk name, tensor) of every tensor of the push as soon as it is whole, in the order of the buckets.

        Raises TransferError; the groups are left then, so that no source waits for this worker.
        """
        push = Manifest.from_dict(manifest)
        problems = push.violations()
        if problems:
            raise TransferError(f"weight push {push.version} is not sound: {'; '.join(problems)}")
        if self._receiver is None:
            raise TransferError(f"weight push {push.version} came before the weight groups were joined")
        try:
            yield from whole_tensors(push, self._receiver)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def whole_tensors(push: Manifest, receiver: Receiver) -> Iterator[tuple[str, Tensor]]:
    """Reassembles slices; each tensor is its own memory (see above)."""
    parts: dict[str, tuple[Tensor, int]] = {}  # tensors under assembly, with the elements still missing
    receiver.begin(push)
    for bucket in push.buckets:
        buffer = receiver.receive(bucket)
        for piece in bucket.slices:
            raw = buffer[piece.offset : piece.offset + piece.nbytes]
            if piece.whole:
                whole = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device=buffer.device)
                whole.view(-1).view(torch.uint8).copy_(raw)
                yield piece.name, whole
                continue
            if piece.name not in parts:
                empty = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype), device=buffer.device)
                parts[piece.name] = (empty, empty.numel())
            target, missing = parts[piece.name]
            target.view(-1)[piece.start : piece.start + piece.numel].view(torch.uint8).copy_(raw)
            parts[piece.name] = (target, missing - piece.numel)
            if missing == piece.numel:
                yield piece.name, parts.pop(piece.name)[0]


def check_loaded(expected: set[str], loaded: set[str] | None, version: int) -> None:
    """Raise TransferError naming parameters of the engine's model that a push left as they were.

    ``loaded``: what the model's loader says it has set; None when it does not say (nothing can be checked then).
    """
    missing = sorted(expected - loaded) if loaded is not None else []
    if missing:
        raise TransferError(f"weight push {version} left {len(missing)} parameters of the engine untouched: "
                            f"{', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}")
