"""The loss stage's matrix products, each with the fastest routine that accumulates in the wanted precision.

CUDA: cuBLAS with float32 results of bfloat16 operands. CPU: torch.mm, but large float32 products by oneDNN where the
processor has AVX-512: torch's MKL takes AVX2 kernels on AMD's processors, half as fast. torch has no public name for
oneDNN's float32 product of dense tensors; the operator used here is the one its compiler calls for linear layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

ROWS = 256
"""Of a product by oneDNN at a time."""

LARGE = 2**24
"""Multiply-adds from which oneDNN is asked: what it builds once for each shape (0.5 ms, 0.5 MB) pays from here on."""


@functools.cache
def onednn_is_faster() -> bool:
    return (torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
            and hasattr(torch.ops.mkldnn, "_linear_pointwise"))


def _by_onednn(a: Tensor, b: Tensor) -> bool:
    return (a.dtype == b.dtype == torch.float32 and a.device.type == "cpu"
            and a.shape[0] * a.shape[1] * b.shape[1] >= LARGE and onednn_is_faster())


def _onednn(place: Tensor, a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of `place`, each with a @ b of it. oneDNN's results lie in new memory: taken a few rows at a time they are
    small and of few sizes, where chunks of a size of their own in each micro-batch would tear the heap to pieces. It
    copies a left operand that is not contiguous: for a transposed chunk of logits (b.T @ a.T).T copies the hidden rows
    instead."""
    if not a.is_contiguous():
        place, a, b = place.t(), b.t(), a.t()
    for part, rows in zip(place.split(ROWS), a.split(ROWS), strict=True):
        yield part, torch.ops.mkldnn._linear_pointwise(rows, b.t(), None, "none", [], "")


def product(a: Float[Tensor, "n k"], b: Float[Tensor, "k m"], dtype: torch.dtype,
            place: Tensor | None = None) -> Float[Tensor, "n m"]:
    """a @ b accumulated and returned in `dtype`, which is the inputs' or float32; in `place` on the CPU."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    place = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype) if place is None else place
    write_product(place, a.to(dtype), b.to(dtype))
    return place


def write_product(place: Tensor, a: Tensor, b: Tensor) -> None:
    """place = a @ b, all of one dtype."""
    if _by_onednn(a, b):
        for part, values in _onednn(place, a, b):
            part.copy_(values)
    else:
        torch.mm(a, b, out=place)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, accumulated in the dtype of `total`."""
    if total.dtype != a.dtype:
        if total.is_cuda:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:  # bfloat16: the product is rounded once, in return for the CPU's bfloat16 instructions
            total.add_(a @ b)
    elif _by_onednn(a, b):
        for part, values in _onednn(total, a, b):
            part.add_(values)
    else:
        total.addmm_(a, b)
