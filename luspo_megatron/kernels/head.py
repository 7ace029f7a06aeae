"""What the loss stage knows of the language-model head: options, vocabulary chunks, gradients.

Everything here is the same for every backend; the arithmetic on rows of logits is theirs (torch_rows, triton_rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from luspo_megatron.kernels.products import add_product, write_product

CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
"""Used when `chunk_bytes` is 0. On CUDA each chunk reads and writes the float32 [R, h] sum of d hidden once, which wide
chunks make rare; on the CPU wider chunks gain nothing."""

BLOCK_BYTES = 2 * 2**20
"""Rows of a chunk that the CPU's row arithmetic takes at a time: the passes over them find them in its caches."""


@dataclass(frozen=True)
class HeadOptions:
    """What one loss-stage call needs beside tensors.

    vocab_size: the true one, without padding rows. group: tensor parallel. chunk_bytes: working memory of one chunk of
    logits, 0: by device. cache_bytes: how much of the exponentials is kept for the backward, which then recomputes only
    the rest; -1: as much as the head's gradient takes, see `cache_budget`. backend: see `luspo_megatron.kernels.rows`.
    """

    vocab_size: int
    temperature: float = 1.0
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False
    chunk_bytes: int = 0
    cache_bytes: int = 0
    backend: Literal["auto", "torch", "triton"] = "auto"

    @property
    def tp(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)


@dataclass(frozen=True)
class Chunk:
    """Local rows start .. start + size of the head shard, whose first row has the global vocabulary id `first`."""

    start: int
    size: int
    first: int

    def of(self, weight: Tensor) -> Tensor:
        return weight[self.start : self.start + self.size]


def real_rows(weight: Tensor, options: HeadOptions) -> int:
    """How many local rows are vocabulary and not padding; 0 for a rank that is wholly padding."""
    return max(0, min(weight.shape[0], options.vocab_size - options.rank * weight.shape[0]))


def cache_budget(weight: Tensor, options: HeadOptions) -> int:
    """Bytes of exponentials that the forward may keep.

    With -1 as many as a gradient of the local head: it comes into being while the cache is used up and freed (where
    megatron's DDP keeps a main_grad, autograd still wants a tensor of that size in the end), so the peak of a step
    does not rise.
    """
    if options.cache_bytes >= 0:
        return options.cache_bytes
    return real_rows(weight, options) * weight.shape[1] * weight.element_size()


def bytes_per_logit(weight: Tensor) -> int:
    """Working memory: the logits in float32 (float64 for float64), and their gradient where it is a second buffer."""
    wide = torch.promote_types(weight.dtype, torch.float32).itemsize
    return wide + (weight.dtype.itemsize if weight.is_cuda or weight.dtype.itemsize < wide else 0)


def chunks(weight: Tensor, num_rows: int, options: HeadOptions, start: int = 0) -> Iterator[Chunk]:
    """The local vocabulary from row `start` on, in pieces whose [num_rows, size] logits fit the memory budget."""
    budget = options.chunk_bytes or CHUNK_BYTES.get(weight.device.type, CHUNK_BYTES["cuda"])
    size = budget // (max(1, num_rows) * bytes_per_logit(weight))
    size = max(128, size - size % 128)  # whole tiles of the matrix product
    real = real_rows(weight, options)
    for at in range(start, real, size):
        yield Chunk(at, min(size, real - at), options.rank * weight.shape[0] + at)


class Workspace:
    """Buffers that all chunks of one pass share on the CPU, where fresh large allocations cost page faults."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[int, Tensor] = {}

    def take(self, slot: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """[rows, columns], contents undefined, valid until the slot is taken again. Slot 0 holds the logits,
        slots 1 and 2 are the backend's."""
        if self.device.type == "cuda":
            return torch.empty((rows, columns), dtype=dtype, device=self.device)
        known = self._buffers.get(slot)
        if known is None or known.numel() < rows * columns or known.dtype != dtype:
            known = self._buffers[slot] = torch.empty(rows * columns, dtype=dtype)
        return known[: rows * columns].view(rows, columns)

    def clear(self) -> None:
        self._buffers.clear()


class HeadGradient:
    """Builds the head's gradient chunk by chunk, each row written once.

    Straight into fp32 `main_grad` where megatron's DDP made one, else into a tensor to be returned. Rows that are
    padding of the vocabulary get exactly 0.
    """

    def __init__(self, parameter: Any, needed: bool, real: int) -> None:
        self.parameter = parameter
        self.main_grad: Tensor | None = getattr(parameter, "main_grad", None) if needed else None
        self.grad: Tensor | None = None
        if needed and self.main_grad is None:
            self.grad = torch.empty_like(parameter)
            self.grad[real:] = 0

    def write(self, chunk: Chunk, g: Float[Tensor, "R C"], x: Float[Tensor, "R h"]) -> None:
        """Rows of the chunk = g.T @ x. Once per chunk."""
        if self.main_grad is not None:
            add_product(chunk.of(self.main_grad), g.t(), x)
        elif self.grad is not None:
            write_product(chunk.of(self.grad), g.t(), x)

    def add_rows(self, rows: Tensor, values: Float[Tensor, "n h"]) -> None:
        """Adds values to local rows that may repeat, in a fixed order (no atomics)."""
        target = self.main_grad if self.main_grad is not None else self.grad
        if target is not None:
            target.index_put_((rows,), values.to(target.dtype), accumulate=True)

    def result(self) -> Tensor | None:
        if self.main_grad is None:
            return self.grad
        # The convention of megatron's LinearWithGradAccumulation: DDP's hook must see a gradient, and adds it only for
        # tied heads (zero_out_wgrad), whose embedding gradient arrives by autograd.
        self.parameter.grad_added_to_main_grad = True
        if getattr(self.parameter, "zero_out_wgrad", False):
            return torch.zeros_like(self.parameter)
        return torch.empty_like(self.parameter)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], without a copy where the rising index names every row."""
    return x if index.shape[0] == x.shape[0] else x[index]


def gather_rows(hidden: Tensor, options: HeadOptions) -> Tensor:
    """[Ts, h] -> [T, h]"""
    if not options.sequence_parallel or options.tp == 1:
        return hidden
    full = hidden.new_empty((hidden.shape[0] * options.tp, *hidden.shape[1:]))
    dist.all_gather_into_tensor(full, hidden.contiguous(), group=options.group)
    return full


def scatter_rows(grad_rows: Tensor, row_index: Tensor, num_rows: int, hidden: Tensor, options: HeadOptions) -> Tensor:
    """[active rows, h], partial over the vocabulary -> gradient of `hidden`, summed over the tensor-parallel ranks."""
    full = grad_rows
    if row_index.shape[0] < num_rows:
        full = grad_rows.new_zeros((num_rows, grad_rows.shape[1]))
        full[row_index] = grad_rows
    if options.tp > 1:
        if options.sequence_parallel:
            part = full.new_empty(hidden.shape)
            dist.reduce_scatter_tensor(part, full, group=options.group)
            full = part
        else:
            dist.all_reduce(full, group=options.group)
    return full.to(hidden.dtype)
