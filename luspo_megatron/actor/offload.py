"""Giving the trainer's memory to colocated engines and taking it back: parameters, gradient buffers, optimizer.

A tensor's storage is emptied in place and filled again, so that every view of it (megatron's buffers and buckets,
parameters, main gradients) stays what it was; nothing is re-registered. Contents go to pinned host memory on CUDA and
to files on CPU, where host memory is the memory to be freed. Gradients are not kept: each step begins with zeros.
Optimizer tensors that share storage with parameters (fp32 training) count as parameters; optimizer state that already
lives in host memory (optimizer.cpu_offload) stays there.

luspo_megatron/hand_over.py has the order of these calls and the engines'.
"""

from __future__ import annotations

import contextlib
import ctypes
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

CHUNK = 16 * 2**20  # bytes read or written at a time


class Shelf(Protocol):
    """Where the bytes of one storage lie meanwhile."""

    def put(self, key: int, data: Tensor) -> None:
        """``data``: uint8 [n], copied before this returns."""

    def take(self, key: int, target: Tensor) -> None:
        """Copies back what `put` took under this key into ``target``, uint8 [n]."""


class HostShelf:
    """Pinned host memory, allocated at the first offload and kept for the next."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def put(self, key: int, data: Tensor) -> None:
        if key not in self._kept:
            self._kept[key] = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=True)
        self._kept[key].copy_(data, non_blocking=True)
        torch.cuda.synchronize(data.device)

    def take(self, key: int, target: Tensor) -> None:
        target.copy_(self._kept[key], non_blocking=True)
        torch.cuda.synchronize(target.device)


class FileShelf:
    """Files of a temporary folder, which goes with this object."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="luspo-offload-")

    def _path(self, key: int) -> Path:
        return Path(self._folder.name) / str(key)

    def put(self, key: int, data: Tensor) -> None:
        with open(self._path(key), "wb") as file:
            for part in data.split(CHUNK):
                part.clone().numpy().tofile(file)  # a storage that numpy has seen can no longer be emptied

    def take(self, key: int, target: Tensor) -> None:
        with open(self._path(key), "rb") as file:
            for part in target.split(CHUNK):
                part.copy_(torch.from_numpy(np.fromfile(file, dtype=np.uint8, count=part.numel())))


class _Part:
    """The storages of one kind of tensors, each once, here or on the shelf."""

    def __init__(self, tensors: Iterable[Tensor], shelf: Shelf | None, taken: set[int], first_key: int,
                 device: torch.device) -> None:
        self._shelf, self._first = shelf, first_key
        self._storages: list[tuple[Any, int]] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # a storage's own number, because an empty one has no address
            if tensor.device.type == device.type and storage.nbytes() and storage._cdata not in taken:
                taken.add(storage._cdata)
                self._storages.append((storage, storage.nbytes()))
        self.away = False

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self._storages)

    def offload(self) -> None:
        if self.away:
            return
        for key, (storage, _) in enumerate(self._storages, self._first):
            if self._shelf is not None:
                self._shelf.put(key, _bytes(storage))
            storage.resize_(0)
        self.away = True

    def onload(self) -> None:
        if not self.away:
            return
        for key, (storage, nbytes) in enumerate(self._storages, self._first):
            storage.resize_(nbytes)
            if self._shelf is not None:
                self._shelf.take(key, _bytes(storage))
            else:
                _bytes(storage).zero_()
        self.away = False


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class ActorMemory:
    """One actor's memory. Optimizer state exists only after the first update, so it is looked up at each offload."""

    def __init__(self, actor: Any, shelf: Shelf | None = None) -> None:
        self._actor = actor
        self._shelf: Shelf = shelf or (HostShelf() if actor.device.type == "cuda" else FileShelf())
        self._taken: set[int] = set()
        device = actor.device
        self._parameters = _Part(_parameters(actor), self._shelf, self._taken, 0, device)
        self._gradients = _Part(_gradients(actor), None, self._taken, 0, device)
        self._optimizer = self._find_optimizer()

    def _find_optimizer(self) -> _Part:
        return _Part(_optimizer_tensors(self._actor.optimizer), self._shelf, set(self._taken), 1_000_000,
                     self._actor.device)

    def offload_optimizer(self) -> None:
        """Optimizer state, master weights and gradient buffers: what generation and weight sync do not need."""
        if not self._optimizer.away:
            self._optimizer = self._find_optimizer()
        self._optimizer.offload()
        self._gradients.offload()
        release_free_memory(self._actor.device)

    def offload_actor(self) -> None:
        """The parameters, once the engines have them."""
        self._parameters.offload()
        release_free_memory(self._actor.device)

    def onload(self) -> None:
        """Everything back as it was; gradients are zero."""
        for part in (self._parameters, self._optimizer, self._gradients):
            part.onload()

    def nbytes(self) -> dict[str, int]:
        """Bytes of each part, wherever they are."""
        return {"parameters": self._parameters.nbytes, "gradients": self._gradients.nbytes,
                "optimizer": self._optimizer.nbytes}


class ActorsMemory:
    """The memory of several actors of one process (the policy and a frozen reference), handed over together."""

    def __init__(self, *actors: Any) -> None:
        self._actors = [ActorMemory(actor) for actor in actors]

    def offload_optimizer(self) -> None:
        for actor in self._actors:
            actor.offload_optimizer()

    def offload_actor(self) -> None:
        for actor in self._actors:
            actor.offload_actor()

    def onload(self) -> None:
        for actor in self._actors:
            actor.onload()


def release_free_memory(device: torch.device) -> None:
    """Gives what this process has freed back to the device or, on CPU, to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:  # glibc keeps freed memory for itself unless told otherwise; other C libraries have no such call
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _parameters(actor: Any) -> Iterator[Tensor]:
    yield from (parameter.data for parameter in actor.gpt.parameters())
    yield from (buffer.param_data for buffer in _ddp_buffers(actor) if buffer.param_data is not None)


def _gradients(actor: Any) -> Iterator[Tensor]:
    for buffer in _ddp_buffers(actor):
        if buffer.grad_data is not None:
            yield buffer.grad_data
        yield from getattr(buffer, "extra_main_grads", ())


def _ddp_buffers(actor: Any) -> list[Any]:
    """megatron's parameter and gradient buffers of dense and of expert parameters; none without an optimizer."""
    model = actor.model
    return [*getattr(model, "buffers", ()), *getattr(model, "expert_parallel_buffers", ())] if model is not actor.gpt \
        else []


def _optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """State and parameters (master weights, where they are copies) of every optimizer in megatron's chain."""
    if optimizer is None:
        return
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", None)
        if inner is None:
            continue
        for group in inner.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
